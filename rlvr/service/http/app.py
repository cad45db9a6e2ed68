"""The service as an ASGI application: routes, errors in one shape, the dashboard behind them, the door in front.

    app = create_app(service)

Exercised by tests/test_service_http.py against a real server, and by schemathesis over /openapi.json.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, get_type_hints

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from rlvr import __version__
from rlvr.service.http import routes_read, routes_sessions, routes_train
from rlvr.service.http.contracts import told
from rlvr.service.http.door import Door, our_fault
from rlvr.service.http.metrics_text import Prometheus
from rlvr.service.http.replies import ProblemReply
from rlvr.service.http.runtime import Service, away
from rlvr.service.logs import logger
from rlvr.service.problems import Problem
from rlvr.store import StoreDown

ABOUT = (
    "Generate, verify, reward, update: tasks are worked on until an answer is verified, and the policy learns from "
    "what the verifiers said."
)
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProblemReply, "description": words}
    for status, words in {
        401: "No API key, where one is needed.",
        403: "Not from there, or not with this key.",
        404: "Unknown here.",
        408: "The body came too slowly.",
        409: "Not in this state.",
        413: "The body is too large.",
        422: "A field is wrong; `field` names it.",
        429: "Too many requests, or too many sessions wait; `Retry-After` says when.",
        500: "Our fault; the log says why.",
        502: "The generator or the judge gave no usable answer; the session keeps what was done.",
        503: "Not now: no generator, or no database; `detail` says what to do.",
        504: "The generator took too long.",
    }.items()
}
log = logger("rlvr.service")
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(service: Service, lifespan: Lifespan | None = None) -> Door:
    app = FastAPI(
        title="RLVR service", version=__version__, description=ABOUT, docs_url=None, redoc_url=None,
        lifespan=lifespan or _nothing, responses=REFUSALS, redirect_slashes=False,
    )  # fmt: skip
    app.state.service, app.state.prometheus = service, Prometheus()
    for routes in (routes_train, routes_read, routes_sessions):
        app.include_router(routes.router)
    tell_errors(app)
    settings, keys, own_door = service.settings, service.keys, None
    if settings.dashboard:
        from rlvr.service.dashboard.mount import attach, is_dashboard
        from rlvr.service.dashboard.sessions import StoreSource

        generator = service.generator
        source = StoreSource(
            service.store, health=generator.health, learning=generator.learning, decode=generator.decode
        )
        attach(app, source, owner_of=keys.owner if keys else None, loopback_only=not keys)
        own_door = is_dashboard
    count = app.state.prometheus.count
    return Door(app, keys, settings.limits, settings.cors_origins, count=count, own_door=own_door)


def tell_errors(app: FastAPI) -> None:
    """Whatever goes wrong becomes a body of one shape."""
    for kind, handler in (
        (Problem, _problem),
        (StoreDown, _away),
        (RequestValidationError, _invalid),
        (HTTPException, _http),
        (Exception, _our_fault),
    ):
        app.add_exception_handler(kind, handler)


@asynccontextmanager
async def _nothing(app: FastAPI) -> AsyncIterator[None]:
    yield


def _answer(request: Request, problem: Problem) -> Response:
    state = request.scope.setdefault("state", {})
    state["reason"] = problem.detail
    return Response(problem.body(state.get("request_id", "")), problem.status, problem.headers())


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return _answer(request, error)


async def _away(request: Request, error: Exception) -> Response:
    return _answer(request, away(error))


async def _invalid(request: Request, error: Exception) -> Response:
    """Which field, and what was expected there."""
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    given = get_type_hints(request.scope["endpoint"]).values()
    body = next((kind for kind in given if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    sent = request.headers.get("content-type", "")
    words = [f"{_field(one) or 'body'}: {told(one, body, sent)}" for one in found[:5]]
    field = next((name for one in found if (name := _field(one))), "")
    return _answer(request, Problem(422, "invalid", "; ".join(words)[:2_000], field=field))


def _field(error: dict[str, Any]) -> str:
    """`verifiers.0.weight` of what pydantic calls ('body', 'verifiers', 0, 'weight')."""
    if error["type"] == "json_invalid":
        return ""
    # Which kind of a union was tried is in the path too; names of fields look otherwise.
    return ".".join(str(part) for part in error["loc"][1:] if str(part).replace("_", "").isalnum())[:300]


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, Problem):  # of the door, while the body was read
        return _answer(request, error.__cause__)
    where = f"{request.method} {request.url.path[:200]}"
    problem = {
        404: Problem(404, "not_found", f"this service has no {where}; /openapi.json lists what it has"),
        405: Problem(405, "method_not_allowed", f"{where}: this path takes another method"),
        400: Problem(422, "invalid", f"the body cannot be read: {error.detail}; expected one JSON object"),
    }.get(error.status_code) or Problem(error.status_code, "refused", str(error.detail))
    answer = _answer(request, problem)
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer


async def _our_fault(request: Request, error: Exception) -> Response:
    log.error("a request failed by our fault", exc_info=error, path=request.url.path[:300])
    return _answer(request, our_fault())
