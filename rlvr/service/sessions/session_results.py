"""The responses of /train and /evaluate, computed from a session's experiences.

The final solution is the answer with the highest confidence, the earliest of equals. Its episode (an engine plays
several at once) is the `training_data` that the series below describe; the other episodes are in the store. What cannot
be known is None: the improvement of one iteration, the verifiers' accuracy without a known truth.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlvr.core.types import mean
from rlvr.store.records import Experience, Session, Status


def best_experience(experiences: Sequence[Experience]) -> Experience | None:
    """The best verified answer; if none could be verified, the last one of those with the best form."""
    judged = [e for e in experiences if e.confidence is not None]
    if not judged:
        return max(experiences, key=lambda e: (e.quality or 0.0, e.iteration, -e.sample), default=None)
    return max(judged, key=lambda e: (e.confidence, -e.iteration, -e.sample))


def best_episode(experiences: Sequence[Experience]) -> list[Experience]:
    """The iterations of the best answer's episode, in order."""
    best = best_experience(experiences)
    return sorted((e for e in experiences if best and e.sample == best.sample), key=lambda e: e.iteration)


def session_progress(experiences: Sequence[Experience]) -> dict[str, Any]:
    """The columns of a session's row that follow from its answers so far."""
    best = best_experience(experiences)
    return {
        "iterations": len(best_episode(experiences)),
        "final_solution": best.generated_output if best else None,
        "final_confidence": best.confidence if best else None,
        "outcome": best.outcome if best else "",
    }


def train_metrics(
    experiences: Sequence[Experience],
    *,
    convergence_iteration: int | None,
    verifier_accuracy: float | None,
    training_loss: float | None,
    policy_entropy: float | None,
) -> dict[str, Any]:
    """The `metrics` of /train."""
    rewards = [e.reward for e in best_episode(experiences) if e.reward is not None]
    return {
        "total_reward": _round(math.fsum(rewards)) if rewards else None,
        "average_reward": _round(mean(rewards)) if rewards else None,
        "improvement_rate": improvement_rate([e.confidence for e in best_episode(experiences)]),
        "convergence_iteration": convergence_iteration,
        "verifier_accuracy": _round(verifier_accuracy),
        "training_loss": training_loss,
        "policy_entropy": policy_entropy,
    }


def improvement_rate(confidences: Sequence[float | None]) -> float | None:
    """Confidence gained per iteration after the first: (last - first) / (n - 1); None for fewer than two."""
    judged = [c for c in confidences if c is not None]
    return _round((judged[-1] - judged[0]) / (len(judged) - 1)) if len(judged) > 1 else None


def train_response(session: Session, experiences: Sequence[Experience]) -> dict[str, Any]:
    """The response of /train, for a session that is over or still running."""
    return {
        "session_id": session.id,
        "task_id": session.task_id,
        "status": session.status.value,
        "final_solution": session.final_solution,
        "confidence": session.final_confidence,
        "iterations": session.iterations,
        "converged": session.converged,
        "warnings": session.metrics.get("warnings", []),
        "derived_tests": session.metrics.get("derived_tests", []),
        "training_data": [_training_datum(e) for e in best_episode(experiences)],
        "metrics": {name: value for name, value in session.metrics.items() if name not in _BESIDE_METRICS},
        "error": session.error,
    }


_BESIDE_METRICS = ("warnings", "derived_tests", "expected_answer")  # stored with the metrics, not shown among them


def _training_datum(e: Experience) -> dict[str, Any]:
    return {
        "iteration": e.iteration,
        "prompt": e.prompt,
        "generated_output": e.generated_output,
        "verifier_feedback": e.feedback,
        "reward": e.reward,
        "timestamp": e.created,
    }


def evaluate_response(session: Session, experiences: Sequence[Experience]) -> dict[str, Any]:
    """The response of /evaluate."""
    metrics = detailed_metrics(session, experiences)
    return {
        "session_id": session.id,
        "task_id": session.task_id,
        "status": session.status.value,
        "summary": _summary(metrics, session),
        "warnings": session.metrics.get("warnings", []),
        "derived_tests": session.metrics.get("derived_tests", []),
        "detailed_metrics": metrics,
        "recommendations": recommendations(metrics, session),
    }


def detailed_metrics(session: Session, experiences: Sequence[Experience]) -> dict[str, Any]:
    rows = best_episode(experiences)
    confidences = [e.confidence for e in rows if e.confidence is not None]
    rewards = [e.reward for e in rows if e.reward is not None]
    errors = [list(e.feedback.get("error_types") or ()) for e in rows if e.quality is not None]
    frequency = Counter(code for codes in errors for code in codes)
    tokens = sum(e.num_tokens for e in experiences)
    started, ended = session.started or session.created, session.finished
    seconds = None if ended is None else max(0.0, ended - started)
    metrics = session.metrics
    correctness, quality = (
        [v for e in rows if (v := getattr(e, name)) is not None] for name in ("correctness", "quality")
    )
    return {
        "session_id": session.id,
        "task_id": session.task_id,
        "start_time": started,
        "end_time": ended,
        "duration_seconds": _round(seconds),
        "total_iterations": len(rows),
        "final_confidence": session.final_confidence,
        "average_confidence": _average(confidences),
        "confidence_improvement": _round(confidences[-1] - confidences[0]) if len(confidences) > 1 else None,
        "total_reward": metrics.get("total_reward"),
        "average_reward": metrics.get("average_reward"),
        "reward_trend": slope(rewards),
        "max_reward": max(rewards, default=None),
        "min_reward": min(rewards, default=None),
        "correctness_scores": correctness,
        "quality_scores": quality,
        "average_correctness": _average(correctness),
        "average_quality": _average(quality),
        "total_errors": sum(frequency.values()),
        "unique_error_types": len(frequency),
        "error_frequency": dict(frequency.most_common()),
        "error_reduction_rate": _reduction(errors),
        "converged": session.converged,
        "convergence_iteration": session.convergence_iteration,
        "convergence_threshold": metrics.get("convergence_threshold"),
        "verifier_accuracy": metrics.get("verifier_accuracy"),
        "policy_entropy": metrics.get("policy_entropy"),
        "training_loss": metrics.get("training_loss"),
        "tokens_generated": tokens,
        "tokens_per_iteration": _round(tokens / len(experiences)) if experiences else None,
        "time_per_iteration": _average([e.seconds for e in rows]),
    }


def _reduction(errors: Sequence[Sequence[str]]) -> float | None:
    """The share of the first answer's errors that the last one lacks; None without errors or for fewer than two."""
    return _round(1 - len(errors[-1]) / len(errors[0])) if len(errors) > 1 and errors[0] else None


def slope(values: Sequence[float]) -> float | None:
    """The least-squares slope of the values per iteration; None for fewer than two."""
    n = len(values)
    if n < 2:
        return None
    x, y = (n - 1) / 2, mean(values)
    above = math.fsum((i - x) * (v - y) for i, v in enumerate(values))
    return _round(above / math.fsum((i - x) ** 2 for i in range(n)))


def _summary(metrics: dict[str, Any], session: Session) -> str:
    if session.status is Status.FAILED:
        return f"failed: {(session.error or {}).get('message', 'unknown reason')}"
    confidence, n = metrics["final_confidence"], metrics["total_iterations"]
    after = f"{n} iteration{'s' * (n != 1)}"
    if confidence is None:
        return f"unverified after {after}: no verifier could tell whether an answer is right"
    verdict = "solved" if session.is_solved else "not solved"
    how = f"converged at iteration {metrics['convergence_iteration']}" if metrics["converged"] else "did not converge"
    return f"{verdict}: confidence {confidence:.2f} after {after}, {how}"


_ADVICE = {
    "empty_output": "The generator returns empty answers: check its endpoint and its token limit.",
    "truncated": "Answers are truncated: raise the token limit, or ask for a shorter answer.",
    "timeout": "Programs are too slow: say in the prompt how large the inputs are.",
}


def recommendations(metrics: dict[str, Any], session: Session) -> list[str]:
    """Advice for a session that did not go well."""
    advice = [_ADVICE[code] for code in metrics["error_frequency"] if code in _ADVICE]
    confidence, trend = metrics["final_confidence"], metrics["reward_trend"]
    if session.error:
        advice.insert(0, f"The session ended early ({session.error.get('code')}): {session.error.get('message')}")
    if confidence is None and metrics["total_iterations"] and not session.metrics.get("warnings"):
        advice.append("No verifier could judge an answer: give the task tests or an answer, or set up a judge.")
    elif session.is_solved is False:
        if not metrics["converged"] and trend is not None and trend > 0:
            advice.append("Rewards were still growing: raise max_iterations.")
        elif metrics["converged"]:
            advice.append(
                "Answers stopped changing below the target: another prompt or a stronger generator is needed."
            )
        if metrics["error_frequency"]:
            advice.append(
                f"The most frequent error is {next(iter(metrics['error_frequency']))}: tell the model how to avoid it."
            )
    advice += session.metrics.get("warnings", [])
    if metrics["verifier_accuracy"] is not None and metrics["verifier_accuracy"] < 0.6:
        advice.append("The verifiers without a reference agree little with the truth here: do not rely on them alone.")
    return advice


def _average(values: Sequence[float]) -> float | None:
    return _round(mean(values)) if values else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 9)
