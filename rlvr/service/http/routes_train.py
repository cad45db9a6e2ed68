"""Routes that make work: sessions of refinement, evaluations, ratings, grades.

If a client disconnects while it waits for /train, the session continues, and the list of sessions has it.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from rlvr.service.http import grading
from rlvr.service.http.requests import FeedbackBody, GradeBody, TrainBody
from rlvr.service.http.responses import AcceptedSession, EvaluateResponse, GradeResponse, RatingResponse, TrainResponse
from rlvr.service.http.runtime import OwnerDep, Service, ServiceDep
from rlvr.service.http.strict_routes import StrictRoute
from rlvr.service.learning import strategy_policy as ratings
from rlvr.service.session_problems import not_found, session_problem
from rlvr.store.records import Session, Status
from rlvr.web.errors import HttpProblem

router = APIRouter(route_class=StrictRoute)
Background = Annotated[bool, Query(description="Respond at once with the session's id, and let it run.")]


@router.post(
    "/train",
    response_model=TrainResponse | AcceptedSession,
    summary="Work on a task until an answer is verified",
    responses={
        200: {"model": TrainResponse},
        202: {"model": AcceptedSession, "description": "Accepted, with ?background=true."},
    },
)
async def train(
    body: TrainBody, service: ServiceDep, owner: OwnerDep, response: Response, background: Background = False
):
    session = await start_session(body, service, owner, background)
    if background:
        return accepted_response(session, response)
    return await service.sessions.answer(await wait_for_session(service, session.id))


@router.post(
    "/evaluate",
    response_model=EvaluateResponse | AcceptedSession,
    summary="Work on a task, learn nothing from it, and measure it",
    responses={
        200: {"model": EvaluateResponse},
        202: {"model": AcceptedSession, "description": "Accepted, with ?background=true."},
    },
)
async def evaluate(
    body: TrainBody, service: ServiceDep, owner: OwnerDep, response: Response, background: Background = False
) -> Any:
    session = await start_session(body, service, owner, background, learn=False)
    if background:
        return accepted_response(session, response)
    return await service.sessions.evaluation(await wait_for_session(service, session.id))


def accepted_response(session: Session, response: Response) -> AcceptedSession:
    response.status_code = 202
    response.headers["location"] = f"/sessions/{session.id}"
    return AcceptedSession(
        session_id=session.id, status=session.status.value, warnings=session.metrics.get("warnings", [])
    )


async def start_session(body: TrainBody, service: Service, owner: str, background: bool, learn: bool = True) -> Session:
    limits = service.settings.limits
    for field, size, most, unit in (
        ("prompt", len(body.prompt), limits.max_prompt_chars, "characters"),
        ("context", len(body.context), limits.max_prompt_chars, "characters"),
        ("max_iterations", body.max_iterations or 0, limits.most_iterations, "iterations"),
        ("samples", body.samples or 0, limits.max_samples, "samples"),
    ):
        if size > most:
            raise HttpProblem(422, "invalid", f"{field}: {size:,} {unit}; the limit is {most:,}", field=field)
    await service.wait_for_generator()
    return await service.sessions.start(body.request(learn), owner, is_background=background)


async def wait_for_session(service: Service, session_id: str) -> Session:
    """Wait for the session's end; HttpProblem with its id unless it is done."""
    session = await service.sessions.wait(session_id)
    if session.status is not Status.DONE:
        error = session.error or {"code": session.status.value, "message": f"the session was {session.status.value}"}
        raise session_problem(session_id, error)
    return session


@router.post("/feedback", response_model=RatingResponse, summary="Rate an answer")
async def feedback(body: FeedbackBody, service: ServiceDep, owner: OwnerDep) -> RatingResponse:
    """A second rating with the same key replaces the first; a rating weighs at most a fifth of the reward."""
    id = body.experience_id
    if id is None:
        rows = await service.run_blocking(
            service.store.experiences, session_id=body.session_id, limit=ratings.MOST_ANSWERS, tokens=False
        )
        ids = [row.id for row in rows if (row.iteration, row.sample) == (body.iteration, body.sample)]
        if not ids:
            raise not_found("the answer", f"{body.session_id}, iteration {body.iteration}, sample {body.sample}")
        id = ids[0]
    rated = await service.run_blocking(ratings.rate, service.store, id, owner, body.rating, body.comment)
    if rated is None:
        raise not_found("experience", id)
    return RatingResponse(
        experience_id=rated.id, session_id=rated.session_id, task_id=rated.task_id, iteration=rated.iteration,
        sample=rated.sample, rating=rated.rating, ratings=rated.ratings,
    )  # fmt: skip


@router.post("/grade", response_model=GradeResponse, summary="Score given answers")
async def grade(body: GradeBody, service: ServiceDep, owner: OwnerDep, request: Request) -> GradeResponse:
    """If the client leaves, what still waits is dropped, and programs that run are killed."""
    service.require_running()
    sessions = service.sessions
    work = partial(grading.grade, body, service.settings, sessions.judge, sessions.metrics.observe_verifier)
    return await service.grading.run(owner, request, work)
