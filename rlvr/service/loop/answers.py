"""What a session comes to in numbers: the answers of /train and /evaluate, computed from its experiences.

The final solution is the best verified answer: of the highest confidence, the earliest among equals. The episode it
stands in (an engine plays several at once) is the `training_data` that the series below are about; rewards and errors
of the other episodes are in the store. What cannot be known is None: an improvement of one iteration, the accuracy of
verifiers where no task says what is right. `python -m pytest tests/test_service_answers.py` exercises it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlvr.store.analysis import SUCCESS
from rlvr.store.records import Experience, Session, Status
from rlvr.types import mean


def best(experiences: Sequence[Experience]) -> Experience | None:
    """The best verified answer; where nobody could judge, the last answer that is there."""
    judged = [e for e in experiences if e.confidence is not None]
    if not judged:
        return max(experiences, key=lambda e: (e.iteration, -e.sample), default=None)
    return max(judged, key=lambda e: (e.confidence, -e.iteration, -e.sample))


def episode(experiences: Sequence[Experience]) -> list[Experience]:
    """The iterations of the episode that the best answer stands in, in their order."""
    chosen = best(experiences)
    return sorted((e for e in experiences if chosen and e.sample == chosen.sample), key=lambda e: e.iteration)


def standing(experiences: Sequence[Experience]) -> dict[str, Any]:
    """What a session's row says of its answers so far."""
    chosen = best(experiences)
    return {
        "iterations": len(episode(experiences)),
        "final_solution": chosen.generated_output if chosen else None,
        "final_confidence": chosen.confidence if chosen else None,
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
    rewards = [e.reward for e in episode(experiences) if e.reward is not None]
    return {
        "total_reward": _rounded(math.fsum(rewards)) if rewards else None,
        "average_reward": _rounded(mean(rewards)) if rewards else None,
        "improvement_rate": improvement_rate([e.confidence for e in episode(experiences)]),
        "convergence_iteration": convergence_iteration,
        "verifier_accuracy": _rounded(verifier_accuracy),
        "training_loss": training_loss,
        "policy_entropy": policy_entropy,
    }


def improvement_rate(confidences: Sequence[float | None]) -> float | None:
    """What confidence grew by, per iteration after the first: (last - first) / (n - 1); None of fewer than two."""
    known = [c for c in confidences if c is not None]
    return _rounded((known[-1] - known[0]) / (len(known) - 1)) if len(known) > 1 else None


def train_answer(session: Session, experiences: Sequence[Experience]) -> dict[str, Any]:
    """The answer of /train, of a session that is over or still going on."""
    return {
        "session_id": session.id,
        "task_id": session.task_id,
        "status": session.status.value,
        "final_solution": session.final_solution,
        "confidence": session.final_confidence,
        "iterations": session.iterations,
        "converged": session.converged,
        "training_data": [_training_datum(e) for e in episode(experiences)],
        "metrics": session.metrics,
        "error": session.error,
    }


def _training_datum(e: Experience) -> dict[str, Any]:
    return {
        "iteration": e.iteration,
        "prompt": e.prompt,
        "generated_output": e.generated_output,
        "verifier_feedback": e.feedback,
        "reward": e.reward,
        "timestamp": e.created,
    }


def evaluate_answer(session: Session, experiences: Sequence[Experience]) -> dict[str, Any]:
    """The answer of /evaluate."""
    found = detailed(session, experiences)
    return {
        "session_id": session.id,
        "task_id": session.task_id,
        "status": session.status.value,
        "summary": _summary(found, session),
        "detailed_metrics": found,
        "recommendations": recommendations(found, session, experiences),
    }


def detailed(session: Session, experiences: Sequence[Experience]) -> dict[str, Any]:
    rows = episode(experiences)
    confidences = [e.confidence for e in rows if e.confidence is not None]
    rewards = [e.reward for e in rows if e.reward is not None]
    errors = [list(e.feedback.get("error_types") or ()) for e in rows if e.confidence is not None]
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
        "duration_seconds": _rounded(seconds),
        "total_iterations": len(rows),
        "final_confidence": session.final_confidence,
        "average_confidence": _average(confidences),
        "confidence_improvement": _rounded(confidences[-1] - confidences[0]) if len(confidences) > 1 else None,
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
        "tokens_per_iteration": _rounded(tokens / len(experiences)) if experiences else None,
        "time_per_iteration": _average([e.seconds for e in rows]),
    }


def _reduction(errors: Sequence[Sequence[str]]) -> float | None:
    """The share of the first answer's errors that the last has no more; None of fewer than two, or of none at first."""
    return _rounded(1 - len(errors[-1]) / len(errors[0])) if len(errors) > 1 and errors[0] else None


def slope(values: Sequence[float]) -> float | None:
    """What the values gain an iteration, by least squares; None of fewer than two."""
    n = len(values)
    if n < 2:
        return None
    x, y = (n - 1) / 2, mean(values)
    above = math.fsum((i - x) * (v - y) for i, v in enumerate(values))
    return _rounded(above / math.fsum((i - x) ** 2 for i in range(n)))


def _summary(found: dict[str, Any], session: Session) -> str:
    if session.status is Status.FAILED:
        return f"failed: {(session.error or {}).get('message', 'the reason is not known')}"
    confidence, n = found["final_confidence"], found["total_iterations"]
    if confidence is None:
        return f"{n} iterations; no verifier could judge an answer"
    verdict = "solved" if confidence > SUCCESS else "not solved"
    how = f"converged at iteration {found['convergence_iteration']}" if found["converged"] else "did not converge"
    return f"{verdict}: confidence {confidence:.2f} after {n} iteration{'s' * (n != 1)}, {how}"


_ADVICE = {
    "empty_output": "The generator gives empty answers: check its endpoint and its token limit.",
    "truncated": "Answers are cut off: raise the token limit, or ask for a shorter answer.",
    "timeout": "Programs are too slow: say in the prompt how large the inputs are.",
}


def recommendations(found: dict[str, Any], session: Session, experiences: Sequence[Experience]) -> list[str]:
    """What to do about it, where something can be done."""
    said = [_ADVICE[code] for code in found["error_frequency"] if code in _ADVICE]
    confidence, trend = found["final_confidence"], found["reward_trend"]
    if session.error:
        said.insert(0, f"The session ended early ({session.error.get('code')}): {session.error.get('message')}")
    if confidence is None and found["total_iterations"]:
        said.append("No verifier could judge: give the task tests or an answer, or set up a judge.")
    elif confidence is not None and confidence <= SUCCESS:
        if not found["converged"] and trend is not None and trend > 0:
            said.append("Rewards were still growing: raise max_iterations.")
        elif found["converged"]:
            said.append("Answers stopped changing below the target: another prompt or a stronger generator is needed.")
        if found["error_frequency"]:
            said.append(
                f"The most frequent error is {next(iter(found['error_frequency']))}: say in the prompt how to avoid it."
            )
    if confidence is not None and all(set(e.scores) == {"draft"} for e in experiences):
        said.append(
            "Nobody checked whether it is right: rules on form alone were applied. Give the task tests or an answer, "
            "name verifiers, or set up a judge."
        )
    if found["verifier_accuracy"] is not None and found["verifier_accuracy"] < 0.6:
        said.append("The verifiers without a reference agree little with the truth here: do not rely on them alone.")
    return said


def _average(values: Sequence[float]) -> float | None:
    return _rounded(mean(values)) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 9)
