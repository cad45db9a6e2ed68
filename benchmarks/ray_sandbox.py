"""MBPP's references and mutants of them judged on a Ray cluster of this machine, beside the sandbox without Ray.

    python -m benchmarks.ray_sandbox --data mbpp.jsonl                   # rows of MBPP: code, test_list
    python -m benchmarks.ray_sandbox --data mbpp.jsonl --every 10 --rounds 1

First every reference and one mutant of each (an operator or constant changed) is judged by two workers here, by two on
Ray, and by two on Ray of which one is killed on the way: the verdicts have to be equal, in the same order. Programs
that ran out of time on one side alone are counted apart, since that depends on what else the machine does. Then the
references are judged in turns by one and two workers on both sides, each round by new workers; the table has programs a
second, the median with the least and the most. Exits with 1 if a verdict differs. Needs `pip install 'rlvr[ray]'`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.workloads import read_rows
from rlvr.core.types import Outcome
from rlvr.sandbox import Limits, Sandbox, Verdict
from rlvr.sandbox.ray_sandbox import RaySandbox
from rlvr.sandbox.supervisor import TIERS

SECONDS = 5.0  # for a program


def read_jobs(data: Path, every: int) -> list[dict[str, Any]]:
    rows = read_rows(data, {"code", "test_list"}, "rows of MBPP (code, test_list)")[::every]
    return [
        {"solution": row["code"], "tests": row["test_list"], "setup": row.get("test_setup_code", "")} for row in rows
    ]


def open_sandbox(on_ray: bool, workers: int, tier: str | None = None) -> Sandbox:
    limits, tiers = Limits(timeout_s=SECONDS), (tier,) if tier else TIERS
    if on_ray:
        return RaySandbox("local", tiers, workers, limits)
    return Sandbox(tiers, workers, limits)


def verify_with_kill(sandbox: Sandbox, jobs: list[dict[str, Any]], after: float) -> list[Verdict]:
    """Kill one worker so many seconds after the beginning."""
    victim = sandbox.pids[0]
    killer = threading.Timer(after, os.kill, (victim, signal.SIGKILL))
    killer.start()
    verdicts = sandbox.verify_many(jobs)
    assert not killer.is_alive() and victim not in sandbox.pids, "the worker was not killed in time"
    return verdicts


def compare(name: str, expected: list[Verdict], found: list[Verdict]) -> int:
    """Print how many verdicts are equal but for their seconds; the number of those that differ."""
    pairs = [(replace(one, seconds=0.0), replace(two, seconds=0.0)) for one, two in zip(expected, found, strict=True)]
    unequal = [pair for pair in pairs if pair[0] != pair[1]]
    late = [pair for pair in unequal if Outcome.TIMEOUT in (pair[0].outcome, pair[1].outcome)]
    wrong = [pair for pair in unequal if pair not in late]
    passed = sum(verdict.passed for verdict in found)
    print(f"{name}: {len(pairs)} verdicts, {passed} passed, {len(late)} out of time on one side, {len(wrong)} differ")
    for one, two in wrong[:5]:
        print(f"  {one}\n  {two}")
    return len(wrong)


def measure_speed(jobs: list[dict[str, Any]], rounds: int) -> None:
    rates: dict[tuple[bool, int], list[float]] = {(on_ray, n): [] for on_ray in (False, True) for n in (1, 2)}
    for _ in range(rounds):
        for (on_ray, workers), found in rates.items():
            with open_sandbox(on_ray, workers) as sandbox:
                sandbox.verify_many(jobs[:8])
                began = time.perf_counter()
                sandbox.verify_many(jobs)
                found.append(len(jobs) / (time.perf_counter() - began))
            print(f"{workers} workers{' on Ray' * on_ray}: {found[-1]:.0f} programs/s", file=sys.stderr, flush=True)
    print(f"\n| workers | programs/s of {len(jobs)} references | on Ray |\n|--:|--:|--:|")
    for workers in (1, 2):
        cells = [rates[on_ray, workers] for on_ray in (False, True)]
        shown = [f"{statistics.median(cell):.0f} ({min(cell):.0f} to {max(cell):.0f})" for cell in cells]
        print(f"| {workers} | {' | '.join(shown)} |", flush=True)


def compare_verdicts(references: list[dict[str, Any]]) -> int:
    """The number of verdicts that differ between Ray and this machine."""
    from tests.kit.mutants import mutants

    jobs = [*references, *mutants(references)]
    with open_sandbox(False, 2) as here:
        expected = here.verify_many(jobs)
        tier = here.tier
    with open_sandbox(True, 2, tier) as sandbox:
        began = time.perf_counter()
        found = sandbox.verify_many(jobs)
        seconds = time.perf_counter() - began
        differing = compare("two workers on Ray", expected, found)
        return differing + compare("one of them killed", expected, verify_with_kill(sandbox, jobs, seconds / 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a file of MBPP, as mbpp.jsonl")
    parser.add_argument("--every", type=int, default=1, help="take every so many rows")
    parser.add_argument("--rounds", type=int, default=5, help="of the speed; 0 compares verdicts alone")
    parser.add_argument("--only-speed", action="store_true", help="compare no verdicts")
    given = parser.parse_args()
    references = read_jobs(given.data, given.every)
    differing = 0 if given.only_speed else compare_verdicts(references)
    if given.rounds:
        measure_speed(references, given.rounds)
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
