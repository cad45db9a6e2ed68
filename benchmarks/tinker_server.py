"""The Tinker server beside the engine in this process: the same calls through the SDK and without it, in one run.

    python benchmarks/tinker_server.py                                  # a random model of 3 million parameters
    python benchmarks/tinker_server.py --size 0.5b --dtype bfloat16     # of half a billion: for a GPU
    python benchmarks/tinker_server.py --model FOLDER

Training: tokens/s of forward_backward and optim_step, both sent before either is awaited. Sampling: tokens/s of one
prompt with n=16, of 16 prompts at once with n=1, and of 8 at once with n=4; and the time of a single token. The two
sides take turns, so that other load on the machine affects both; the ratio is the median of the turns'. Needs the
extras [train,serve,tinker]. `tests/tinker_server/test_tinker_sdk.py` checks that both sides compute the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kit")]  # the servers that the tests start
SIZES: dict[str, dict[str, int]] = {
    "3m": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 768,
    },
    "0.5b": {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072,
    },
}  # fmt: skip
Job = Callable[[Any, Any, Any], int]


def write_random(folder: Path, size: str, context: int = 2_048) -> None:
    """Write a random model with the tests' tokenizer; its steps cost what a trained model's do."""
    from rlvr.engine.model_loading import build_model
    from tests.kit.tinker_model import CONFIG, tokenizer

    words = tokenizer()
    vocabulary = 151_936 if size == "0.5b" else 4_096
    config = {**CONFIG, **SIZES[size], "vocab_size": vocabulary, "max_position_embeddings": context}
    build_model(config, words, seed=1, device="cpu", dtype="float32").module.save_pretrained(folder)
    words.save_pretrained(folder)


def rows(sdk: Any, count: int, length: int) -> list[Any]:
    rng = np.random.default_rng(0)
    data: list[Any] = []
    for _ in range(count):
        tokens = rng.integers(0, 300, length + 1).tolist()
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
        data.append(sdk.Datum(model_input=sdk.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def training(count: int, length: int) -> Job:
    def job(sdk: Any, trainer: Any, sampler: Any) -> int:
        back = trainer.forward_backward(data.setdefault(sdk, rows(sdk, count, length)), "cross_entropy")
        step = trainer.optim_step(sdk.AdamParams(learning_rate=1e-4))
        back.result()
        step.result()
        return count * length

    data: dict[Any, list[Any]] = {}
    return job


def sampling(prompts: int, each: int, tokens: int) -> Job:
    def job(sdk: Any, trainer: Any, sampler: Any) -> int:
        how = sdk.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[], seed=1)
        asked = [sdk.ModelInput.from_ints([(7 * i + j) % 300 for j in range(64)]) for i in range(prompts)]
        futures = [sampler.sample(prompt, each, how) for prompt in asked]
        return sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)

    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="3m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(asked.threads))

    import tinker
    import torch

    from rlvr.clients import local
    from tests.kit.tinker_server import TinkerServer

    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.model or Path(scratch) / "model"
        if asked.model is None:
            write_random(folder, asked.size)
        where = {"device": asked.device, "dtype": asked.dtype}
        options = [part for name, value in where.items() for part in (f"--{name}", value)]
        with TinkerServer({"model": folder}, Path(scratch) / "state", *options) as server:
            print(server.said.splitlines()[0])
            over = tinker.ServiceClient(base_url=server.url, api_key=server.key)
            here = local.ServiceClient(folder=Path(scratch) / "local", **where)
            trainers = {
                "server": (tinker, over.create_lora_training_client(base_model="model", rank=16).result()),
                "in process": (local, here.create_lora_training_client(base_model=str(folder), rank=16).result()),
            }
            sides = {
                name: (sdk, trainer, trainer.save_weights_and_get_sampling_client().result())
                for name, (sdk, trainer) in trainers.items()
            }
            jobs = {
                f"forward_backward + optim_step, {asked.rows} x {asked.length}": training(asked.rows, asked.length),
                "sample 1 prompt, n=16": sampling(1, 16, asked.tokens),
                "sample 16 prompts at once, n=1": sampling(16, 1, asked.tokens),
                "sample 8 prompts at once, n=4": sampling(8, 4, asked.tokens),
                "one token": sampling(1, 1, 1),
            }
            for what, job in jobs.items():
                report(what, job, sides, asked.repeats)
            over.close("success").result()


def report(what: str, job: Job, sides: dict[str, tuple[Any, Any, Any]], repeats: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):  # the first one warms up
        for name, side in sides.items():
            begun = time.perf_counter()
            count = job(*side)
            if turn:
                rates[name].append(count / (time.perf_counter() - begun))
    server, process = (statistics.median(rates[name]) for name in ("server", "in process"))
    ratio = statistics.median(a / b for a, b in zip(rates["server"], rates["in process"], strict=True))
    if what == "one token":
        print(f"{what:42} server {1e3 / server:8.1f} ms        in process {1e3 / process:8.1f} ms")
        return
    print(f"{what:42} server {server:8.0f} tokens/s  in process {process:8.0f} tokens/s  ratio {ratio:5.2f}")


if __name__ == "__main__":
    main()
