"""The suite's report: rates computed by hand, and thresholds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlvr.cli.measure_commands import lines
from rlvr.service.evaluation.evaluation_report import SessionResult, Thresholds, compute_rates, report, session_result

FAILED = {"code": "endpoint_timeout", "message": "late"}


def one(task: str, confidence: float | None, repeat: int = 0, category: str = "c", **more: Any) -> SessionResult:
    error = None if confidence is not None else FAILED
    return SessionResult(task, category, repeat, confidence=confidence, error=error, **more)


RESULTS = [
    one("a", 1.0, 0, iterations=1, converged=True, tokens=10, time_per_iteration=1.0),
    one("a", 0.75, 1, iterations=3, improvement=0.25, tokens=30, time_per_iteration=3.0, error_types={"x": 2}),
    one("b", 0.2, iterations=5, improvement=-0.05, tokens=50, time_per_iteration=2.0, error_types={"x": 1, "y": 4}),
    one("c", None, category="d", tokens=5),
]


def values(found: dict[str, Any]) -> dict[str, float | None]:
    return {name: found[name]["value"] for name in found if isinstance(found[name], dict) and "value" in found[name]}


def test_rates_are_means_over_tasks_of_judged_sessions() -> None:
    found = compute_rates(RESULTS, 0.85)
    assert values(found) == {
        "success_rate": pytest.approx((1 / 2 + 0) / 2),
        "solved_rate": pytest.approx((1 + 0) / 2),
        "convergence_rate": pytest.approx((1 / 2 + 0) / 2),
        "improvement_rate": pytest.approx((0.25 - 0.05) / 2),
        "confidence": pytest.approx((0.875 + 0.2) / 2),
        "iterations": pytest.approx((2 + 5) / 2),
        "error_rate": pytest.approx(1 / 3),
    }
    assert (found["tasks"], found["sessions"], found["tokens"], found["tokens_per_session"]) == (3, 4, 95, 30)
    assert found["time_per_iteration"] == 2.0
    assert found["errors"] == {"endpoint_timeout": 1} and found["error_types"] == {"y": 4, "x": 3}


def test_intervals_depend_on_tasks_and_not_on_repeats() -> None:
    """One of two tasks always passes: 50 repeats say no more about other tasks than one."""
    few, many = (
        compute_rates([one(task, float(task == "a"), repeat) for task in "ab" for repeat in range(n)], 0.85)[
            "success_rate"
        ]
        for n in (1, 50)
    )
    assert many == few and few["value"] == 0.5 and few["low"] < 0.1 and few["high"] > 0.9


def test_one_session_that_improved_has_a_mean_and_no_interval() -> None:
    assert compute_rates(RESULTS[:2], 0.85)["improvement_rate"] == {"value": 0.25, "low": None, "high": None, "n": 1}


def test_without_results_rates_are_unknown_and_no_threshold_holds() -> None:
    found = compute_rates([RESULTS[3]], 0.85)
    assert values(found)["success_rate"] is None and values(found)["error_rate"] == 1.0
    asked = Thresholds(min_success=0.0, max_errors=1.0)
    assert asked.violations(found) == ["success rate unknown, expected at least 0"]


@pytest.mark.parametrize(
    ("asked", "broken"),
    [
        ({"min_success": 0.25, "max_errors": 0.34}, []),
        ({"min_success": 0.26, "max_errors": 0.34}, ["success rate 0.250, expected at least 0.26"]),
        ({"min_success": None, "max_errors": 0.33}, ["error rate 0.333, expected at most 0.33"]),
        ({"min_success": None, "max_errors": None, "min_improvement": 0.1}, []),
        (
            {"min_success": None, "max_errors": None, "min_solved": 0.6, "min_convergence": 0.3},
            ["solved rate 0.500, expected at least 0.6", "convergence rate 0.250, expected at least 0.3"],
        ),
    ],
)
def test_a_threshold_holds_if_the_rate_reaches_it(asked: dict[str, Any], broken: list[str]) -> None:
    assert Thresholds(**asked).violations(compute_rates(RESULTS, 0.85)) == broken


@pytest.mark.parametrize("asked", [{"min_success": -0.1}, {"max_errors": 1.1}, {"min_improvement": -2}])
def test_a_threshold_out_of_range_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"--{next(iter(asked)).replace('_', '-')} .*expected a number"):
        Thresholds(**asked)


def build_report(results: list[SessionResult], planned: int) -> dict[str, Any]:
    health = {"version": "1", "generator": {"kind": "endpoint", "name": "g", "state": "ready"}}
    asked = Thresholds(min_success=0.2, max_errors=0.5)
    return report(results, url="http://x", target=0.85, thresholds=asked, planned=planned, health=health)


def test_the_report_is_json_and_names_the_service() -> None:
    found = build_report(RESULTS, 4)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["held"] and found["complete"] and found["generator"] == {"kind": "endpoint", "name": "g"}
    assert list(found["tasks"]) == ["a", "b", "c"] and list(found["categories"]) == ["c", "d"]
    assert found["categories"]["c"]["sessions"] == 3 and found["results"][0]["task_id"] == "a"
    said = "\n".join(lines(found))
    assert "success rate 0.250 [" in said and "y 4, x 3" in said and "endpoint_timeout 1" in said
    assert said.endswith("all thresholds held")


def test_an_incomplete_run_does_not_pass() -> None:
    found = build_report(RESULTS, 5)
    assert not found["held"] and not found["complete"] and found["broken"] == []
    assert "incomplete: 4 of 5 sessions" in lines(found) and "all thresholds held" not in lines(found)


METRICS = {
    "final_confidence": 0.9, "total_iterations": 3, "confidence_improvement": 0.5, "converged": True,
    "duration_seconds": 6.0, "time_per_iteration": 2.0, "tokens_generated": 30, "error_frequency": {"x": 1},
}  # fmt: skip


def test_a_result_is_built_from_the_evaluate_response() -> None:
    found = session_result("a", "c", 0, "s1", "done", METRICS, None, False)
    assert (found.confidence, found.improvement, found.error) == (0.9, 0.25, None)
    failed = session_result("a", "c", 0, "s1", "failed", METRICS, FAILED, False)
    assert (failed.confidence, failed.error, failed.tokens) == (None, FAILED, 30)
    unjudged = session_result("a", "c", 0, "s1", "done", {**METRICS, "final_confidence": None}, None, False)
    assert unjudged.confidence is None and unjudged.error is not None and unjudged.error["code"] == "not_judged"
