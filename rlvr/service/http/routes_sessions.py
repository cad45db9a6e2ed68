"""Routes about sessions: the list, one session, its events, and cancellation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from starlette.responses import StreamingResponse

from rlvr.core.fair_queue import current_owner
from rlvr.core.fair_slots import LoopTurns
from rlvr.service.http.responses import AcceptedSession, EvaluateResponse, SessionPage, SessionState
from rlvr.service.http.runtime import OwnerDep, Service, ServiceDep
from rlvr.service.http.strict_routes import StrictRoute, json_response
from rlvr.service.session_problems import not_found
from rlvr.store.records import Session, Status
from rlvr.web.errors import HttpProblem

router = APIRouter(prefix="/sessions", route_class=StrictRoute)
PROMPT_CHARS = 2_000  # of a prompt in the list
QUIET_SECONDS = 15.0  # after which a comment keeps the connection open: proxies close silent ones
EVENT = {"type": "object", "properties": {key: {"type": "string"} for key in ("id", "event", "data")}}
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}


@router.get("", response_model=SessionPage, summary="Sessions, the newest first")
async def sessions(
    service: ServiceDep,
    status: Status | None = None,
    task_id: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Any:
    if "\x00" in (task_id or ""):
        raise HttpProblem(422, "invalid", "task_id: holds a null character", field="task_id")

    def answer() -> Response:
        rows = service.store.sessions(status=status, task_id=task_id, limit=limit + 1, offset=offset, texts=False)
        return json_response(SessionPage, {
            "sessions": [session_row(row) for row in rows[:limit]],
            "next_offset": offset + limit if len(rows) > limit else None,
        })  # fmt: skip

    return await service.run_blocking(answer)


@router.get("/{session_id}", response_model=SessionState, summary="One session, and its answer so far")
async def session(session_id: str, service: ServiceDep) -> Any:
    row = await require_session(service, session_id)
    return session_row(row, PROMPT_CHARS * 1_000) | {"answer": await service.sessions.answer(row)}


@router.get("/{session_id}/evaluation", response_model=EvaluateResponse, summary="One session in numbers, so far")
async def evaluation(session_id: str, service: ServiceDep) -> Any:
    session = await require_session(service, session_id)
    if session.kind == "run":
        raise HttpProblem(409, "training_run", "this is a training run; its summary.json has the results")
    return await service.sessions.evaluation(session)


@router.get("/{session_id}/events", response_class=StreamingResponse, responses=STREAM, summary="As it happens")
async def watch(
    session_id: str, service: ServiceDep, last_event_id: Annotated[str, Header(max_length=20, pattern="^[0-9]*$")] = ""
) -> StreamingResponse:
    """Server-sent events: `status`, `iteration` with its feedback, `end`; they resume after `Last-Event-ID`."""
    await require_session(service, session_id)
    return StreamingResponse(
        stream_events(service.sessions.watch(session_id), int(last_event_id or 0), turns=service.turns),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


@router.post("/{session_id}/cancel", response_model=AcceptedSession, summary="End a session and keep its answers")
async def cancel(session_id: str, service: ServiceDep, owner: OwnerDep) -> AcceptedSession:
    session = await require_session(service, session_id)
    if session.owner != owner:
        raise HttpProblem(403, "not_yours", "this session was started with another key", session_id=session_id)
    if session.status.final:
        raise HttpProblem(409, "already_over", f"this session is {session.status.value}", session_id=session_id)
    await service.sessions.cancel(session_id)
    after = await require_session(service, session_id)
    return AcceptedSession(session_id=session_id, status=after.status.value)


async def require_session(service: Service, session_id: str) -> Session:
    is_usable = len(session_id) <= 128 and "\x00" not in session_id
    session = await service.run_blocking(service.store.session, session_id) if is_usable else None
    if session is None:
        raise not_found("session", session_id)
    return session


def session_row(session: Session, most: int = PROMPT_CHARS) -> dict[str, Any]:
    return {
        "session_id": session.id,
        "task_id": session.task_id,
        "kind": session.kind,
        "name": session.name,
        "status": session.status.value,
        "prompt": session.prompt[:most],
        "created": session.created,
        "started": session.started,
        "finished": session.finished,
        "iterations": session.iterations,
        "confidence": session.final_confidence,
        "converged": session.converged,
        "error": session.error,
    }


async def stream_events(
    events: AsyncIterator[dict[str, Any]],
    after: int = 0,
    quiet_s: float = QUIET_SECONDS,
    turns: LoopTurns | None = None,
) -> AsyncIterator[bytes]:
    """Encode the events after number `after`. `events` always starts with the session's first event. `turns`: an event
    may have thousands of watchers, and each encodes an answer; those of one owner go on one by one."""
    yield b"retry: 2000\n\n"
    number, waiting = 0, None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            await asyncio.wait((waiting,), timeout=quiet_s)
            if not waiting.done():
                yield b": still here\n\n"
                continue
            try:
                event = waiting.result()
            except StopAsyncIteration:
                return
            waiting, number = None, number + 1
            if turns is not None:
                await turns.take(current_owner())
            if number > after:
                yield encode_event(number, event)
    finally:
        if waiting is not None:
            waiting.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                await waiting
        await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]


def encode_event(number: int, event: dict[str, Any]) -> bytes:
    """Encode one event. JSON escapes line breaks in strings, so an answer cannot end the event."""
    name = str(event.get("event", "message"))
    return f"id: {number}\nevent: {name}\ndata: {json.dumps(event, allow_nan=False)}\n\n".encode()
