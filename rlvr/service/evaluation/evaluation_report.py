"""The report of the suite's sessions: rates with 95 % intervals, by category and overall, and the thresholds.

| number | of |
|---|---|
| success rate | sessions that reached the target confidence |
| solved rate | sessions whose confidence is above 0.7 |
| convergence rate | sessions that reached the target, or stopped changing, before `max_iterations` |
| improvement rate | confidence gained per iteration after the first, of sessions with more than one |
| error rate | all sessions: those that failed, were late or could not be judged; no other number includes them |

The task is the unit: more sessions of a task make its rate more certain, but the sample no larger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlvr.core.task_statistics import mean_interval, share_interval
from rlvr.core.types import mean

SOLVED = 0.7


@dataclass(frozen=True)
class SessionResult:
    """One session. `confidence` is None exactly if there is an `error`, which has a `code` and a `message`."""

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


def session_result(
    task_id: str, category: str, repeat: int, session_id: str, status: str, metrics: Mapping[str, Any],
    error: Mapping[str, str] | None, judged: bool,
) -> SessionResult:  # fmt: skip
    """Build the result from the metrics of /evaluate."""
    confidence, iterations = metrics["final_confidence"], metrics["total_iterations"]
    if error is None and confidence is None:
        error = {"code": "not_judged", "message": "no verifier could judge an answer"}
    gained = metrics["confidence_improvement"]
    return SessionResult(
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
    """The least of some rates and the most of the error rate; None is no threshold."""

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

    def violations(self, rates: Mapping[str, Any]) -> list[str]:
        """The thresholds that do not hold, in words. An unknown rate does not hold."""
        least_rates = {
            "success_rate": self.min_success, "solved_rate": self.min_solved, "convergence_rate": self.min_convergence,
            "improvement_rate": self.min_improvement,
        }  # fmt: skip
        violations: list[str] = []
        for name, least in least_rates.items():
            value = rates[name]["value"]
            if least is not None and (value is None or value < least):
                shown = "unknown" if value is None else f"{value:.3f}"
                violations.append(f"{name.replace('_', ' ')} {shown}, expected at least {least:g}")
        errors = rates["error_rate"]["value"]
        if self.max_errors is not None and (errors is None or errors > self.max_errors):
            shown = "unknown" if errors is None else f"{errors:.3f}"
            violations.append(f"error rate {shown}, expected at most {self.max_errors:g}")
        return violations


def compute_rates(results: Sequence[SessionResult], target: float) -> dict[str, Any]:
    """The numbers of these sessions; a value without data is None."""
    judged = [r for r in results if r.confidence is not None]
    frequency = sum((Counter(r.error_types) for r in judged), Counter[str]())
    times = [r.time_per_iteration for r in judged if r.time_per_iteration is not None]
    return {
        "tasks": len({r.task_id for r in results}),
        "sessions": len(results),
        "success_rate": _share(judged, lambda r: (r.confidence or 0.0) >= target),
        "solved_rate": _share(judged, lambda r: (r.confidence or 0.0) > SOLVED),
        "convergence_rate": _share(judged, lambda r: r.converged),
        "improvement_rate": _mean([r for r in judged if r.improvement is not None], lambda r: r.improvement or 0.0),
        "confidence": _share(judged, lambda r: r.confidence or 0.0),
        "iterations": _mean(judged, lambda r: float(r.iterations)),
        "error_rate": _share(results, lambda r: r.error is not None),
        "errors": dict(Counter(r.error["code"] for r in results if r.error).most_common()),
        "error_types": dict(frequency.most_common()),
        "time_per_iteration": mean(times) if times else None,
        "tokens": sum(r.tokens for r in results),
        "tokens_per_session": mean([float(r.tokens) for r in judged]) if judged else None,
    }


def report(
    results: Sequence[SessionResult],
    *,
    url: str,
    target: float,
    thresholds: Thresholds,
    planned: int,
    health: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole report, as it is written to a file. `complete` is False if the run was stopped early."""
    overall = compute_rates(results, target)
    violations = thresholds.violations(overall)
    generator = health.get("generator", {})
    return {
        "url": url,
        "generator": {key: generator.get(key) for key in ("kind", "name")},
        "service_version": health.get("version"),
        "target": target,
        "planned": planned,
        "complete": len(results) == planned,
        "judged_by_model": sorted({r.task_id for r in results if r.judged_by_model}),
        "overall": overall,
        "categories": _rates_by(results, lambda r: r.category, target),
        "tasks": _rates_by(results, lambda r: r.task_id, target),
        "thresholds": asdict(thresholds),
        "broken": violations,
        "held": not violations and len(results) == planned,
        "results": [asdict(r) for r in results],
    }


def _rates_by(results: Sequence[SessionResult], of: Callable[[SessionResult], str], target: float) -> dict[str, Any]:
    return {
        name: compute_rates([r for r in results if of(r) == name], target) for name in dict.fromkeys(map(of, results))
    }


def _by_task(results: Sequence[SessionResult], of: Callable[[SessionResult], float]) -> list[list[float]]:
    """The numbers of each task's sessions."""
    by_task: dict[str, list[float]] = {}
    for r in results:
        by_task.setdefault(r.task_id, []).append(float(of(r)))
    return list(by_task.values())


def _share(results: Sequence[SessionResult], of: Callable[[SessionResult], float]) -> dict[str, Any]:
    by_task = _by_task(results, of)
    return share_interval(list(map(mean, by_task)), list(map(len, by_task))).to_json()


def _mean(results: Sequence[SessionResult], of: Callable[[SessionResult], float]) -> dict[str, Any]:
    return mean_interval(list(map(mean, _by_task(results, of)))).to_json()
