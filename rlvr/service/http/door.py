"""The door of the service: who may come in, how often, with how large a body, and a record of everybody who did.

An ASGI layer around the whole application, dashboard included, so that it also sees what no route does. Without keys
the service listens on this machine only; then `Host` and `Origin` are checked, for a web page in a browser here must
not reach it by a name that resolves to 127.0.0.1. With keys a caller shows one as `Authorization: Bearer` or as
`X-API-Key`; the dashboard asks for them by itself, in a way that browsers can answer.
Exercised by tests/test_service_door.py.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlvr.service.asgi import (
    LOOPBACK,
    App,
    Message,
    Receive,
    Scope,
    Send,
    declared_length,
    drain,
    headers_of,
    host_name,
)
from rlvr.service.http.rates import Rate
from rlvr.service.keys import Keys
from rlvr.service.logs import forget, logger, note
from rlvr.service.problems import Problem
from rlvr.service.settings import Limits

OPEN_PATHS = ("/health", "/health/live", "/health/ready")  # without a key
QUIET = ("/health", "/health/live", "/health/ready", "/metrics", "/metrics/prometheus")
LOCAL = {b"x-content-type-options": b"nosniff", b"referrer-policy": b"no-referrer", b"x-frame-options": b"DENY"}
# An answer of the API is no page: nothing in it may run, and no cache may keep it.
OF_JSON = {b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'", b"cache-control": b"no-store"}
BODY_SECONDS = 60.0  # that a body may take to arrive: a slow one holds a connection, and what came of it, in memory
DROPPED = 64 << 20  # bytes of a refused body that are read, so that its sender sees why

Count = Callable[[str, str, int, float], None]
log = logger("rlvr.service.http")


class Door:
    def __init__(
        self,
        app: App,
        keys: Keys,
        limits: Limits,
        cors_origins: tuple[str, ...] = (),
        *,
        count: Count | None = None,
        own_door: Callable[[str], bool] | None = None,
        body_s: float = BODY_SECONDS,
    ) -> None:
        """`count` hears of every answer; `own_door` says of a path that who serves it asks for keys by itself."""
        self._app, self._keys, self._limits, self._origins = app, keys, limits, cors_origins
        self._count = count or (lambda method, route, status, seconds: None)
        self._own_door = own_door or (lambda path: False)
        self._body_s = body_s
        self._makes, self._reads = Rate(limits.requests_per_minute), Rate(limits.reads_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._admit(scope, scope.setdefault("state", {}))
        except Problem as problem:
            log.warning("websocket refused", path=scope["path"][:300], reason=problem.detail)
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": problem.code})
            return
        await self._app(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, request_id = time.perf_counter(), f"req-{secrets.token_hex(8)}"
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"request_id": request_id, "owner": "", "reason": ""}
        forget()
        note(request_id=request_id)
        most, status, taken, started, whole = self._limits.max_body, 500, 0, False, False
        until = asyncio.get_running_loop().time() + self._body_s

        async def counted() -> Message:
            nonlocal taken, whole
            if whole:  # what comes now is the client's end, whenever it goes
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                told = f"the body was not complete after {self._body_s:g} s"
                raise Problem(408, "too_slow", told) from None
            whole = not message.get("more_body", False)
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > most:
                    if message.get("more_body", False):
                        await self._drain(receive, until)
                    raise too_large(f"more than {most:,}", most)
            return message

        async def answered(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                message["headers"] = [*message.get("headers", ()), *self._added(message, scope, request_id)]
            await send(message)

        try:
            if self._preflight(scope):
                await answered({"type": "http.response.start", "status": 204, "headers": []})
                await answered({"type": "http.response.body"})
                return
            self._admit(scope, state)
            self._within(scope, state["owner"])
            if (declared := declared_length(headers_of(scope))) > most:
                await self._drain(receive, until)
                raise too_large(f"{declared:,}", most)
            await self._app(scope, counted, answered)
        except Problem as problem:
            if not started:
                await refuse(answered, problem, state)
        except Exception:
            log.exception("a request failed by our fault", path=scope["path"][:300])
            if not started:
                await refuse(answered, our_fault(), state)
        finally:
            seconds = time.perf_counter() - begun
            route = getattr(scope.get("route"), "path", "").replace(":path}", "}") or "other"
            self._count(scope["method"], route, status, seconds)
            quiet = (scope["path"] in QUIET or route == "other") and status < 400
            tell = log.debug if quiet else log.info if status < 400 else log.warning if status != 500 else log.error
            reason = {"reason": state["reason"][:2_000]} if state["reason"] else {}
            tell(
                "request", method=scope["method"], path=scope["path"][:300], status=status, owner=state["owner"],
                seconds=round(seconds, 4), **reason,
            )  # fmt: skip

    async def _drain(self, receive: Receive, until: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await drain(receive, DROPPED)

    def _admit(self, scope: Scope, state: dict[str, Any]) -> None:
        headers = headers_of(scope)
        owner = state["owner"] = self._keys.owner(key_of(headers)) or ""
        if not self._keys and host_name(headers.get("host", "")) not in LOOPBACK:
            shown = headers.get("host", "")[:100]
            raise Problem(
                403, "wrong_host", f"host {shown!r}: a service without API keys answers on {', '.join(LOOPBACK)} only"
            )
        # A key in a header is no browser's doing; where none is needed, a foreign page could use the service.
        origin = headers.get("origin")
        if origin is not None and not self._keys and not self._ours(origin, headers):
            raise Problem(403, "wrong_origin", f"a web page of {origin[:100]!r} may not use this service")
        if not owner and scope["path"] not in OPEN_PATHS and not self._own_door(scope["path"]):
            given = headers.get("authorization") or headers.get("x-api-key")
            said = "is none of this service's" if given else "is missing"
            raise Problem(401, "no_key", f"the API key {said}: send it as Authorization: Bearer KEY, or as X-API-Key")

    def _ours(self, origin: str, headers: dict[str, str]) -> bool:
        return origin in self._origins or origin.partition("://")[2] == headers.get("host", "")

    def _within(self, scope: Scope, owner: str) -> None:
        if scope["path"] in OPEN_PATHS and scope["method"] == "GET":
            return
        reads = scope["method"] in ("GET", "HEAD", "OPTIONS")
        rate, per_minute = (
            (self._reads, self._limits.reads_per_minute) if reads else (self._makes, self._limits.requests_per_minute)
        )
        if wait := rate.wait(owner):
            raise Problem(429, "too_many_requests", f"{per_minute} requests a minute are allowed", retry_after=wait)

    def _preflight(self, scope: Scope) -> bool:
        """What a browser asks before a page of another origin may ask: it carries no key."""
        return scope["method"] == "OPTIONS" and headers_of(scope).get("origin") in self._origins

    def _added(self, message: Message, scope: Scope, request_id: str) -> list[tuple[bytes, bytes]]:
        there = {name.lower(): value for name, value in message.get("headers", ())}
        added = {**LOCAL, **(OF_JSON if there.get(b"content-type", b"").startswith(b"application/json") else {})}
        added[b"x-request-id"] = request_id.encode()
        origin = headers_of(scope).get("origin")
        if origin in self._origins and origin is not None:
            added[b"access-control-allow-origin"] = origin.encode("latin-1")
            added[b"vary"] = b"Origin"
            if scope["method"] == "OPTIONS":
                added[b"access-control-allow-methods"] = b"GET, POST"
                added[b"access-control-allow-headers"] = b"Authorization, X-API-Key, Content-Type, Last-Event-ID"
        return [(name, value) for name, value in added.items() if name not in there]


async def refuse(send: Send, problem: Problem, state: dict[str, Any]) -> None:
    state["reason"] = problem.detail
    body = problem.body(state["request_id"])
    headers = [(name.encode(), value.encode("latin-1")) for name, value in problem.headers().items()]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def too_large(found: str, most: int) -> Problem:
    return Problem(413, "body_too_large", f"the body has {found} bytes; this service takes {most:,} (limits.max_body)")


def our_fault() -> Problem:
    return Problem(500, "internal", "the service failed at this request; its log says why, under this request_id")


def key_of(headers: dict[str, str]) -> str:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
