"""Routes that make work: a session of refinement, its evaluation, a person's rating, grades.

A client that hangs up while it waits for /train loses the answer, not the session: it goes on, and its id is in the
list of sessions. Exercised by tests/test_service_http.py.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from rlvr.service.http import grading
from rlvr.service.http.contracts import FeedbackBody, GradeBody, TrainBody
from rlvr.service.http.replies import Begun, Evaluated, Graded, Rated, Trained
from rlvr.service.http.runtime import Asked, Owner, Service
from rlvr.service.loop import ratings
from rlvr.service.problems import Problem, not_found, of_session
from rlvr.store.records import Session, Status

router = APIRouter()
RATED = 5_000  # experiences of one session that are looked through for an iteration

Background = Annotated[bool, Query(description="Answer at once with the session's id, and let it run.")]


@router.post(
    "/train",
    response_model=Trained | Begun,
    summary="Work on a task until an answer is verified",
    responses={200: {"model": Trained}, 202: {"model": Begun, "description": "Begun, with ?background=true."}},
)
async def train(body: TrainBody, service: Asked, owner: Owner, response: Response, background: Background = False):
    session = await begin(body, service, owner)
    if background:
        return in_background(session, response)
    return await service.sessions.answer(await finished(service, session.id))


@router.post(
    "/evaluate",
    response_model=Evaluated | Begun,
    summary="Work on a task, learn nothing from it, and measure it",
    responses={200: {"model": Evaluated}, 202: {"model": Begun, "description": "Begun, with ?background=true."}},
)
async def evaluate(
    body: TrainBody, service: Asked, owner: Owner, response: Response, background: Background = False
) -> Any:
    session = await begin(body, service, owner, learn=False)
    if background:
        return in_background(session, response)
    return await service.sessions.evaluation(await finished(service, session.id))


def in_background(session: Session, response: Response) -> Begun:
    response.status_code = 202
    response.headers["location"] = f"/sessions/{session.id}"
    return Begun(session_id=session.id, status=session.status.value)


async def begin(body: TrainBody, service: Service, owner: str, learn: bool = True) -> Session:
    limits = service.settings.limits
    for field, given, most, unit in (
        ("prompt", len(body.prompt), limits.max_prompt_chars, "characters"),
        ("context", len(body.context), limits.max_prompt_chars, "characters"),
        ("max_iterations", body.max_iterations or 0, limits.most_iterations, "iterations"),
        ("samples", body.samples or 0, limits.max_samples, "samples"),
    ):
        if given > most:
            raise Problem(422, "invalid", f"{field}: {given:,} {unit}, this service takes {most:,}", field=field)
    service.generator_ready()
    return await service.sessions.start(body.request(learn), owner)


async def finished(service: Service, session_id: str) -> Session:
    """The session, once it is over; a Problem that names it where it did not end well."""
    session = await service.sessions.wait(session_id)
    if session.status is not Status.DONE:
        error = session.error or {"code": session.status.value, "message": f"the session was {session.status.value}"}
        raise of_session(session_id, error)
    return session


@router.post("/feedback", response_model=Rated, summary="Rate an answer")
async def feedback(body: FeedbackBody, service: Asked, owner: Owner) -> Rated:
    """A second rating with the same key replaces the first; a rating weighs at most a fifth of the reward."""
    found = body.experience_id
    if found is None:
        rows = await service.ask(service.store.experiences, session_id=body.session_id, limit=RATED, tokens=False)
        same = [row.id for row in rows if (row.iteration, row.sample) == (body.iteration, body.sample)]
        if not same:
            raise not_found("the answer", f"{body.session_id}, iteration {body.iteration}, sample {body.sample}")
        found = same[0]
    rated = await service.ask(ratings.rate, service.store, found, owner, body.rating, body.comment)
    if rated is None:
        raise not_found("experience", found)
    return Rated(
        experience_id=rated.id, session_id=rated.session_id, task_id=rated.task_id, iteration=rated.iteration,
        sample=rated.sample, rating=rated.rating, ratings=rated.ratings,
    )  # fmt: skip


@router.post("/grade", response_model=Graded, summary="Score given answers")
async def grade(body: GradeBody, service: Asked) -> Graded:
    return await service.work(grading.grade, body, service.settings, service.sessions.judge)
