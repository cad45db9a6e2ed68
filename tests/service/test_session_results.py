"""The numbers of /train and /evaluate, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.service.sessions.session_results import (
    best_episode,
    best_experience,
    evaluate_response,
    improvement_rate,
    slope,
    train_metrics,
    train_response,
)
from rlvr.store.records import Experience, Session, Status


def answer(iteration: int, confidence: float | None, reward: float | None, *errors: str, **more: Any) -> Experience:
    feedback = {"confidence": confidence, "error_types": list(errors)}
    given: dict[str, Any] = {"correctness": confidence, "quality": confidence, "num_tokens": 10, "seconds": 0.5, **more}
    return Experience(
        "s",
        "t",
        iteration,
        "p",
        f"answer {iteration}",
        feedback=feedback,
        confidence=confidence,
        reward=reward,
        **given,
    )


ROWS = [answer(1, 0.2, 0.1, "syntax_error", "too_short"), answer(2, 0.5, 0.75, "too_short"), answer(3, 0.9, 1.45)]


def session(rows: list[Experience], **more: Any) -> Session:
    chosen = best_experience(rows)
    metrics = train_metrics(
        rows, convergence_iteration=None, verifier_accuracy=0.5, training_loss=0.25, policy_entropy=1.5
    )
    final = {"final_solution": chosen and chosen.generated_output, "final_confidence": chosen and chosen.confidence}
    given = {"status": Status.DONE, "started": 10.0, "finished": 12.5, "iterations": len(rows), "metrics": metrics}
    return Session("s", "t", "p", **{**final, **given, **more})


def test_the_best_answer_has_the_highest_confidence_and_is_the_earliest_of_equals():
    rows = [answer(1, 0.5, 1.0), answer(2, 0.9, 1.0, sample=1), answer(1, 0.9, 1.0, sample=2), answer(3, None, None)]
    assert best_experience(rows) is rows[2]
    assert best_episode([*ROWS, answer(1, 0.95, 1.0, sample=1)]) == [answer(1, 0.95, 1.0, sample=1)]
    unjudged = [answer(1, None, None), answer(2, None, None)]
    assert best_experience(unjudged) is unjudged[1] and best_experience([]) is None


def test_train_response_describes_the_best_episode():
    response = train_response(session(ROWS), ROWS)
    assert (response["final_solution"], response["confidence"], response["iterations"]) == ("answer 3", 0.9, 3)
    assert response["metrics"] == {
        "total_reward": 2.3,
        "average_reward": pytest.approx(2.3 / 3),
        "improvement_rate": 0.35,  # (.9 - .2) / 2
        "convergence_iteration": None,
        "verifier_accuracy": 0.5,
        "training_loss": 0.25,
        "policy_entropy": 1.5,
    }
    assert set(response["training_data"][0]) == {
        "iteration", "prompt", "generated_output", "verifier_feedback", "reward", "timestamp",
    }  # fmt: skip


def test_evaluate_response_has_all_metrics():
    response = evaluate_response(session(ROWS, converged=True, convergence_iteration=3), ROWS)
    found = response["detailed_metrics"]
    expected = {
        "duration_seconds": 2.5,
        "total_iterations": 3,
        "final_confidence": 0.9,
        "average_confidence": pytest.approx(1.6 / 3),
        "confidence_improvement": 0.7,
        "reward_trend": 0.675,  # (1.45 - .1) / 2: three points, the middle one has no lever
        "max_reward": 1.45,
        "min_reward": 0.1,
        "correctness_scores": [0.2, 0.5, 0.9],
        "total_errors": 3,
        "unique_error_types": 2,
        "error_frequency": {"too_short": 2, "syntax_error": 1},
        "error_reduction_rate": 1.0,
        "convergence_threshold": None,  # of an older session, which did not write it down
        "tokens_generated": 30,
        "tokens_per_iteration": 10.0,
        "time_per_iteration": 0.5,
    }
    assert {name: found[name] for name in expected} == expected
    assert response["summary"] == "solved: confidence 0.90 after 3 iterations, converged at iteration 3"


def test_tokens_count_all_episodes_and_series_only_the_best():
    rows = [*ROWS, answer(1, 0.1, 0.1, "timeout", sample=1, num_tokens=50)]
    found = evaluate_response(session(rows), rows)["detailed_metrics"]
    assert (found["tokens_generated"], found["tokens_per_iteration"]) == (80, 20.0)
    assert (found["total_iterations"], found["total_errors"], found["min_reward"]) == (3, 3, 0.1)


def test_unknown_numbers_are_null():
    one = [answer(1, None, None)]
    response = evaluate_response(session(one), one)
    found = response["detailed_metrics"]
    unknown = ("final_confidence", "average_confidence", "confidence_improvement", "reward_trend", "max_reward")
    assert [found[name] for name in (*unknown, "total_reward", "average_reward", "error_reduction_rate")] == [None] * 8
    assert improvement_rate([0.5]) is None and slope([1.0]) is None
    assert response["recommendations"][0].endswith("give the task tests or an answer, or set up a judge.")


@pytest.mark.parametrize(
    ("rows", "rate"),
    [
        ([answer(1, 0.2, 0.1, "a", "b")], None),  # one answer reduced nothing
        ([answer(1, 0.2, 0.1, "a", "b"), answer(2, None, None)], None),  # nor did one that could not be judged
        ([answer(1, 0.2, 0.1, "a", "b"), answer(2, 0.5, 0.5, "a"), answer(3, None, None)], 0.5),
        ([answer(1, 0.9, 1.0), answer(2, 0.2, 0.5, "a")], None),
        ([answer(1, 0.4, 0.5, "a"), answer(2, 0.5, 0.1, "a", "b")], -1.0),
    ],
)
def test_errors_are_counted_from_the_first_judged_answer_to_the_last(rows: list[Experience], rate: float | None):
    assert evaluate_response(session(rows), rows)["detailed_metrics"]["error_reduction_rate"] == rate


@pytest.mark.parametrize(
    ("rows", "more", "words"),
    [
        ([answer(1, 0.2, 0.2), answer(2, 0.4, 0.5)], {}, "raise max_iterations"),
        ([answer(1, 0.2, 0.2), answer(2, 0.2, 0.2)], {"converged": True}, "stopped changing"),
        ([answer(1, 0.2, 0.2, "timeout")], {}, "too slow"),
        ([answer(1, None, None, quality=1.0)], {"metrics": {"warnings": ["unverified: why"]}}, "unverified: why"),
        ([], {"status": Status.FAILED, "error": {"code": "endpoint_timeout", "message": "late"}}, "endpoint_timeout"),
    ],
)
def test_recommendations_name_the_remedy(rows: list[Experience], more: dict[str, Any], words: str):
    assert any(words in line for line in evaluate_response(session(rows, **more), rows)["recommendations"])


def test_an_unverified_session_is_neither_solved_nor_unsolved():
    rows = [answer(1, None, None, "too_short", quality=0.3), answer(2, None, None, quality=1.0)]
    metrics = {"warnings": ["unverified: why"], "derived_tests": [], "expected_answer": None, "total_reward": None}
    one = session(rows, metrics=metrics, final_confidence=None)
    evaluated = evaluate_response(one, rows)
    assert (
        evaluated["summary"].startswith("unverified after 2 iterations")
        and evaluated["warnings"] == metrics["warnings"]
    )
    assert evaluated["detailed_metrics"]["error_frequency"] == {"too_short": 1}  # what the rules on form objected to
    trained = train_response(one, rows)
    assert (trained["warnings"], trained["derived_tests"]) == (["unverified: why"], [])
    assert trained["metrics"] == {"total_reward": None}
    better_form = [rows[1], answer(3, None, None, quality=0.3)]
    assert best_experience(better_form) is rows[1]
