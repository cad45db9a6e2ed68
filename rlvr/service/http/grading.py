"""`/grade`: score given answers by named verifiers or by a grader's configuration. Nothing is stored or learned.

    results = await queue.run(owner, request, partial(grade, body, settings, judge))

Each request may take minutes, so keys take turns and share the slots, and a client that leaves frees its slot at once.
Programs that wait for the sandbox are dropped, those that run are killed (`rlvr.core.cancellation`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import Request

from rlvr.core.cancellation import raise_if_cancelled, run_with
from rlvr.core.fair_queue import run_as_owner
from rlvr.core.fair_slots import FairSlots
from rlvr.core.types import Score
from rlvr.reward.blend import Observe
from rlvr.reward.feedback import Feedback, detail_for_client
from rlvr.reward.signatures import Case
from rlvr.service.http.requests import GradeBody
from rlvr.service.http.responses import Grade, GradeResponse, VerifierFeedback
from rlvr.service.session_problems import stopping, verifier_unavailable
from rlvr.service.sessions.verification import (
    FieldError,
    Judge,
    VerifiableTask,
    build_verifiable_task,
    grader_models,
)
from rlvr.service.settings import Settings
from rlvr.store.records import UNVERIFIED
from rlvr.web.errors import HttpProblem

GRADER_SECONDS = 120.0  # for all items of a request; verifiers start no batch later
BATCH = 16  # answers judged together
SLOTS, SHARE = 16, 4  # requests that run at once: of all keys, and of one key
WAITING, WAITING_SHARE = 64, 32  # more that may wait, with their texts in memory
T = TypeVar("T")


def grade(body: GradeBody, settings: Settings, judge: Judge, observe: Observe | None = None) -> GradeResponse:
    """Score the answers; HttpProblem 422 for a wrong configuration. Blocks."""
    if body.grader is not None:
        return _response(_by_grader(body, judge))
    try:
        target = build_verifiable_task(body.request(), judge=judge, generator=settings.generator)
        target.blend.start()
    except FieldError as error:
        raise HttpProblem(422, "invalid", str(error), field=error.field) from error
    except ValueError as error:
        raise verifier_unavailable(error) from error
    target.blend.observe = observe
    return _response(
        _by_verifiers(body, target), warnings=list(target.warnings), derived_tests=list(target.derived_tests)
    )


def _response(results: list[Grade], **more: Any) -> GradeResponse:
    judged = [one.value for one in results if one.value is not None]
    return GradeResponse(results=results, mean=sum(judged) / len(judged) if judged else None, **more)


def _by_verifiers(body: GradeBody, target: VerifiableTask) -> list[Grade]:
    cases = [Case(body.prompt, answer, target.task.meta) for answer in body.answers]
    end, results = time.monotonic() + GRADER_SECONDS, list[Grade]()
    for start in range(0, len(cases), BATCH):
        raise_if_cancelled()
        if time.monotonic() > end:
            late = f"the request took more than {GRADER_SECONDS:g} s; send fewer answers at a time"
            return results + [Grade(value=None, outcome="error", reason="no_time", detail=late)] * (len(cases) - start)
        results += [_grade_of_feedback(feedback) for feedback in target.blend.judge_many(cases[start : start + BATCH])]
    return results


def _grade_of_feedback(feedback: Feedback) -> Grade:
    return Grade(
        value=feedback.confidence,
        outcome=_outcome(feedback),
        reason="+".join(feedback.error_types),
        detail=feedback.detailed_feedback,
        parts={name: _part(score) for name, score in feedback.scores.items()},
        feedback=VerifierFeedback(**feedback.as_dict()),
        truth=feedback.truth,
    )


def _outcome(feedback: Feedback) -> str:
    if feedback.confidence is None:
        return UNVERIFIED if feedback.is_unverified else "error"
    passed = feedback.truth if feedback.truth is not None else not feedback.error_types
    return "passed" if passed else "failed"


def _by_grader(body: GradeBody, judge: Judge) -> list[Grade]:
    from rlvr.reward.graders import Grader
    from rlvr.reward.graders.grader_reward import parse_endpoints

    assert body.grader is not None
    try:
        grader = Grader.of(body.grader, models=parse_endpoints(grader_models(judge)), batch_s=GRADER_SECONDS)
    except ValueError as error:
        raise HttpProblem(422, "invalid", str(error), field="grader") from error
    scores = grader.grade_many([(row.item, row.sample) for row in body.items])
    return [_grade_of_score(score) for score in scores]


def _grade_of_score(score: Score) -> Grade:
    fields = {name: value for name, value in vars(score).items() if name != "turns"}  # an answer here has one turn
    return Grade(
        **{
            **fields,
            "outcome": score.outcome.value,
            "parts": dict(score.parts),
            "detail": detail_for_client(score),
        }
    )


def _part(score: Score) -> dict[str, Any]:
    return {
        "value": score.value,
        "outcome": score.outcome.value,
        "reason": score.reason,
        "detail": detail_for_client(score),
    }


class GradingQueue:
    """All methods belong to the event loop."""

    def __init__(self) -> None:
        self._slots = FairSlots(SLOTS, SHARE)
        self._cancels: set[threading.Event] = set()
        self._is_closed = False

    async def run(self, owner: str, request: Request, work: Callable[[], T]) -> T:
        """The result of `work`, which blocks, in a thread; HttpProblem 429 if too many wait. `work` is cancelled when
        the client of `request` leaves."""
        if self._slots.waiting() >= WAITING or self._slots.waiting(owner) >= WAITING_SHARE:
            raise HttpProblem(429, "busy", "too many requests to /grade wait already; try again later", retry_after=10)
        cancel = threading.Event()
        self._cancels.add(cancel)
        result = asyncio.create_task(self._slots.run(owner, lambda: self._work(cancel, owner, work)))
        gone = asyncio.create_task(_wait_for_disconnect(request))
        try:
            await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise HttpProblem(499, "client_gone", "the client left before its response")
            return result.result()
        finally:
            cancel.set()
            self._cancels.discard(cancel)
            for task in (result, gone):
                task.cancel()
            await asyncio.wait((result, gone))

    def _work(self, cancel: threading.Event, owner: str, work: Callable[[], T]) -> T:
        try:
            if self._is_closed:
                raise stopping()
            return run_with(cancel, run_as_owner, owner, work)
        except RuntimeError:
            if self._is_closed and cancel.is_set():
                raise stopping() from None
            raise

    def close(self) -> None:
        """End all: those that run and those that wait get 503."""
        self._is_closed = True
        for cancel in self._cancels:
            cancel.set()
        self._slots.refuse_waiting(stopping())


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
