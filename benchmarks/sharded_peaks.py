"""What processes of this machine reach when all of them compute: the figures that `rlvr plan` is given for it.

    measure_peaks(ranks=2).flops      # a process multiplies matrices, while the other does the same

Medians, of one thread a process. Run by `python -m benchmarks.sharded_memory`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlvr.clients.sharded.rank_processes import RankProcesses
from rlvr.clients.sharded.rank_worker import RankWorker, run_rank
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.clients.sharded.split_call import open_group

REPEATS = 7


@dataclass(frozen=True)
class MachinePeaks:
    """Of one process: float32 operations, bytes read from memory and bytes received from the others a second, and the
    MiB that Python and torch take."""

    flops: float
    memory: float
    network: float
    libraries: float


class PeakWorker(RankWorker):
    """Commands that measure, on ranks that have met each other."""

    def multiply(self, tokens: int, width: int, inner: int) -> float:
        import torch

        left, right = torch.randn(tokens, width), torch.randn(width, inner)
        return 20 * 2 * tokens * width * inner / _time(lambda: [left @ right for _ in range(20)])

    def read(self, count: int) -> float:
        import torch

        numbers = torch.ones(count)
        return 4 * count / _time(lambda: numbers.sum())

    def measure_libraries(self) -> float:
        """MiB of this process with all that a rank imports, and no model."""
        import transformers.models.qwen3.modeling_qwen3  # noqa: F401

        import rlvr.engine.learner  # noqa: F401

        return self.measure_memory()["now"]

    def exchange(self, count: int) -> float:
        """Gather `count` float32 from all ranks twice and add them up once, as weights and gradients are; the bytes a
        second that come from the others."""
        import torch
        import torch.distributed as dist

        size = self.ranks.size
        mine = torch.ones(count // size)

        def pass_on() -> None:
            for _ in range(2):
                dist.all_gather_single(whole := torch.empty(size * len(mine)), mine)
            dist.reduce_scatter_single(torch.empty_like(mine), whole)

        return 3 * 4 * max(1, size - 1) * len(mine) / _time(pass_on)


def _time(call: Callable[[], object]) -> float:
    """Median seconds of a call, after one that is not counted."""
    seconds: list[float] = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def measure_peaks(ranks: int, tokens: int, width: int, inner: int) -> MachinePeaks:
    """Of the slowest of so many processes, all at work; matrices of `tokens` x `width` and `width` x `inner`."""
    start = lambda options: RankProcesses(options.ranks, "benchmarks.sharded_peaks")  # noqa: E731
    group = open_group(ShardingOptions(ranks), "cpu", 1, start)
    try:
        return MachinePeaks(
            flops=min(group.call("multiply", tokens=tokens, width=width, inner=inner)),
            memory=min(group.call("read", count=1 << 26)),
            network=min(group.call("exchange", count=1 << 23)),
            libraries=max(group.call("measure_libraries")),
        )
    finally:
        group.close()


if __name__ == "__main__":
    run_rank(PeakWorker())
