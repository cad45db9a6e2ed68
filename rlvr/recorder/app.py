"""The recorder's web application: three dialects at the address of each rollout.

    POST /r/<token>/v1/chat/completions    POST /r/<token>/v1/responses    POST /r/<token>/v1/messages
    GET  /r/<token>/v1/models
    POST /r/<token>/reward          {"reward", "call"?, "source"?}: of the rollout, or of the branch of a call

A program needs the address and any key. The answers come from the part that takes the calls of the rollout.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rlvr.chat.dialects.forms import ApiDialect, ChatAnswer, ChatRequest, DialectError, Event, Json
from rlvr.chat.dialects.registry import DIALECTS
from rlvr.recorder.open_rollouts import OpenRollout, OpenRollouts, PendingCall, ReportedReward
from rlvr.web.json_bodies import has_more_parts, read_json

MAX_BODY = 16 << 20  # bytes
MAX_PARTS, MAX_VALUES = 200_000, 1_000_000
_LOOK_SECONDS = 0.5  # between looks at whether the client is still there
_LARGE = 64 << 10  # bytes that are read on a thread


def make_app(rollouts: OpenRollouts, model: str) -> Starlette:
    """The application over open rollouts. `model` is the name that `/v1/models` gives; calls may name any."""

    def find(request: Request) -> OpenRollout:
        rollout = rollouts.find(request.path_params["token"])
        if rollout is None:
            raise DialectError("no open rollout has this address; open one first (POST /rollouts)", status=410)
        return rollout

    async def answer(request: Request, dialect: ApiDialect) -> Response:
        held = 0
        rollout = None

        def hold(size: int) -> None:
            nonlocal held
            assert rollout is not None
            rollout.hold(size)
            held += size

        try:
            rollout = find(request)
            raw = await read_body(request, hold)
            body = await asyncio.to_thread(parse_body, raw) if len(raw) > _LARGE else parse_body(raw)
            call = await asyncio.to_thread(dialect.read, body) if len(raw) > _LARGE else dialect.read(body)
            pending = rollout.offer(call, dialect.name, body)
            answers = await _wait(request, pending)
        except DialectError as error:
            return write_error(dialect, error)
        finally:
            if rollout is not None:
                rollout.hold(-held)
        return write_answer(dialect, pending.call, answers, pending.id)

    def route(dialect: ApiDialect) -> Route:
        async def handle(request: Request) -> Response:
            return await answer(request, dialect)

        return Route(f"/r/{{token}}{dialect.path}", handle, methods=["POST"], name=dialect.name)

    def models(request: Request, body: Json) -> Json:
        find(request)
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "rlvr"}]}

    def reward(request: Request, body: Json) -> Json:
        given = read_reward(body)
        find(request).report(given)
        return {"reward": given.reward, **({"call": given.call} if given.call else {})}

    own = [Route("/r/{token}/v1/models", answer_json(models)), json_route("/r/{token}/reward", reward)]
    return Starlette(routes=[*(route(dialect) for dialect in DIALECTS.values()), *own])


def json_route(path: str, handle: Callable[[Request, Json], Json]) -> Route:
    """A route that is asked by POST, with a JSON object or nothing."""
    return Route(path, answer_json(handle), methods=["POST"])


def answer_json(handle: Callable[[Request, Json], Json]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            raw = await read_body(request)
            return JSONResponse(handle(request, parse_body(raw) if raw.strip() else {}))
        except DialectError as error:
            return JSONResponse({"error": {"message": str(error)}}, status_code=error.status)

    return answer


def read_reward(body: Json) -> ReportedReward:
    """The reward of a body. DialectError for one that is none."""
    reward: Any = body.get("reward")
    call, source = body.get("call", ""), body.get("source", "")
    is_number = isinstance(reward, bool | int | float) and abs(reward) <= sys.float_info.max
    if not (is_number and isinstance(call, str) and isinstance(source, str)):
        raise DialectError(
            f"reward={reward!r:.80}, call={call!r:.80}, source={source!r:.80}; expected a finite number, the id of an "
            "answer or nothing, and a text or nothing"
        )
    return ReportedReward(float(reward), call, source[:500])


async def read_body(request: Request, hold: Callable[[int], None] = lambda size: None) -> bytes:
    """The body. `hold` is called with the size of each part, and may refuse it."""
    raw = bytearray()
    try:
        async for part in request.stream():
            hold(len(part))
            raw += part
            if len(raw) > MAX_BODY:
                raise DialectError(f"the body is larger than {MAX_BODY >> 20} MiB; send less", status=413)
    except ClientDisconnect as error:
        raise DialectError("the client closed the connection") from error
    return bytes(raw)


def parse_body(raw: bytes) -> Json:
    if has_more_parts(raw, MAX_PARTS, MAX_VALUES):
        raise DialectError(
            f"the body has more than {MAX_PARTS:,} lists, objects and fields, or more than {MAX_VALUES:,} values",
            status=413,
        )
    try:
        body = read_json(raw)
    except (ValueError, RecursionError) as error:
        raise DialectError(f"the body is not JSON ({error!s:.200})") from error
    if not isinstance(body, dict):
        raise DialectError(f"the body is a JSON {type(body).__name__}, expected an object")
    return body


async def _wait(request: Request, pending: PendingCall) -> Any:
    """The answers. A client that leaves ends the wait, and the call is marked."""
    future = asyncio.wrap_future(pending.answers)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # so that it is never an unread error
    while True:
        done, _ = await asyncio.wait([future], timeout=_LOOK_SECONDS)
        if await request.is_disconnected():
            pending.leave()
            raise DialectError("the client closed the connection", status=499)
        if done:
            pending.mark_delivered(True)
            return future.result()


def write_answer(dialect: ApiDialect, call: ChatRequest, answers: Sequence[ChatAnswer], id: str) -> Response:
    created = int(time.time())
    if not call.stream:
        return JSONResponse(dialect.write(call, answers, id, created))
    events = _encode_events(dialect.write_events(call, answers, id, created))
    return StreamingResponse(events, media_type="text/event-stream")


def write_error(dialect: ApiDialect, error: Exception) -> Response:
    status = getattr(error, "status", 400)
    return JSONResponse(dialect.write_error(str(error), status, getattr(error, "param", None)), status)


async def _encode_events(events: Iterable[Event]) -> AsyncIterator[bytes]:
    for event in events:
        yield event.encode()
