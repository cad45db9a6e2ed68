"""What every route has: the caller with the backend it calls, and JSON bodies that are read off the event loop.

Bodies are parsed and checked, and long answers written, on a thread. The interpreter runs one thread at a time, and a
call into C keeps it until it returns, so what may be long is done in pieces of about a millisecond (`dump_json`).
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from rlvr.core.gc_pause import CollectionPause
from rlvr.tinker_server.http.tinker_middleware import LongPolls
from rlvr.tinker_server.protocol.errors import UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits, WireLimits
from rlvr.web.json_bodies import has_more_parts, read_json

if TYPE_CHECKING:
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
MAX_PARTS, MAX_VALUES = 50_000, 300_000  # of a body: the parser is one call into C, of 40 ms for so many
SMALL_BODY = 16 << 10  # bytes that are parsed in less than a millisecond: not worth a thread
DEPTH = 5  # of an answer of the open endpoints: what is below takes at most `max_topk` entries
NUMBERS = 1_024  # of a list that are written in one call
COMPUTATIONS = 2  # at once
_COLLECTION_PAUSE = CollectionPause()


@dataclass(frozen=True)
class Caller:
    backend: TinkerBackend
    owner: str
    polls: LongPolls
    limits: ServerLimits
    wire: WireLimits
    request: Request
    threads: CapacityLimiter
    computations: CapacityLimiter
    all_computations: CapacityLimiter

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the backend for this owner, on a thread: some of them wait for the disk."""
        return await to_thread.run_sync(partial(method, self.owner, *args, **kwargs), limiter=self.threads)

    async def compute(self, work: Callable[..., T], *args: Any) -> T:
        """Return `work(*args)`, computed on a thread: long bodies, texts and answers. One owner has one at a time, and
        all together two, because every thread that computes slows the event loop."""

        def run() -> T:
            with _COLLECTION_PAUSE:
                return work(*args)

        async with self.computations:
            return await to_thread.run_sync(run, limiter=self.all_computations)


async def _caller(request: Request) -> Caller:
    """One owner gets `owner_threads` threads, so that it cannot use up those of others."""
    state = request.app.state
    owner, middleware = request.state.owner, state.middleware
    if (threads := state.threads.get(owner)) is None:
        threads = state.threads[owner] = CapacityLimiter(middleware.limits.owner_threads)
        state.computations[owner] = CapacityLimiter(1)
    return Caller(
        state.backend, owner, middleware.polls, middleware.limits, middleware.wire, request, threads,
        state.computations[owner], state.all_computations,
    )  # fmt: skip


CallerDep = Annotated[Caller, Depends(_caller)]


class JsonRoute(APIRoute):
    """A route that gets its JSON body as the pydantic model in its signature, read on a thread if it is long."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        hints = get_type_hints(endpoint, include_extras=True)
        signature = inspect.signature(endpoint)
        for name, kind in hints.items():
            if isinstance(kind, type) and issubclass(kind, BaseModel) and name in signature.parameters:
                hints[name] = Annotated[kind, Depends(body_reader(kind))]
                schema = {"required": True, "content": {"application/json": {"schema": describe_model(kind)}}}
                options["openapi_extra"] = {"requestBody": schema, **(options.get("openapi_extra") or {})}
        parameters = [one.replace(annotation=hints[name]) for name, one in signature.parameters.items()]
        endpoint.__dict__["__signature__"] = signature.replace(parameters=parameters)
        super().__init__(path, endpoint, **options)


def describe_model(kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of a model, whose `$defs` the document of the server has among its schemas."""
    return kind.model_json_schema(ref_template="#/components/schemas/{model}")


def body_reader(kind: type[Model]) -> Callable[..., Coroutine[Any, Any, Model]]:
    async def read(request: Request, caller: CallerDep) -> Model:
        raw, content_type = await request.body(), request.headers.get("content-type", "")
        if len(raw) <= SMALL_BODY:
            return parse_body(kind, raw, content_type)
        return await caller.compute(parse_body, kind, raw, content_type)

    return read


def parse_body(kind: type[Model], raw: bytes, content_type: str) -> Model:
    """RequestValidationError names the fields at fault, or the place where the JSON ends to be any."""
    form = content_type.partition(";")[0].strip().lower()
    if not (form == "application/json" or (form.startswith("application/") and form.endswith("+json"))):
        raise UserError(f"the body is of type {content_type[:100]!r}; send it as application/json")
    if has_more_parts(raw, MAX_PARTS, MAX_VALUES):
        raise UserError(
            f"the body has more than {MAX_PARTS:,} lists, objects and fields, or more than {MAX_VALUES:,} values; send "
            "less in one request"
        )
    try:
        return kind.model_validate(read_json(raw))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found[:5]]) from error
    except json.JSONDecodeError as error:
        fault = {"type": "json_invalid", "loc": ("body", error.pos), "msg": f"JSON decode error: {error.msg}"}
        raise RequestValidationError([fault]) from error
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UserError(f"the body cannot be read as JSON ({type(error).__name__})") from error


def json_response(value: Any) -> Response:
    """The response to send; call it on a thread where the value may be long."""
    return Response(dump_json(value), media_type="application/json")


def dump_json(value: Any) -> bytes:
    """What `json.dumps` writes, in pieces: other threads run between them."""
    pieces: list[bytes] = []
    _write(value, DEPTH, pieces)
    return b"".join(pieces)


def _write(value: Any, depth: int, pieces: list[bytes]) -> None:
    if isinstance(value, dict) and depth and value:
        for number, (name, part) in enumerate(value.items()):
            pieces.append((b"," if number else b"{") + _dump(name) + b":")
            _write(part, depth - 1, pieces)
        pieces.append(b"}")
    elif isinstance(value, list) and depth and value and isinstance(value[0], (dict, list, type(None))):
        for number, part in enumerate(value):
            pieces.append(b"," if number else b"[")
            _write(part, depth - 1, pieces)
        pieces.append(b"]")
    elif isinstance(value, list) and len(value) > NUMBERS:
        for start in range(0, len(value), NUMBERS):
            pieces.append((b"," if start else b"[") + _dump(value[start : start + NUMBERS])[1:-1])
        pieces.append(b"]")
    else:
        pieces.append(_dump(value))


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def without_non_finite(value: Any) -> Any:
    """The value with null for numbers that are not finite: JSON has none, and a user's metadata may hold them."""
    if isinstance(value, dict):
        return {name: without_non_finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_non_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
