"""What a polite owner of a Tinker server keeps of its speed beside a greedy one, and whether its weights stay the same.

    python benchmarks/fairness.py                         # beside greedy sampling, greedy training and both
    python benchmarks/fairness.py --iterations 60 --turns 5

The polite owner makes iterations of an RL loop, one call after the other: sample 8 completions, one forward_backward of
8 rows, one optim_step. The greedy one holds 24 requests open all the time (16 completions of 64 tokens each; 32 rows of
128 tokens each), in a process of its own with a key of its own. Each turn runs the same iterations alone and beside
each greedy owner, from the same seed; the share is the time alone over the time beside, and the bits of the adapter
after the last iteration must be those of the run alone. Needs the extras [train,serve,tinker].
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kit")]
POLITE, GREEDY = "tml-polite-0001", "tml-greedy-0001"
OPEN_REQUESTS = 24
SIDES = {"greedy sampling": ("sample",), "greedy training": ("train",), "both": ("sample", "train")}


def service(url: str, key: str) -> Any:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker

    return tinker.ServiceClient(base_url=url, api_key=key)


def iterate(client: Any, iterations: int, warm_up: int = 3) -> tuple[float, str]:
    """(seconds of the iterations after the warm-up, path of the saved state)."""
    import tinker

    from benchmarks.tinker_server import rows

    trainer = client.create_lora_training_client(base_model="model", rank=16, seed=7).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints([j % 300 for j in range(64)])
    how = tinker.SamplingParams(max_tokens=16, temperature=1.0, stop=[], seed=1)
    data, begun = rows(tinker, 8, 64), 0.0
    for number in range(warm_up + iterations):
        if number == warm_up:
            begun = time.perf_counter()
        sampler.sample(prompt, 8, how).result()
        trainer.forward_backward(data, "cross_entropy").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
    took = time.perf_counter() - begun
    return took, trainer.save_state("end").result().path


def be_greedy(url: str, kind: str) -> None:
    """Hold OPEN_REQUESTS requests open until this process is ended."""
    import tinker

    from benchmarks.tinker_server import rows

    trainer = service(url, GREEDY).create_lora_training_client(base_model="model", rank=16).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints([j % 290 for j in range(64)])
    data = rows(tinker, 32, 128)
    asked: deque[Any] = deque()
    for number in range(1_000_000):
        if kind == "sample":
            how = tinker.SamplingParams(max_tokens=64, temperature=1.0, stop=[], seed=number)
            asked.append(sampler.sample(prompt, 16, how))
        else:
            asked.append(trainer.forward_backward(data, "cross_entropy"))
        if len(asked) == OPEN_REQUESTS:
            asked.popleft().result()
            if number < 2 * OPEN_REQUESTS:
                print("busy", flush=True)


def hash_adapter(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--greedy", nargs=2, metavar=("URL", "KIND"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.greedy:
        return be_greedy(*asked.greedy)

    from benchmarks.tinker_server import write_random
    from tests.kit.tinker_server import TinkerServer

    shares: dict[str, list[float]] = {name: [] for name in SIDES}
    hashes: set[str] = set()
    with tempfile.TemporaryDirectory() as scratch:
        folder, state = Path(scratch) / "model", Path(scratch) / "state"
        write_random(folder, "3m")
        with TinkerServer({"model": folder}, state, keys=f"{POLITE},{GREEDY}") as server:
            client = service(server.url, POLITE)
            for turn in range(asked.turns):
                alone, path = iterate(client, asked.iterations)
                hashes.add(hash_adapter(Path(server.saved(path))))
                print(f"turn {turn + 1}: alone {asked.iterations / alone:.2f} iterations/s", flush=True)
                for name, kinds in SIDES.items():
                    command = [sys.executable, __file__, "--greedy", server.url]
                    others = [subprocess.Popen([*command, kind], stdout=subprocess.PIPE, text=True) for kind in kinds]
                    try:
                        for other in others:
                            assert other.stdout is not None
                            other.stdout.readline()
                        took, path = iterate(client, asked.iterations)
                    finally:
                        for other in others:
                            other.kill()
                            other.wait()
                    hashes.add(hash_adapter(Path(server.saved(path))))
                    shares[name].append(alone / took)
                    print(f"turn {turn + 1}: beside {name}: {alone / took:.2f} of the speed alone", flush=True)
                    wait_until_idle(client)
    for name, found in shares.items():
        print(f"beside {name:16} {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}) of alone")
    print(f"adapters with other bits than the first: {len(hashes) - 1}")


def wait_until_idle(client: Any) -> None:
    """The requests that a killed owner left are still computed: wait until one token takes no time."""
    import tinker

    sampler = client.create_sampling_client(base_model="model")
    how = tinker.SamplingParams(max_tokens=1, temperature=1.0, stop=[], seed=1)
    quick = 0
    while quick < 5:
        begun = time.perf_counter()
        sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, how).result()
        quick = quick + 1 if time.perf_counter() - begun < 0.2 else 0
        time.sleep(0.5)


if __name__ == "__main__":
    main()
