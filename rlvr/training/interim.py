"""What follows from the interim evaluations of a run: which policy is the best, and whether learning levelled off.

Everything is a function of the rows of `metrics.jsonl`, so a resumed run decides what an uninterrupted one decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlvr.core.task_statistics import Z95, Interval
from rlvr.training.metric_values import Rows, get_value, select_rl_rows

PASS_RATE = "test/env/all/correct"  # its interval is in PASS_RATE/low and PASS_RATE/high
MEAN_REWARD = "test/env/all/reward/total"


@dataclass(frozen=True)
class InterimResult:
    """The pass rate and mean reward on the validation tasks after `step` steps of reinforcement learning."""

    step: int
    pass_rate: Interval
    reward: float = -math.inf  # of rows without one

    @property
    def noise_bound(self) -> float:
        """The pass rate from which a later evaluation is better by more than noise: one standard error above this one.

        The standard error of the mean over tasks is a half of the 95 % interval's width over 1.96.
        """
        return self.pass_rate.value + (self.pass_rate.high - self.pass_rate.low) / (2 * Z95)


def read_interim_results(rows: Rows) -> list[InterimResult]:
    """The interim evaluations of reinforcement learning; rows without an interval (of older versions) are left out."""
    results: list[InterimResult] = []
    for row in select_rl_rows(rows):
        value, low, high = (get_value(row, PASS_RATE + end) for end in ("", "/low", "/high"))
        interval = Interval(value, low, high)
        if 0 <= interval.low <= interval.value <= interval.high <= 1:  # false for a missing value, which is nan
            reward = get_value(row, MEAN_REWARD)
            results.append(InterimResult(int(row["step"]) + 1, interval, -math.inf if math.isnan(reward) else reward))
    return results


def find_best(results: Iterable[InterimResult]) -> InterimResult | None:
    """The result with the highest pass rate, of equal ones that with the highest mean reward, then the earliest.

    (Of a reward that no completion earns whole, every pass rate is 0.) None without any result.
    """
    return max(results, key=lambda result: (result.pass_rate.value, result.reward), default=None)


def describe_plateau(results: Sequence[InterimResult], patience: int) -> str:
    """Why reinforcement learning has levelled off, '' if it has not.

    It has after `patience` evaluations in a row (0: never) without a new best beyond noise. Small gains add up: they
    are measured from the last such best.
    """
    best, since = None, 0
    for result in results:
        if best is None or result.pass_rate.value > best.noise_bound:
            best, since = result, 0
        else:
            since += 1
    if best is None or not 0 < patience <= since:
        return ""
    return (
        f"plateau: {since} interim evaluations in a row without a pass rate above {100 * best.noise_bound:.1f}%, one "
        f"standard error more than the {100 * best.pass_rate.value:.1f}% after step {best.step} (training.patience)"
    )
