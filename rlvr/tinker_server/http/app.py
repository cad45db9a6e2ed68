"""HTTP for `TinkerBackend`: the calls of the `tinker` SDK, as FastAPI routes behind one middleware.

    app = create_app(backend, ApiKeys.load(None))

A route reads the body, calls the backend and returns its result. Every error is JSON: the reason, whose fault it is
and the id of the request, under a status that the SDK shows at once instead of retrying.

Left out on purpose: the hosted service's accounts (billing, audit, traces), refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import CapacityLimiter
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rlvr import __version__
from rlvr.tinker_server.http import routes_operation, routes_rest, routes_sampling, routes_session, routes_training
from rlvr.tinker_server.http.dependencies import COMPUTATIONS
from rlvr.tinker_server.http.open_api import chat_routes, open_routes, recorded_routes
from rlvr.tinker_server.http.openapi_document import build_openapi
from rlvr.tinker_server.http.tinker_middleware import TinkerMiddleware, internal_error
from rlvr.tinker_server.protocol.errors import StatusError, TinkerServerError, UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.tinker_server.protocol.wire import BadRequest
from rlvr.web.auth import ApiKeys
from rlvr.web.middleware import register_error_handlers
from rlvr.web.openapi_route import add_openapi_route

if TYPE_CHECKING:
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend


def create_app(
    backend: TinkerBackend,
    keys: ApiKeys,
    limits: ServerLimits = ServerLimits(),
    *,
    loopback_only: bool | None = None,
) -> TinkerMiddleware:
    """The ASGI application. Without keys it answers on the loopback interface only."""
    middleware = TinkerMiddleware(keys, limits, loopback_only=loopback_only)
    middleware.open(create_routes(backend, middleware))
    return middleware


def create_routes(backend: TinkerBackend, middleware: TinkerMiddleware) -> FastAPI:
    """The routes that the middleware protects."""
    app = FastAPI(title="rlvr: the Tinker protocol", version=__version__, openapi_url=None)
    app.state.backend, app.state.middleware = backend, middleware
    app.state.threads, app.state.computations, app.state.all_computations = {}, {}, CapacityLimiter(COMPUTATIONS)
    # /sessions/search before /sessions/{session_id}: the first route of a path says which methods it has.
    for routes in (routes_rest, routes_session, routes_training, routes_sampling):
        app.include_router(routes.router, prefix="/api/v1")
    app.include_router(routes_operation.router)
    app.state.texts = {}
    app.include_router(open_routes.router)
    app.include_router(chat_routes.router)
    app.state.rollouts = recorded_routes.ServedRollouts(backend)
    app.include_router(recorded_routes.router)
    middleware.rollout_owner = app.state.rollouts.owner_of
    app.openapi = lambda: build_openapi(app)
    add_openapi_route(app)
    register_error_handlers(app, describe_failure, (BadRequest, RequestValidationError, ClientDisconnect, Exception))
    return app


def _suggest_path(path: str) -> str:
    """What to write where the base URL of a client of the open endpoints has a part too little or too much."""
    routes = [*open_routes.router.routes, *chat_routes.router.routes]
    known = [route.path for route in routes if isinstance(route, APIRoute)]
    near = next((name for name in known if path != "/" and (name.endswith(path) or path.endswith(name))), "")
    return f" (did you mean {near}?); the base URL of OpenAI's clients ends in /v1" if near else ""


def describe_failure(request: Request, error: Exception) -> TinkerServerError:
    """The response for an error that FastAPI, the reader of the protocol or our own code raised."""
    match error:
        case BadRequest():
            return UserError(str(error))
        case RequestValidationError():
            faults = [
                f"{'.'.join(str(part) for part in e['loc'][1:]) or 'body'}: {e['msg'].removeprefix('Value error, ')}"
                for e in error.errors()[:5]
            ]
            fault = UserError("; ".join(faults)[:2_000])
            place = error.errors()[0]["loc"][1:]
            fault.param = str(place[0]) if place else open_routes.find_param(faults[0].removeprefix("body: "))
            return fault
        case HTTPException(status_code=404):
            path = request.url.path[:200]
            return StatusError(404, f"this server has no call {request.method} {path}{_suggest_path(path)}")
        case HTTPException():
            return StatusError(error.status_code, str(error.detail))
        case ClientDisconnect():
            return UserError("the connection was closed before the body was complete")
        case _:
            return internal_error(error)
