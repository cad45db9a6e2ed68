"""Sides of benchmarks for tests/benchmarks/test_bench.py: functions of a module, which can be pickled."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import partial

from benchmarks.measure import BenchmarkCase, SideUnavailable, TurnResult


def counting(units: float, seconds: float, cost: float = 0.0) -> Callable[[], TurnResult]:
    """Return the given figures, with the side's process, threads and turn as `facts`."""
    turns: list[int] = []

    def turn() -> TurnResult:
        turns.append(1)
        facts = {"process": os.getpid(), "threads": float(os.environ["OMP_NUM_THREADS"]), "turn": len(turns)}
        facts["usual start"] = float(multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0])
        return TurnResult(units, seconds, cost, facts, ((seconds, float(len(turns))),))

    return turn


def fixed_turn() -> Callable[[], TurnResult]:
    """A turn that the harness times."""
    return partial(TurnResult, 1.0)


def missing() -> Callable[[], TurnResult]:
    import a_package_that_nobody_has  # pyright: ignore[reportMissingImports]

    return a_package_that_nobody_has.turn


def absent() -> Callable[[], TurnResult]:
    raise SideUnavailable("this machine has no unicorn")


def breaks(at: int, how: str = "raises") -> Callable[[], TurnResult]:
    """Fail in turn `at` (turn 1 is the warm-up)."""
    turns: list[int] = []

    def turn() -> TurnResult:
        turns.append(1)
        if len(turns) == at:
            print("something dreadful", flush=True)
            if how == "dies":
                os._exit(3)
            raise RuntimeError("no more")
        return TurnResult(1.0, 1.0)

    return turn


def case(**peers: Callable[[], Callable[[], TurnResult]]) -> BenchmarkCase:
    return BenchmarkCase("sums", "sums", "some work", partial(counting, 12, 2.0, 30.0), peers)
