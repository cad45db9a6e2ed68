"""Sides of benchmarks for tests/test_bench.py: module functions, as they cross into processes of their own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from functools import partial

from rlvr.bench.measure import Absent, Case, Done


def counting(units: float, seconds: float, cost: float = 0.0) -> Callable[[], Done]:
    """Says what it is told to say, and who and when it is: in `facts` its process, threads and turn."""
    turns: list[int] = []

    def turn() -> Done:
        turns.append(1)
        facts = {"process": os.getpid(), "threads": float(os.environ["OMP_NUM_THREADS"]), "turn": len(turns)}
        facts["usual start"] = float(multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0])
        return Done(units, seconds, cost, facts, ((seconds, float(len(turns))),))

    return turn


def timed() -> Callable[[], Done]:
    """Leaves the clock to the harness."""
    return partial(Done, 1.0)


def missing() -> Callable[[], Done]:
    import a_package_that_nobody_has  # pyright: ignore[reportMissingImports]

    return a_package_that_nobody_has.turn


def absent() -> Callable[[], Done]:
    raise Absent("this machine has no unicorn")


def breaks(at: int, how: str = "raises") -> Callable[[], Done]:
    """Fails in turn `at` (from 1, the warm-up)."""
    turns: list[int] = []

    def turn() -> Done:
        turns.append(1)
        if len(turns) == at:
            print("something dreadful", flush=True)
            if how == "dies":
                os._exit(3)
            raise RuntimeError("no more")
        return Done(1.0, 1.0)

    return turn


def case(**peers: Callable[[], Callable[[], Done]]) -> Case:
    return Case("sums", "sums", "some work", partial(counting, 12, 2.0, 30.0), peers)
