"""`GET /analysis`: what goes wrong over all tasks, and which strategies help where, as far as the counts support it.

Rates have Wilson's interval over completions. It is about the tasks that were asked, where it is wide enough however
the tasks differ; about other tasks it says nothing. A strategy is compared with the others by the Cochran-Mantel-
Haenszel test: within each task, so that a strategy that was drawn for easy tasks gains nothing by it. It is `better` or
`worse` only where p < 0.05 after Holm's correction over all comparisons of the response, and only where the normal
approximation holds (Mantel and Fleiss 1980, https://doi.org/10.1093/oxfordjournals.aje.a112984).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlvr.core.task_statistics import wilson_interval
from rlvr.store import ExperienceStore
from rlvr.store.patterns import StrategyCounts

MOST = 200  # rows of each list
LEVEL = 0.05
LEAST_ROOM = 5.0  # passes that the expected number is away from the possible ones (Mantel and Fleiss)


def describe_patterns(store: ExperienceStore) -> dict[str, Any]:
    """The body of the response. Blocks: the database reads all answers."""
    groups = store.count_groups(MOST)
    judged = {group.verified_by: group.judged for group in groups}
    errors = [
        {**vars(one), "share": one.answers / n if (n := judged.get(one.verified_by)) else None}
        for one in store.count_errors(MOST)
    ]
    return {
        "groups": [{**vars(one), **_rate(one.passed, one.judged)} for one in groups],
        "errors": errors,
        "strategies": compare_strategies(store.count_strategies(MOST)),
    }


def compare_strategies(counts: Sequence[StrategyCounts]) -> list[dict[str, Any]]:
    """Each strategy's pass rate, its difference from the others on the same tasks, and what may be said of it."""
    p_values = _correct_by_holm([_p_value(one) for one in counts])
    rows: list[dict[str, Any]] = []
    for one, p in zip(counts, p_values, strict=True):
        difference = (one.passed - one.expected) / one.weight if one.weight > 0 else None
        decided = p is not None and p < LEVEL and difference is not None
        rows.append({
            "verified_by": one.verified_by, "after": one.after, "strategy": one.strategy, "tasks": one.tasks,
            "answers": one.answers, "passed": one.passed, **_rate(one.passed, one.answers),
            "difference": difference, "p_value": p,
            "finding": "undecided" if not decided else "better" if (difference or 0.0) > 0 else "worse",
        })  # fmt: skip
    return rows


def _rate(passed: int, judged: int) -> dict[str, float | None]:
    if not judged:
        return {"pass_rate": None, "low": None, "high": None}
    interval = wilson_interval(passed / judged, judged)
    return {"pass_rate": interval.value, "low": interval.low, "high": interval.high}


def _p_value(one: StrategyCounts) -> float | None:
    """Two-sided, with a correction for continuity; None where the counts are too few for the approximation."""
    room = min(one.expected - one.least, one.most - one.expected)
    if room < LEAST_ROOM or one.variance <= 0:
        return None
    z = max(0.0, abs(one.passed - one.expected) - 0.5) / math.sqrt(one.variance)
    return math.erfc(z / math.sqrt(2))


def _correct_by_holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values. Holm 1979, https://www.jstor.org/stable/4615733."""
    ranked = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(ranked):
        largest = max(largest, min(1.0, p * (len(ranked) - rank)))
        corrected[i] = largest
    return corrected
