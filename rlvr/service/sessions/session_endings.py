"""How a session ended: done, or a status with a code for programs and a message for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlvr.reward.feedback import is_request_fault
from rlvr.service.sessions.jobs import SessionOutcome
from rlvr.service.sessions.live_session import LiveSession
from rlvr.store.records import Status

CANCELLED_ERROR = {"code": "cancelled", "message": "cancelled on request"}


@dataclass(frozen=True)
class Ending:
    """The final status of a session, and why if it did not finish."""

    status: Status
    error: dict[str, Any] | None = None


def decide_ending(live: LiveSession, outcome: SessionOutcome) -> Ending:
    """The ending of a job that its generator played to the end."""
    if "cancelled" in outcome.end_reasons.values() and live.stop_status is not None:
        return decide_ending_of_stop(live)
    if live.feedbacks and all(f.confidence is None and not f.is_unverified for f in live.feedbacks):
        scores = live.feedbacks[-1].scores
        message = f"no verifier could judge an answer: {live.feedbacks[-1].failures}"
        is_invalid = all(is_request_fault(scores[label]) for label in live.target.blend.voters)
        code = "task_invalid" if is_invalid else "judge_failed"  # the request's fault, or a verifier's
        return Ending(Status.FAILED, {"code": code, "message": message[:640]})
    return Ending(Status.DONE)


def decide_ending_of_stop(live: LiveSession) -> Ending:
    if live.stop_status is Status.CANCELLED:
        return Ending(Status.CANCELLED, dict(CANCELLED_ERROR))
    return Ending(Status.INTERRUPTED, {"code": "interrupted", "message": "the service stopped"})
