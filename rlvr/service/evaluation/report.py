"""What the suite's sessions come to: rates with 95 % intervals, by category and in all, and whether thresholds held.

| number | of |
|---|---|
| success rate | sessions that reached the target confidence |
| solved rate | sessions whose confidence is above 0.7 |
| convergence rate | sessions that came to the target, or to rest, before `max_iterations` |
| improvement rate | confidence gained per iteration after the first, of sessions with more than one |
| error rate | all sessions: those that failed, were late, or that nobody could judge. They are in no other number |

Tasks are the unit: several sessions of one task widen no sample, they make its rate more certain.
`python -m pytest tests/test_service_evaluation_report.py` exercises it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlvr.types import mean

SOLVED = 0.7


@dataclass(frozen=True)
class Result:
    """One session. `confidence` is None exactly where there is an `error`, which has a `code` and a `message`."""

    task_id: str
    category: str
    repeat: int
    session_id: str = ""
    status: str = ""
    confidence: float | None = None
    iterations: int = 0
    converged: bool = False
    improvement: float | None = None
    seconds: float | None = None
    time_per_iteration: float | None = None
    tokens: int = 0
    error_types: dict[str, int] = field(default_factory=dict[str, int])
    judged_by_model: bool = False
    error: dict[str, str] | None = None


def result(
    task_id: str, category: str, repeat: int, session_id: str, status: str, metrics: Mapping[str, Any],
    error: Mapping[str, str] | None, judged: bool,
) -> Result:  # fmt: skip
    """From what /evaluate says of a session."""
    confidence, iterations = metrics["final_confidence"], metrics["total_iterations"]
    if error is None and confidence is None:
        error = {"code": "not_judged", "message": "no verifier could judge an answer"}
    gained = metrics["confidence_improvement"]
    return Result(
        task_id, category, repeat, session_id, status,
        confidence=None if error else confidence,
        iterations=iterations,
        converged=bool(metrics["converged"]),
        improvement=gained / (iterations - 1) if gained is not None and iterations > 1 else None,
        seconds=metrics["duration_seconds"],
        time_per_iteration=metrics["time_per_iteration"],
        tokens=metrics["tokens_generated"],
        error_types=dict(metrics["error_frequency"]),
        judged_by_model=judged,
        error=dict(error) if error else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Thresholds:
    """What has to hold: the least of some rates, the most of another. None asks for nothing."""

    min_success: float | None = 0.5
    min_solved: float | None = None
    min_convergence: float | None = None
    min_improvement: float | None = None
    max_errors: float | None = 0.1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            low = -1.0 if name == "min_improvement" else 0.0
            if value is not None and not low <= value <= 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected a number from {low:g} to 1")

    def broken(self, rates: Mapping[str, Any]) -> list[str]:
        """Which did not hold, in words. A rate of which nothing is known does not hold."""
        asked = {
            "success_rate": self.min_success, "solved_rate": self.min_solved, "convergence_rate": self.min_convergence,
            "improvement_rate": self.min_improvement,
        }  # fmt: skip
        said: list[str] = []
        for name, least in asked.items():
            value = rates[name]["value"]
            if least is not None and (value is None or value < least):
                shown = "unknown" if value is None else f"{value:.3f}"
                said.append(f"{name.replace('_', ' ')} {shown}, at least {least:g} asked for")
        errors = rates["error_rate"]["value"]
        if self.max_errors is not None and (errors is None or errors > self.max_errors):
            shown = "unknown" if errors is None else f"{errors:.3f}"
            said.append(f"error rate {shown}, at most {self.max_errors:g} asked for")
        return said


def rates(results: Sequence[Result], target: float) -> dict[str, Any]:
    """The numbers of these sessions; a value is None where there is nothing to count."""
    known = [r for r in results if r.confidence is not None]
    frequency = sum((Counter(r.error_types) for r in known), Counter[str]())
    times = [r.time_per_iteration for r in known if r.time_per_iteration is not None]
    return {
        "tasks": len({r.task_id for r in results}),
        "sessions": len(results),
        "success_rate": _share(known, lambda r: (r.confidence or 0.0) >= target),
        "solved_rate": _share(known, lambda r: (r.confidence or 0.0) > SOLVED),
        "convergence_rate": _share(known, lambda r: r.converged),
        "improvement_rate": _mean([r for r in known if r.improvement is not None], lambda r: r.improvement or 0.0),
        "confidence": _share(known, lambda r: r.confidence or 0.0),
        "iterations": _mean(known, lambda r: float(r.iterations)),
        "error_rate": _share(results, lambda r: r.error is not None),
        "errors": dict(Counter(r.error["code"] for r in results if r.error).most_common()),
        "error_types": dict(frequency.most_common()),
        "time_per_iteration": mean(times) if times else None,
        "tokens": sum(r.tokens for r in results),
        "tokens_per_session": mean([float(r.tokens) for r in known]) if known else None,
    }


def report(
    results: Sequence[Result],
    *,
    url: str,
    target: float,
    thresholds: Thresholds,
    planned: int,
    health: Mapping[str, Any],
) -> dict[str, Any]:
    """All of it, as it is written to a file. `complete` is False where the run was ended before its time."""
    in_all = rates(results, target)
    broken = thresholds.broken(in_all)
    generator = health.get("generator", {})
    return {
        "url": url,
        "generator": {key: generator.get(key) for key in ("kind", "name")},
        "service_version": health.get("version"),
        "target": target,
        "planned": planned,
        "complete": len(results) == planned,
        "judged_by_model": sorted({r.task_id for r in results if r.judged_by_model}),
        "overall": in_all,
        "categories": _grouped(results, lambda r: r.category, target),
        "tasks": _grouped(results, lambda r: r.task_id, target),
        "thresholds": asdict(thresholds),
        "broken": broken,
        "held": not broken and len(results) == planned,
        "results": [asdict(r) for r in results],
    }


def _grouped(results: Sequence[Result], of: Callable[[Result], str], target: float) -> dict[str, Any]:
    return {name: rates([r for r in results if of(r) == name], target) for name in dict.fromkeys(map(of, results))}


def _by_task(results: Sequence[Result], of: Callable[[Result], float]) -> list[float]:
    found: dict[str, list[float]] = {}
    for r in results:
        found.setdefault(r.task_id, []).append(float(of(r)))
    return [mean(values) for values in found.values()]


def _share(results: Sequence[Result], of: Callable[[Result], float]) -> dict[str, float | None]:
    from rlvr.training.evaluate import share

    return _interval(share(_by_task(results, of)))


def _mean(results: Sequence[Result], of: Callable[[Result], float]) -> dict[str, float | None]:
    from rlvr.training.evaluate import average

    values = _by_task(results, of)
    found = _interval(average(values))
    return found if len(values) > 1 else {"value": found["value"], "low": None, "high": None}


def _interval(found: Any) -> dict[str, float | None]:
    return {key: None if math.isnan(value) else value for key, value in asdict(found).items()}
