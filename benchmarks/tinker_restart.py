"""How long clients of the Tinker server wait when it is killed and started again while they train and sample.

    python benchmarks/tinker_restart.py                 # ten kills, a random model of 0.1 million parameters
    python benchmarks/tinker_restart.py --kills 3 --size 3m

One client trains (`forward_backward` and `optim_step`, three steps under way), another samples without pause. The
server is killed by SIGKILL at a random moment and started at once by the same command, in a new interpreter. A client's
wait is the time from the kill to its next result. Figures move with other load on the machine. Only time is measured
here; tests/tinker_server/test_tinker_restart.py checks that nothing is lost.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

AHEAD = 3  # requests under way
LENGTH = 32  # tokens of a sample


class TimedClient:
    """A client that works without pause, and the time of its last result."""

    def __init__(self, url: str, key: str) -> None:
        import tinker

        self.service = tinker.ServiceClient(base_url=url, api_key=key)
        self.results, self.last = 0, 0.0
        self.error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _work(self) -> None:
        waiting: deque[Any] = deque()
        try:
            while not self._over.is_set():
                waiting.append(self.submit())
                if len(waiting) == AHEAD:
                    waiting.popleft().result()
                    self.results, self.last = self.results + 1, time.perf_counter()
            while waiting:
                waiting.popleft().result()
        except BaseException as error:
            self.error = error

    def submit(self) -> Any:
        raise NotImplementedError

    def wait_for_result(self, after: float, timeout: float = 120.0) -> float:
        """The time of the first result that is seen after `after`."""
        until = time.perf_counter() + timeout
        while self.last <= after:
            if self.error is not None:
                raise self.error
            if time.perf_counter() > until:
                raise TimeoutError(f"no result within {timeout:g} s")
            time.sleep(0.002)
        return self.last

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)
        self.service.close("success").result()


class TrainingLoopClient(TimedClient):
    def __init__(self, url: str, key: str) -> None:
        import tinker

        super().__init__(url, key)
        self._trainer = self.service.create_lora_training_client(base_model="model", rank=8).result()
        tokens = list(range(1, 33))
        inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": [1.0] * 31}
        self._row = tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        self._adam = tinker.AdamParams(learning_rate=1e-4)

    def submit(self) -> Any:
        self._trainer.forward_backward([self._row] * 4, "cross_entropy")
        return self._trainer.optim_step(self._adam)


class SamplingLoopClient(TimedClient):
    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key)
        self._sampler = self.service.create_sampling_client(base_model="model").result()

    def submit(self) -> Any:
        from tinker import types

        params = types.SamplingParams(max_tokens=LENGTH, stop=[])
        return self._sampler.sample(types.ModelInput.from_ints([1, 2, 3]), 4, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--size", default="tiny", help="tiny, or a size of benchmarks/tinker_server.py: 3m, 0.5b")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    from tests.kit.server_process import FRESH
    from tests.kit.tinker_model import write_model
    from tests.kit.tinker_server import TinkerServer

    dice, waits = random.Random(asked.seed), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        if asked.size == "tiny":
            write_model(folder)
        else:
            from benchmarks.tinker_server import write_random

            write_random(folder, asked.size)
        server = TinkerServer({"model": folder}, Path(scratch) / "state")
        server.command = FRESH
        with server:
            clients = {
                "the client that trains": TrainingLoopClient(server.url, server.key),
                "the client that samples": SamplingLoopClient(server.url, server.key),
            }
            for client in clients.values():
                client.start()
            for _ in range(asked.kills):
                before = time.perf_counter()
                for client in clients.values():
                    client.wait_for_result(before)
                time.sleep(dice.random())
                server.kill()
                killed = time.perf_counter()
                server.start()
                waits.setdefault("start to ready", []).append(server.started_after)
                for name, client in clients.items():
                    waits.setdefault(name, []).append(client.wait_for_result(killed) - killed)
                print("  ".join(f"{name} {seconds[-1]:5.2f} s" for name, seconds in waits.items()), flush=True)
            for client in clients.values():
                client.close()
    print(f"\nseconds over {asked.kills} kills:  median  (least to most)")
    for name, seconds in waits.items():
        print(f"{name:26} {statistics.median(seconds):6.2f}  ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    main()
