"""HTTP for `Core`: the calls of the `tinker` SDK, as FastAPI routes behind one boundary.

    app = create_app(core, Keys.load(None))

A route reads the body, calls `Core`, and writes what that returned. Every refusal is JSON with the reason, whose fault
it was and the id of the request, under a status that the SDK shows at once instead of repeating. Exercised by
tests/test_tinker_http.py and, with the real SDK, by tests/test_tinker_sdk.py.

Left out on purpose: the hosted service's accounts (projects, billing, audit, traces), refused by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rlvr import __version__
from rlvr.service.keys import Keys
from rlvr.service.tinker_api import routes_rest, routes_sampling, routes_session, routes_training
from rlvr.service.tinker_api.boundary import MAX_BODY, Boundary, Refused, refusal, shown
from rlvr.service.tinker_api.errors import CoreError, UserError
from rlvr.service.tinker_api.logs import LOGGER
from rlvr.service.tinker_api.waiting import POLL_SECONDS, Waiting
from rlvr.service.tinker_api.wire import BadRequest

if TYPE_CHECKING:
    from rlvr.service.tinker_api.core import Core


def create_app(
    core: Core,
    keys: Keys,
    *,
    max_body: int = MAX_BODY,
    poll_seconds: float = POLL_SECONDS,
    loopback_only: bool | None = None,
) -> Boundary:
    """The ASGI application. Without keys it answers on the loopback interface only."""
    app = FastAPI(title="rlvr: the Tinker protocol", version=__version__, docs_url=None, redoc_url=None)
    app.state.core, app.state.waiting = core, (waiting := Waiting(poll_seconds))
    app.state.threads = {}
    for routes in (routes_session, routes_training, routes_sampling, routes_rest):
        app.include_router(routes.router, prefix="/api/v1")
    app.add_exception_handler(CoreError, _core_error)
    app.add_exception_handler(BadRequest, _bad_request)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _no_such_call)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _our_fault)
    loopback_only = not keys if loopback_only is None else loopback_only
    return Boundary(app, keys, waiting, max_body=max_body, loopback_only=loopback_only)


def _answer(request: Request, error: CoreError) -> Response:
    headers, body = refusal(error, request.scope["state"])
    return Response(body, error.status, {name.decode(): value.decode() for name, value in headers})


async def _core_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CoreError)
    return _answer(request, error)


async def _bad_request(request: Request, error: Exception) -> Response:
    return _answer(request, UserError(str(error)))


async def _invalid(request: Request, error: Exception) -> Response:
    """A JSON body that is none of ours: which field, and what was expected there."""
    assert isinstance(error, RequestValidationError)
    told = [f"{'.'.join(str(part) for part in e['loc'][1:]) or 'body'}: {e['msg']}" for e in error.errors()[:5]]
    return _answer(request, UserError("; ".join(told)[:2_000]))


async def _no_such_call(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, CoreError):  # of the boundary, while the body was read
        return _answer(request, error.__cause__)
    told = f"this server has no call {request.method} {request.url.path[:200]}" if error.status_code == 404 else ""
    return _answer(request, Refused(error.status_code, told or str(error.detail)))


async def _gone(request: Request, error: Exception) -> Response:
    return _answer(request, UserError("the connection was closed before the body was complete"))


async def _our_fault(request: Request, error: Exception) -> Response:
    """Not a 5xx: the SDK would repeat it for five minutes before it showed anything."""
    request_id = request.scope["state"]["request_id"]
    LOGGER.error(
        "a request failed by our fault", exc_info=error, extra={"request_id": request_id, "path": shown(request.scope)}
    )
    fault = Refused(422, f"the server failed at this request ({type(error).__name__}); its log says why")
    fault.category = "server"
    return _answer(request, fault)
