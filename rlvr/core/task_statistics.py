"""Intervals of rates and means over tasks, and the paired test of two evaluations.

Several completions of one task are not independent, so the task is the unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from rlvr.core.types import mean, std

Z95 = 1.959963984540054
MOST_ADDITIONS = 2 * 10**8  # of the exact signed-rank test: less than a second


@dataclass(frozen=True)
class Interval:
    """An estimate over `n` tasks with its 95 % confidence interval. What is not known is nan, an unknown `n` 0."""

    value: float
    low: float
    high: float
    n: int = 0

    def to_json(self) -> dict[str, Any]:
        """The fields; an unknown number is None."""
        return {key: None if math.isnan(value) else value for key, value in asdict(self).items()}


def t_quantile(share: float, degrees: Any) -> Any:
    """The quantile of Student's t distribution; the degrees of freedom are a number or an array.

    The angle atan(t / sqrt(v)) has a density proportional to cos^(v - 1), which is integrated by Gauss and Legendre.
    Newton's method begins at the normal quantile, below the root, and nears it from there: the density falls.
    """
    v = np.asarray(degrees, dtype=np.float64)
    nodes, weights = _gauss_legendre()

    def area(angle: Any) -> Any:
        return angle * (np.cos(angle[..., None] * nodes) ** (v[..., None] - 1) @ weights)

    wanted = 2 * abs(share - 0.5) * area(np.minimum(math.pi / 2, 10 / np.sqrt(v)))  # beyond that there is nothing
    angle = np.arctan(NormalDist().inv_cdf(0.5 + abs(share - 0.5)) / np.sqrt(v))
    for _ in range(10):
        angle = angle + (wanted - area(angle)) / np.cos(angle) ** (v - 1)
    return math.copysign(1.0, share - 0.5) * np.sqrt(v) * np.tan(angle)


@cache
def _gauss_legendre() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(50)
    return (nodes + 1) / 2, weights / 2


def share_interval(values: Sequence[float], counts: Sequence[float] | None = None) -> Interval:
    """The mean of one value in [0, 1] a task, with the interval of `cluster_interval`.

    `counts` are the numbers of independent trials that each value is a share of; None means one a task.
    """
    n, p = len(values), mean(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    trials = n if counts is None else n / mean([1 / count for count in counts])
    return cluster_interval(p, std(values) ** 2 / max(n - 1, 1), n, n, trials)


def cluster_interval(p: float, variance: float, tasks: int, least: float, most: float) -> Interval:
    """Wilson's interval of a rate over completions of `tasks` tasks, at the effective number of independent trials.

    That is p(1-p) / `variance`, with the variance of the rate between tasks, times (1.96 / t)^2 with t's quantile at
    tasks - 1 degrees of freedom, since the variance is estimated (Korn and Graubard 1998, "Confidence intervals for
    proportions with small expected number of positive counts estimated from survey data"). It is kept within `least`,
    as if the completions of each task were all alike, and `most`, as if they were independent: so the interval is never
    narrower than the binomial one. Where all passed or failed, the completions of a task may all be alike.
    """
    effective = float(tasks)
    if 0 < p < 1 and tasks > 1:
        effective = most
        if variance > 0:
            effective = p * (1 - p) / variance * (Z95 / float(t_quantile(0.975, tasks - 1))) ** 2
        effective = min(max(effective, least), most)
    return wilson_interval(p, effective, tasks)


def wilson_interval(p: float, trials: float, n: int | None = None) -> Interval:
    """The 95 % interval of a share p of independent trials. Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953.

    `n` is what the interval states as its number, None for that of the trials.
    """
    centre = (p + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    half = Z95 / (1 + Z95**2 / trials) * math.sqrt(p * (1 - p) / trials + Z95**2 / (4 * trials**2))
    low, high = max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))
    return Interval(p, low, high, int(trials) if n is None else n)


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean with Student's 95 % interval, mean +- t(n-1) s / sqrt(n). One value has a mean and no interval."""
    n = len(values)
    if n < 2:
        return Interval(values[0] if values else math.nan, math.nan, math.nan, n)
    half = float(t_quantile(0.975, n - 1)) * std(values) / math.sqrt(n - 1)
    return Interval(mean(values), mean(values) - half, mean(values) + half, n)


def signed_rank_p_value(changes: Sequence[float]) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test, zeros by Pratt.

    All sizes of change are ranked, zeros too, and then the ranks of zeros are left out (Pratt 1959,
    https://doi.org/10.1080/01621459.1959.10501526). The distribution over all signs is exact while it takes at most
    200 million additions, as for 580 changes of 580 tasks or 100 of 10,000. Beyond that the number of losses is
    binomial and the sum of their ranks normal, with corrections for ties and continuity.
    """
    _, place, counts = np.unique(np.abs(changes), return_inverse=True, return_counts=True)
    ranks = (2 * np.cumsum(counts) - counts + 1)[place]  # doubled, so that ties have whole ones too
    signs = np.sign(changes).astype(np.int64)
    ranks, signs = ranks[signs != 0], signs[signs != 0]
    if not len(ranks):
        return 1.0
    ranks //= np.gcd.reduce(ranks)
    distance = abs(int(ranks @ signs))
    if len(ranks) * int(ranks.sum()) > MOST_ADDITIONS:
        return approximate_rank_p_value(ranks, distance)
    return exact_rank_p_value(ranks, distance)


def exact_rank_p_value(ranks: np.ndarray, distance: int) -> float:
    """The chance that |sum of +-ranks| is at least `distance` if every sign is a fair coin. Sums share one parity."""
    most = (int(ranks.sum()) - distance) // 2  # the sum of the negative ranks of one tail
    chances, reach = np.zeros(most + 1), 0
    chances[0] = 1.0
    for rank in np.sort(ranks):
        reach = min(reach + int(rank), most)
        chances[rank : reach + 1] += chances[: max(0, reach + 1 - int(rank))]
        chances[: reach + 1] *= 0.5
    return min(1.0, 2 * float(chances.sum()))


def approximate_rank_p_value(ranks: np.ndarray, distance: int) -> float:
    """`exact_rank_p_value` by a normal approximation of the sum of the negative ranks, given their binomial number.

    Where many zeros have the small ranks the others hardly differ, and the sum clusters around each number's mean.
    """
    n = len(ranks)
    most = (int(ranks.sum()) - distance) // 2
    number = np.arange(n + 1)
    spread = np.sqrt(number * (n - number) / (n - 1)) * np.std(ranks)  # of a sum drawn without replacement
    above = most + 0.5 - number * np.mean(ranks)  # corrected for continuity: the sums are whole numbers
    normal = np.vectorize(NormalDist().cdf)(above / np.where(spread > 0, spread, 1.0))
    given = np.where(spread > 0, normal, above > 0)
    logs = np.concatenate([[0.0], np.cumsum(np.log((n + 1 - number[1:]) / number[1:]))])  # of the binomial coefficients
    chances = np.exp(logs - logs.max())
    return float(min(1.0, 2 * chances @ given / chances.sum()))
