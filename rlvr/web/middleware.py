"""The ASGI middleware of both servers: API keys, Host and Origin checks, body limits, one log line per request.

It wraps the whole application, so it also sees requests that match no route. A body is counted while it arrives and
refused as soon as it is too large, whatever its headers say. Without keys a server answers on the loopback interface
only, and then `Host` and `Origin` are checked: a web page in a browser on this machine must not reach the server by a
name that resolves to 127.0.0.1.

A server subclasses `Middleware` and overrides its rules: the form of errors, paths without a key, limits.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rlvr.core.fair_queue import become_owner
from rlvr.core.fair_slots import LoopTurns
from rlvr.web.auth import ApiKeys
from rlvr.web.errors import HttpError
from rlvr.web.logs import FieldLogger, bind_ids, clear_ids

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
CountResponse = Callable[[str, str, int, float], None]  # of method, route, status and seconds

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+/@-]{0,127}")  # a client's own, which is logged and echoed


class Middleware:
    """Rules that both servers share. `log` writes one line per request, `count` is called with every response; without
    keys, `loopback_only` should be set."""

    key_hint = "send it as Authorization: Bearer KEY, or as X-API-Key"
    body_hint = ""  # how to send less, or where the limit is set
    body_seconds: float | None = None  # within which a body must be complete, and more where it arrives at `body_rate`
    body_rate: float = math.inf  # bytes a second at which a body may take longer
    max_open_requests = math.inf  # of one owner at a time; each holds a connection
    open_requests_hint = "end some, or send fewer at once"
    max_arriving_bytes = math.inf  # of the bodies that one owner is sending at a time
    max_drained_bytes = 1 << 30  # of a refused body that are read and dropped, so that its client reads the response

    def __init__(
        self,
        app: AsgiApp,
        keys: ApiKeys,
        log: FieldLogger,
        *,
        loopback_only: bool,
        count: CountResponse | None = None,
    ) -> None:
        self._app, self._keys, self._log, self._loopback_only = app, keys, log, loopback_only
        self._count = count
        self._open: Counter[str] = Counter()  # owner -> requests that are not answered
        self._turns = LoopTurns()
        self._arriving: Counter[str] = Counter()  # owner -> bytes of bodies that are being received and read

    @property
    def has_keys(self) -> bool:
        """Whether requests need an API key."""
        return bool(self._keys)

    # Rules

    def error(self, status: int, code: str, detail: str, retry_after: float | None = None) -> HttpError:
        raise NotImplementedError

    def internal_error(self, error: Exception) -> HttpError:
        raise NotImplementedError

    def key_of(self, headers: dict[str, str]) -> str:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        return headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")

    def is_open(self, path: str) -> bool:
        """Whether a path is served without a key."""
        raise NotImplementedError

    def is_probe(self, path: str) -> bool:
        """Whether a path is a health check's, which other requests without a key must not delay or use up."""
        return False

    def open_requests_of(self, scope: Scope, owner: str) -> tuple[str, float]:
        """As whose a request counts while it is open, and how many of these there may be at a time."""
        return owner, math.inf if self.is_probe(scope["path"]) else self.max_open_requests

    def is_quiet(self, scope: Scope, status: int) -> bool:
        """Whether a request is logged at level debug only."""
        raise NotImplementedError

    def is_own_origin(self, origin: str, headers: dict[str, str]) -> bool:
        """Whether a web page of this origin may use a server without keys."""
        raise NotImplementedError

    def max_body(self, path: str) -> int:
        raise NotImplementedError

    def logged_path(self, path: str) -> str:
        return path

    def check_rate(self, scope: Scope, owner: str) -> None:
        """Raise an error if the owner sends too many requests."""

    def is_preflight(self, scope: Scope) -> bool:
        """Whether to answer 204 at once: a browser's question before a request from another origin has no key."""
        return False

    def response_headers(self, scope: Scope, headers: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """Further headers of a response that has these."""
        return {}

    async def wait_until_ready(self, scope: Scope) -> None:
        """Wait until the application can answer; raise an error if that takes too long."""

    # What is done with them

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state["owner"] = self._owner_of(scope)
        try:
            self._authenticate(scope, state)
        except HttpError as error:
            self._log.warning("websocket refused", path=scope["path"][:300], reason=str(error))
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": getattr(error, "code", "refused")})
            return
        await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_at, given_id = time.perf_counter(), headers_of(scope).get("x-request-id", "")
        request_id = given_id if REQUEST_ID.fullmatch(given_id) else f"req-{secrets.token_hex(8)}"
        method = scope["method"]
        if is_head := method == "HEAD":  # answered as GET is, without the body; the server's own scope stays as it is
            scope = {**scope, "method": "GET"}
        state: dict[str, Any] = scope.setdefault("state", {})
        owner = self._owner_of(scope)
        become_owner(owner)
        state |= {"request_id": request_id, "owner": owner, "reason": ""}
        turn = (owner, self.is_probe(scope["path"]))  # clients without a key do not keep a probe waiting
        counted_as, max_open = self.open_requests_of(scope, owner)
        clear_ids()
        bind_ids(request_id=request_id)
        status, received, held, is_started, is_complete = 0, 0, 0, False, False  # `held` of what was received
        limit = self.max_body(scope["path"])
        begun = asyncio.get_running_loop().time()

        def deadline(dropped: int = 0) -> float | None:
            arrived = (received + dropped) / self.body_rate
            return None if self.body_seconds is None else begun + self.body_seconds + arrived

        async def drain() -> None:
            """Read the rest of a refused body: clients retry when a connection closes while they still send."""
            dropped = 0
            with suppress(TimeoutError):
                while dropped < self.max_drained_bytes:
                    async with asyncio.timeout_at(deadline(dropped)):
                        message = await receive()
                    dropped += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return

        async def receive_counted() -> Message:
            nonlocal received, held, is_complete
            if is_complete:  # the next message is the client's disconnect, whenever it comes
                return await receive()
            try:
                async with asyncio.timeout_at(deadline()):
                    message = await receive()
            except TimeoutError:
                await self._turns.take(turn)
                seconds = asyncio.get_running_loop().time() - begun
                raise self.error(408, "too_slow", f"the body was not complete after {seconds:.0f} s") from None
            is_complete = not message.get("more_body", False)
            if message["type"] == "http.disconnect":
                await self._turns.take(turn)
            else:
                size = len(message.get("body", b""))
                received, held = received + size, held + size
                self._arriving[owner] += size
                if received > limit:
                    if not is_complete:
                        await drain()
                    raise self._too_large(limit)
                if self._arriving[owner] > self.max_arriving_bytes:  # its connection stays open, and drops the rest
                    arriving, freed, held = self._arriving[owner], held, 0
                    self._arriving[owner] -= freed  # or the owner's other requests would be refused too
                    raise self._too_many_bytes(arriving)
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status, is_started
            if message["type"] == "http.response.start":
                status, is_started = message["status"], True
                headers = {name.lower(): value for name, value in message.get("headers", ())}
                added = {**self.response_headers(scope, headers), b"x-request-id": request_id.encode()}
                added = [(name, value) for name, value in added.items() if name not in headers]
                message["headers"] = [*message.get("headers", ()), *added]
            elif is_head:
                is_stream = message.get("more_body", False)
                await send({"type": "http.response.body"})
                if is_stream:
                    raise OSError("the response of a HEAD request is complete")  # as if the client had left
                return
            await send(message)

        is_counted = False
        try:
            await self._turns.take(turn)
            if self.is_preflight(scope):
                await send_with_headers({"type": "http.response.start", "status": 204, "headers": []})
                await send_with_headers({"type": "http.response.body"})
                return
            self._authenticate(scope, state)
            self.check_rate(scope, owner)
            if self._open[counted_as] >= max_open:
                raise self._too_many_requests(counted_as, owner)
            self._open[counted_as] += 1
            is_counted = True
            await self.wait_until_ready(scope)
            if (declared := _declared_length(headers_of(scope))) > limit:
                await drain()
                raise self._too_large(limit, declared)
            await self._app(scope, receive_counted, send_with_headers)
        except HttpError as error:
            if not is_started:
                await send_error(send_with_headers, error, state)
        except Exception as error:
            is_over = is_head and is_started and isinstance(error, (OSError, ClientDisconnect))
            if not is_over:
                self._log.exception("a request failed by our fault", path=self.logged_path(scope["path"])[:300])
            if not is_started:
                await send_error(send_with_headers, self.internal_error(error), state)
        finally:
            self._arriving[owner] -= held
            self._open[counted_as] -= is_counted
            self._arriving, self._open = +self._arriving, +self._open  # without owners at zero
            seconds = time.perf_counter() - started_at
            if self._count is not None:
                self._count(method, route_pattern(scope), status or 500, seconds)
            self._log_request({**scope, "method": method}, state, status, seconds)

    def _log_request(self, scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
        """One line per request. `owner` is a hash of the key, `reason` the error that the client was sent."""
        if self.is_quiet(scope, status):
            write = self._log.debug
        else:
            write = self._log.info if status < 400 else self._log.error if status == 500 else self._log.warning
        reason = {"reason": state["reason"][:2_000]} if state["reason"] else {}
        write(
            "request", method=scope["method"], path=self.logged_path(scope["path"])[:300], status=status,
            owner=state["owner"], seconds=round(seconds, 4), **reason,
        )  # fmt: skip

    def _owner_of(self, scope: Scope) -> str:
        return self._keys.owner(self.key_of(headers_of(scope))) or ""

    def _authenticate(self, scope: Scope, state: dict[str, Any]) -> None:
        """Check where a request comes from, and that it has an owner."""
        headers, path = headers_of(scope), scope["path"]
        if self._loopback_only:
            host, origin = headers.get("host", ""), headers.get("origin")
            if host_name(host) not in LOOPBACK:
                served = ", ".join(LOOPBACK)
                detail = f"host {host[:100]!r}: a server without API keys answers on {served} only"
                raise self.error(403, "wrong_host", detail)
            if origin is not None and not self.is_own_origin(origin, headers):
                detail = f"origin {origin[:100]!r}: a server without API keys answers its own web pages only"
                raise self.error(403, "wrong_origin", detail)
        if not state["owner"] and not self.is_open(path):
            fault = "unknown API key" if self.key_of(headers) else "the API key is missing"
            raise self.error(401, "no_key", f"{fault}: {self.key_hint}")

    def _too_large(self, limit: int, declared: int | None = None) -> HttpError:
        size = f"more than {limit:,}" if declared is None else f"{declared:,}"
        return self.error(
            413, "body_too_large", f"the body has {size} bytes; at most {limit:,} are taken{self.body_hint}"
        )

    def _too_many_bytes(self, arriving: int) -> HttpError:
        detail = f"{arriving:,} bytes from you are arriving at the same time; send fewer requests at once"
        return self.error(429, "busy", detail, retry_after=1.0)

    def _too_many_requests(self, counted_as: str, owner: str) -> HttpError:
        hint = self.open_requests_hint if counted_as == owner else Middleware.open_requests_hint
        detail = f"{self._open[counted_as]:,} of your requests are not answered yet; {hint}"
        return self.error(429, "busy", detail, retry_after=1.0)


async def send_error(send: Send, error: HttpError, state: dict[str, Any]) -> None:
    state["reason"] = str(error)
    body = error.body(state["request_id"])
    headers = {**error.headers(), "content-length": str(len(body))}
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def register_error_handlers(
    app: Starlette, convert: Callable[[Request, Exception], HttpError], kinds: tuple[type[Exception], ...]
) -> None:
    """Give every error of the application the one form: an `HttpError` as it is, `kinds` by `convert`."""

    async def handle(request: Request, error: Exception) -> Response:
        cause = error.__cause__ if isinstance(error, HTTPException) else None  # raised while the body was read
        allow: dict[str, str] = {}
        if isinstance(error, HTTPException) and error.status_code == 405:
            route = request.scope.get("route")  # of FastAPI; Starlette's own has one route for a path
            allow = {"Allow": list_methods(request.app, route) if route else (error.headers or {}).get("Allow", "")}
            error.headers = allow
        if isinstance(cause, HttpError):
            error = cause
        problem = error if isinstance(error, HttpError) else convert(request, error)
        state = request.scope.setdefault("state", {})
        state["reason"] = str(problem)
        return Response(problem.body(state.get("request_id", "")), problem.status, {**problem.headers(), **allow})

    for kind in (HttpError, HTTPException, *kinds):
        app.add_exception_handler(kind, handle)


def list_methods(app: Starlette, route: Any) -> str:
    """The methods of a route's path, as an `Allow` header has them: a path may have a route for each method. The
    middleware answers HEAD as it does GET."""
    methods: set[str] = set()
    pending = [*app.router.routes]
    while pending:
        one: Any = pending.pop()
        pending += one.original_router.routes if hasattr(one, "original_router") else ()  # of FastAPI's include_router
        if getattr(one, "path", None) == route.path:
            methods |= getattr(one, "methods", None) or set()  # a WebSocket route has none
    if "GET" in methods:
        methods.add("HEAD")
    return ", ".join(sorted(methods))


def headers_of(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def route_pattern(scope: Scope) -> str:
    """The route's pattern, e.g. `/sessions/{session_id}`; `other` if none matched."""
    return getattr(scope.get("route"), "path", "").replace(":path}", "}") or "other"


def host_name(host: str) -> str:
    """The host of a `Host` header in lower case, without its port; an IPv6 address keeps its brackets. '' for what is
    not a host and a port."""
    match = HOST.fullmatch(host)
    return match[1].lower() if match else ""


def _declared_length(headers: dict[str, str]) -> int:
    """The declared length of a body; 0 if it is missing or malformed (the body is counted while it arrives anyway)."""
    declared = headers.get("content-length", "0")
    return int(declared) if declared.isascii() and declared.isdecimal() and len(declared) < 20 else 0
