"""`/grade`: given answers, scored by named verifiers or by a grader's configuration. Nothing is stored or learned.

Exercised by tests/test_service_http.py.
"""

from __future__ import annotations

import time
from typing import Any

from rlvr.reward.feedback import Feedback
from rlvr.reward.signatures import Case
from rlvr.service.http.contracts import GradeBody
from rlvr.service.http.replies import Grade, Graded, VerifierFeedback
from rlvr.service.loop.verification import Judge, case_of
from rlvr.service.problems import Problem
from rlvr.service.settings import Settings
from rlvr.types import Score

GRADER_SECONDS = 120.0  # that the items of one request have together; verifiers: before the last ones are begun
AT_ONCE = 16  # answers that verifiers are given together


def grade(body: GradeBody, settings: Settings, judge: Judge) -> Graded:
    """Blocks while verifiers work; 422 for a configuration that is none."""
    results = _by_grader(body, settings) if body.grader is not None else _by_verifiers(body, settings, judge)
    judged = [one.value for one in results if one.value is not None]
    return Graded(results=results, mean=sum(judged) / len(judged) if judged else None)


def _by_verifiers(body: GradeBody, settings: Settings, judge: Judge) -> list[Grade]:
    try:
        case = case_of(body.request(), judge=judge, generator=settings.generator)
        case.blend.start()
    except ValueError as error:
        raise Problem(422, "invalid", str(error), field="verifiers") from error
    cases = [Case(body.prompt, answer, case.task.meta) for answer in body.answers]
    end, results = time.monotonic() + GRADER_SECONDS, list[Grade]()
    for some in range(0, len(cases), AT_ONCE):
        if time.monotonic() > end:
            late = f"the request took more than {GRADER_SECONDS:g} s; send fewer answers at a time"
            return results + [Grade(value=None, outcome="error", reason="no_time", detail=late)] * (len(cases) - some)
        results += [_judged(told) for told in case.blend.judge_many(cases[some : some + AT_ONCE])]
    return results


def _judged(told: Feedback) -> Grade:
    return Grade(
        value=told.confidence,
        outcome="error" if told.confidence is None else "passed" if _passed(told) else "failed",
        reason="+".join(told.error_types),
        detail=told.detailed_feedback,
        parts={name: _part(score) for name, score in told.scores.items()},
        feedback=VerifierFeedback(**told.as_dict()),
        truth=told.truth,
    )


def _passed(told: Feedback) -> bool:
    return told.truth if told.truth is not None else not told.error_types


def _by_grader(body: GradeBody, settings: Settings) -> list[Grade]:
    from rlvr.reward.graders import Grader

    assert body.grader is not None
    try:
        grader = Grader.of(body.grader, models=grader_models(settings), batch_s=GRADER_SECONDS)
    except ValueError as error:
        raise Problem(422, "invalid", str(error), field="grader") from error
    scores = grader.grade_many([(row.item, row.sample) for row in body.items])
    return [_grade(score) for score in scores]


def grader_models(settings: Settings) -> dict[str, Any]:
    """{name a grader may ask for: its endpoint}: the judge of the settings, and nothing that a request brings."""
    from rlvr.http_line import Endpoint

    judge = settings.judge
    if not judge or not judge.model:
        return {}
    base = judge.endpoint.removesuffix("/").removesuffix("/chat/completions")
    return {judge.model: Endpoint(base, judge.model, judge.key_variable)}


def _grade(score: Score) -> Grade:
    return Grade(
        value=score.value,
        outcome=score.outcome.value,
        reason=score.reason,
        detail=score.detail,
        parts=dict(score.parts),
    )


def _part(score: Score) -> dict[str, Any]:
    return {"value": score.value, "outcome": score.outcome.value, "reason": score.reason, "detail": score.detail}
