"""Routes about sessions: the list, one of them, its events as they happen, and how to end it.

Exercised by tests/test_service_http.py and tests/test_service_events.py.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.responses import StreamingResponse

from rlvr.service.http import events
from rlvr.service.http.replies import Begun, Evaluated, SessionPage, SessionState
from rlvr.service.http.runtime import Asked, Owner, Service
from rlvr.service.problems import Problem, not_found
from rlvr.store.records import Session, Status

router = APIRouter(prefix="/sessions")
SHOWN = 2_000  # characters of a prompt in a list
EVENT = {"type": "object", "properties": {key: {"type": "string"} for key in ("id", "event", "data")}}
STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": EVENT}}}}


@router.get("", response_model=SessionPage, summary="Sessions, the newest first")
async def sessions(
    service: Asked,
    status: Status | None = None,
    task_id: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    offset: Annotated[int, Query(ge=0, le=2**31)] = 0,
) -> Any:
    if "\x00" in (task_id or ""):
        raise Problem(422, "invalid", "task_id: holds a null character", field="task_id")
    rows = await service.ask(
        service.store.sessions, status=status, task_id=task_id, limit=limit + 1, offset=offset, texts=False
    )  # fmt: skip
    return {
        "sessions": [row_of(row) for row in rows[:limit]],
        "next_offset": offset + limit if len(rows) > limit else None,
    }


@router.get("/{session_id}", response_model=SessionState, summary="One session, and its answer so far")
async def session(session_id: str, service: Asked) -> Any:
    found = await known(service, session_id)
    return row_of(found, SHOWN * 1_000) | {"answer": await service.sessions.answer(found)}


@router.get("/{session_id}/evaluation", response_model=Evaluated, summary="One session in numbers, so far")
async def evaluation(session_id: str, service: Asked) -> Any:
    found = await known(service, session_id)
    if found.kind == "run":
        raise Problem(409, "training_run", "a training run is no session: its summary.json has what it came to")
    return await service.sessions.evaluation(found)


@router.get("/{session_id}/events", response_class=StreamingResponse, responses=STREAM, summary="As it happens")
async def watch(
    session_id: str, service: Asked, last_event_id: Annotated[str, Header(max_length=20, pattern="^[0-9]*$")] = ""
) -> StreamingResponse:
    """Server-sent events: `status`, `iteration` with its feedback, `end`. `Last-Event-ID` goes on after that one."""
    await known(service, session_id)
    told = service.sessions.watch(session_id)
    return StreamingResponse(
        events.stream(told, int(last_event_id or 0)),
        media_type="text/event-stream",
        headers={"cache-control": "no-store", "x-accel-buffering": "no"},
    )


@router.post("/{session_id}/cancel", response_model=Begun, summary="End a session; what was done is kept")
async def cancel(session_id: str, service: Asked, owner: Owner) -> Begun:
    found = await known(service, session_id)
    if found.owner != owner:
        raise Problem(403, "not_yours", "this session was begun with another key", session_id=session_id)
    if found.status.final:
        raise Problem(409, "already_over", f"this session is {found.status.value}", session_id=session_id)
    await service.sessions.cancel(session_id)
    after = await known(service, session_id)
    return Begun(session_id=session_id, status=after.status.value)


async def known(service: Service, session_id: str) -> Session:
    usable = len(session_id) <= 128 and "\x00" not in session_id
    found = await service.ask(service.store.session, session_id) if usable else None
    if found is None:
        raise not_found("session", session_id)
    return found


def row_of(session: Session, most: int = SHOWN) -> dict[str, Any]:
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
