"""Statistics over seeds: mean with a Student t interval, and paired comparisons of two variants.

The unit is a run. Its own interval, over tasks, says how exactly its policy was measured; only several seeds say what
another seed would give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlvr.core.task_statistics import t_quantile
from rlvr.core.types import mean

MAX_EXACT_PAIRS = 20  # pairs up to which all 2^n signs are tried
RANDOM_FLIPS = 99_999  # signs that are drawn beyond that
FEWEST = 6  # pairs with which p can be below 0.05
FEWEST_FOR_POWER = 5  # pairs whose spread says something about how many are needed
MOST_SEEDS = 1000  # beyond that "more than" is said
_RATES = "/correct"  # what the name of a share ends with
POWER = 0.8  # the chance that a study of the size we name shows a difference


def spread(values: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)) -> dict[str, Any] | None:
    """Mean, 95 % t interval (`low`, `high`), standard deviation and range of one value per seed; None without values.

    With one value there is neither interval nor deviation (None). The interval is mean +- t(n-1) s / sqrt(n), cut at
    the `bounds` within which the mean lies in any case.
    """
    if not values:
        return None
    centre, n = mean(values), len(values)
    result = {"n": n, "mean": centre, "low": None, "high": None, "sd": None, "least": min(values), "most": max(values)}
    if n == 1:
        return result
    sd = math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (n - 1))
    half = float(t_quantile(0.975, n - 1)) * sd / math.sqrt(n)
    return {**result, "sd": sd, "low": max(bounds[0], centre - half), "high": min(bounds[1], centre + half)}


def summarize_steps(curves: Sequence[Mapping[int, float]], metric: str = "reward") -> dict[int, dict[str, Any]]:
    """The `spread` over the runs at each step that all of them have."""
    bounds = (0.0, 1.0) if metric.endswith(_RATES) else (-math.inf, math.inf)
    common = set(curves[0]).intersection(*curves[1:]) if curves else set[int]()
    return {step: found for step in sorted(common) if (found := spread([c[step] for c in curves], bounds)) is not None}


def compare_pairs(reference: Mapping[int, float], other: Mapping[int, float]) -> dict[str, Any]:
    """The differences `other - reference` over the seeds that both have: `spread`, p-value, and what they can show.

    `least_p` is the smallest p that so many pairs can give. `seeds_needed` is how many seeds would show a difference
    as large as the mean one with 80 % chance (None: more than 1,000, or unknown); `detectable` is the difference that
    this number of seeds shows with that chance.
    """
    differences = [other[seed] - reference[seed] for seed in sorted(reference.keys() & other.keys())]
    result = spread(differences) or {"n": 0}
    n = len(differences)
    if n < 2:
        return result
    return {
        **result,
        "p_value": sign_flip_p_value(differences),
        "least_p": 2.0 ** (1 - n),
        "seeds_needed": _seeds_needed(result["sd"], abs(result["mean"])),
        "detectable": result["sd"] * float(_detectable_in_sd(n)),
    }


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Two-sided p-value of the mean under sign flips: the share of signs whose |sum| is at least the observed one.

    Exact up to 20 pairs; with more, 99,999 random flips.
    """
    # Sums that are equal but for rounding count as equal.
    least = abs(math.fsum(differences)) - 1e-12 * np.sum(np.abs(differences))
    if len(differences) > MAX_EXACT_PAIRS:
        draws, sums = np.random.default_rng(0), np.zeros(RANDOM_FLIPS)
        for difference in differences:
            sums += difference * (2.0 * draws.integers(2, size=RANDOM_FLIPS) - 1.0)
        # The observed signs are one of the draws, so that p is never 0 (Phipson and Smyth 2010).
        return float((np.sum(np.abs(sums) >= least) + 1) / (RANDOM_FLIPS + 1))
    sums = np.zeros(1)
    for difference in differences:  # all sums of +-d, doubled by each pair
        sums = np.concatenate([sums + difference, sums - difference])
    return float(np.mean(np.abs(sums) >= least))


def _detectable_in_sd(n: Any) -> Any:
    """What n pairs show with 80 % chance, in standard deviations of the differences."""
    return (t_quantile(0.975, n - 1) + t_quantile(POWER, n - 1)) / np.sqrt(n)


def _seeds_needed(sd: float, difference: float) -> int | None:
    sizes = np.arange(FEWEST, MOST_SEEDS + 1)
    enough = sizes[_detectable_in_sd(sizes) * sd <= difference]
    return int(enough[0]) if len(enough) and difference > 0 else None
