"""The service as an ASGI application: routes, one shape for errors, the dashboard, and the middleware around them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from rlvr import __version__
from rlvr.core.fair_slots import FairSlots
from rlvr.service.http import routes_read, routes_sessions, routes_train
from rlvr.service.http.openapi_schema import build_openapi
from rlvr.service.http.requests import describe_error, find_field
from rlvr.service.http.responses import ProblemResponse
from rlvr.service.http.runtime import Service
from rlvr.service.http.service_middleware import ServiceMiddleware, internal_error
from rlvr.service.http.strict_routes import READERS, find_body_model
from rlvr.service.session_problems import store_unavailable
from rlvr.store import StoreDown
from rlvr.web.errors import HttpProblem
from rlvr.web.middleware import register_error_handlers
from rlvr.web.openapi_route import add_openapi_route
from rlvr.web.prometheus import Prometheus

ABOUT = (
    "Generate, verify, reward, update: the service works on tasks until an answer is verified, and its policy learns "
    "from the verifiers' scores."
)
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProblemResponse, "description": words}
    for status, words in {
        401: "The API key is missing or unknown.",
        403: "Not allowed from this origin, or with this key.",
        404: "Not found.",
        408: "The body arrived too slowly.",
        409: "Not possible in the current state.",
        413: "The body is too large.",
        422: "A field is wrong; `field` names it.",
        429: "Too many requests, or too many sessions wait; `Retry-After` says when.",
        500: "An internal error; the log says why.",
        502: "The generator or the judge gave no usable answer; the session keeps its answers.",
        503: "Not now: no generator, or no database; `detail` says what to do.",
        504: "The generator took too long.",
    }.items()
}
FAILURES = (StoreDown, RequestValidationError, Exception)
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(service: Service, lifespan: Lifespan | None = None) -> ServiceMiddleware:
    app = FastAPI(
        title="RLVR service", version=__version__, description=ABOUT, openapi_url=None,
        lifespan=lifespan or _no_lifespan, responses=REFUSALS, redirect_slashes=False,
    )  # fmt: skip
    app.openapi = lambda: build_openapi(app, service)
    app.state.service, app.state.prometheus = service, Prometheus()
    app.state.readers = FairSlots(READERS, READERS)
    for routes in (routes_train, routes_read, routes_sessions):
        app.include_router(routes.router)
    add_openapi_route(app)
    register_error_handlers(app, describe_failure, FAILURES)
    settings, keys, has_own_auth = service.settings, service.keys, None
    if settings.dashboard:
        from rlvr.service.dashboard.dashboard_app import attach, is_dashboard
        from rlvr.service.dashboard.session_source import StoreSource

        generator = service.generator
        source = StoreSource(
            service.store, health=generator.health, learning=generator.learning, decode=generator.decode,
            collect=service.sessions.metrics.collect, limit=service.settings.limits.sessions,
        )  # fmt: skip
        dashboard = attach(app, source, owner_of=keys.owner if keys else None, loopback_only=not keys)
        service.on_stop.append(dashboard.stop)
        has_own_auth = is_dashboard
    count = app.state.prometheus.count
    return ServiceMiddleware(app, keys, settings.limits, settings.cors_origins, count=count, has_own_auth=has_own_auth)


@asynccontextmanager
async def _no_lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield


def describe_failure(request: Request, error: Exception) -> HttpProblem:
    """The response for an error that FastAPI, the store or our own code raised."""
    match error:
        case StoreDown():
            return store_unavailable(error)
        case RequestValidationError():
            return _invalid(request, error)
        case HTTPException():
            where = f"{request.method} {request.url.path[:200]}"
            allowed = (error.headers or {}).get("Allow") or "another method"
            status, code, detail = {
                404: (404, "not_found", f"{where} does not exist; /openapi.json lists all paths"),
                405: (405, "method_not_allowed", f"{where}: this path takes {allowed}; /openapi.json describes it"),
                400: (422, "invalid", f"the body cannot be read: {error.detail}; expected one JSON object"),
            }.get(error.status_code, (error.status_code, "refused", str(error.detail)))
            return HttpProblem(status, code, detail, headers=dict(error.headers or {}))
        case _:
            return internal_error()


def _invalid(request: Request, error: RequestValidationError) -> HttpProblem:
    """Name the fields at fault and what was expected."""
    errors = error.errors()
    body = find_body_model(request.scope["endpoint"])
    content_type = request.headers.get("content-type", "")
    words = [f"{find_field(one) or 'body'}: {describe_error(one, body, content_type)}" for one in errors[:5]]
    words = list(dict.fromkeys(words))  # the forms of a list's entry have one description
    field = next((name for one in errors if (name := find_field(one))), "")
    return HttpProblem(422, "invalid", "; ".join(words)[:2_000], field=field)
