"""Estimates from pass rates how many groups of a run will hold a passing and a failing completion.

For example:

    expect_signal([(0, 4), (1, 4), (4, 4)], group_size=8)   # passed and judged completions of each task
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# How alike the pass rates of tasks are: a + b of the Beta distribution, from always or never to the same everywhere.
CONCENTRATIONS = tuple(2 ** (exponent / 2) for exponent in range(-12, 21))


def expect_signal(counts: Sequence[tuple[int, int]], group_size: int) -> float:
    """The expected share of groups that hold both a pass and a failure, for other tasks of the same kind.

    `counts` has (passed, judged) of each task. The mean over tasks of 1 - p^G - (1-p)^G, where p follows a Beta
    distribution: its mean is the pass rate over all completions, half a pass and half a failure added, and its a + b
    the one of `CONCENTRATIONS` with the largest beta-binomial likelihood. An estimate for each task alone would need G
    completions of it. Takes a binary verdict. ValueError without a judged completion.
    """
    passed, judged = sum(c for c, _ in counts), sum(n for _, n in counts)
    if not judged or group_size < 1:
        raise ValueError(f"expect_signal: {judged} judged completions, group_size={group_size}; expected at least 1")
    mean = (passed + 0.5) / (judged + 1)
    a, b = max(
        ((mean * total, (1 - mean) * total) for total in CONCENTRATIONS),
        key=lambda shape: sum(_log_moment(*shape, c, n - c) for c, n in counts),
    )
    equal = math.exp(_log_moment(a, b, group_size, 0)) + math.exp(_log_moment(a, b, 0, group_size))
    return min(1.0, max(0.0, 1 - equal))


def _log_moment(a: float, b: float, passes: int, failures: int) -> float:
    """log E[p^passes (1-p)^failures] under Beta(a, b): log B(a + passes, b + failures) - log B(a, b)."""
    gains = (math.lgamma(a + passes) - math.lgamma(a), math.lgamma(b + failures) - math.lgamma(b))
    return sum(gains) - math.lgamma(a + b + passes + failures) + math.lgamma(a + b)
