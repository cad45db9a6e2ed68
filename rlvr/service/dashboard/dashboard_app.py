"""The dashboard as a part of an application: its addresses, its access rules, and what a browser may do there.

    attach(app, source)                          # an application without keys, on this machine only
    attach(app, source, owner_of=keys.owner)     # with API keys: the dashboard asks for one, once

Its addresses are `/`, `/ui/...` and NiceGUI's own; all others stay the application's, so a mistyped API path gets the
application's 404. NiceGUI is imported by the first page, so a service without visitors does not pay for it. NiceGUI
accepts websockets from pages of any origin; here `Origin` must be the requested host.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Match, NoMatchFound

from rlvr.core.fair_queue import become_owner
from rlvr.core.fair_slots import FairSlots
from rlvr.service.dashboard.dashboard_data import OWNER, SOURCE, Source
from rlvr.service.dashboard.sign_in import SignIn
from rlvr.web.rate_limit import RateLimit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
# A page that no browser opens a websocket for stays in memory for a minute, with half a megabyte.
PAGES_PER_MINUTE = 600  # of one user
PAGES, PAGES_SHARE = 8, 2  # that are drawn at once, for all users and for one
_ASSETS = re.compile(r"/_nicegui|/ui/assets/|/favicon\.ico")
_OURS = re.compile(r"/|/ui(/.*)?|/_nicegui(_ws)?/.*|/favicon\.ico")


def is_dashboard(path: str) -> bool:
    """Whether an address is the dashboard's, which asks for keys by itself, with a form."""
    return _OURS.fullmatch(path) is not None


def attach(
    app: Starlette,
    source: Source,
    *,
    owner_of: Callable[[str], str | None] | None = None,
    loopback_only: bool = True,
) -> Dashboard:
    """Add a dashboard after the routes that `app` has now; it stops with the application.

    `owner_of` returns the owner of an API key, None for an unknown key; without it every client that can connect has
    access. `loopback_only` refuses requests by a host name that is not this machine's, which a web page could have
    made.
    """
    dashboard = Dashboard(source, owner_of, loopback_only)
    app.router.routes.append(_Route(dashboard))
    before = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(inside: Any) -> AsyncIterator[Any]:
        async with before(inside) as state:
            try:
                yield state
            finally:
                await dashboard.close()

    app.router.lifespan_context = lifespan
    return dashboard


class _Route(BaseRoute):
    """Matches the dashboard's own addresses only."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.dashboard = dashboard

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        ours = scope["type"] in ("http", "websocket") and is_dashboard(scope["path"])
        return (Match.FULL if ours else Match.NONE), {}

    def url_path_for(self, name: str, /, **path_params: Any) -> Any:
        raise NoMatchFound(name, path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.dashboard(scope, receive, send)


class Dashboard:
    """An ASGI application. A process can have one at a time, because NiceGUI has global state."""

    def __init__(
        self, source: Source, owner_of: Callable[[str], str | None] | None = None, loopback_only: bool = True
    ) -> None:
        self.source, self.loopback_only = source, loopback_only
        self.sign_in = SignIn(owner_of) if owner_of else None
        self._inner: Any = None
        self._lock = asyncio.Lock()
        self._open = AsyncExitStack()
        self._rate, self._slots = RateLimit(PAGES_PER_MINUTE), FairSlots(PAGES, PAGES_SHARE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (reason := self._refusal(scope)) is not None:
            await _refuse(reason, scope, receive, send)
            return
        owner = ""
        if self.sign_in is not None:
            if scope["path"] == self.sign_in.path:
                await self.sign_in(scope, receive, send)
                return
            signed_in = self.sign_in.owner(scope)
            if signed_in is None:
                if scope["type"] == "websocket" or scope["path"].startswith("/_nicegui"):
                    await _refuse("sign in first", scope, receive, send)
                else:
                    await self.sign_in.show_form(scope, receive, send)
                return
            owner = signed_in
        scope[SOURCE], scope[OWNER] = self.source, owner
        inner = self._inner or await self.load()
        if scope["type"] == "websocket" or _ASSETS.match(scope["path"]):
            await inner(scope, receive, _with_policy(scope, send))
            return
        user = owner or "without keys"
        if wait := self._rate.acquire(user):
            answer = PlainTextResponse(
                f"more than {PAGES_PER_MINUTE} pages a minute\n", 429, {"retry-after": str(math.ceil(wait))}
            )
            await answer(scope, receive, send)
            return
        become_owner(user)
        async with AsyncExitStack() as slot:
            await slot.enter_async_context(self._slots.hold(user))

            async def send_without_slot(message: Message) -> None:
                await slot.aclose()  # a client that reads slowly holds none
                await send(message)

            await inner(scope, receive, _with_policy(scope, send_without_slot))

    async def load(self) -> Any:
        """Import NiceGUI and the pages, and start them. The first request does it."""
        async with self._lock:
            if self._inner is None:
                host = await asyncio.to_thread(_create_nicegui_app)
                await self._open.enter_async_context(host.router.lifespan_context(host))
                self._inner = host
            return self._inner

    async def close(self) -> None:
        async with self._lock:
            if self._inner is not None:
                self._inner = None
                await self._open.aclose()

    def _refusal(self, scope: Scope) -> str | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.loopback_only and host_of(f"//{host}") not in LOOPBACK:
            return f"this dashboard answers to {', '.join(LOOPBACK)} only"
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return "a web page of another origin may not use this dashboard"
        return None


def host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _create_nicegui_app() -> Any:
    """A FastAPI application that serves our pages with NiceGUI."""
    os.environ.setdefault(
        "NICEGUI_STORAGE_PATH", os.path.join(os.devnull, "rlvr")
    )  # keeps NiceGUI from creating a folder
    from fastapi import FastAPI
    from nicegui import ui

    import rlvr.service.dashboard.dashboard_routes  # noqa: F401 (registers the pages)

    host = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    ui.run_with(
        host, title="rlvr", dark=None, language="en-US", tailwind=False, gzip_middleware_factory=None,
        show_welcome_message=False, message_history_length=100, reconnect_timeout=10,
    )  # fmt: skip
    return host


async def _refuse(reason: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": reason})
        return
    await PlainTextResponse(f"{reason}\n", 403)(scope, receive, send)


def _with_policy(scope: Scope, send: Send) -> Send:
    """Add a content security policy to pages: nothing from or to other origins, no scripts but NiceGUI's.

    Every script of the page gets a nonce. That is safe because NiceGUI escapes every `<` in embedded data. The
    dashboard uses only features of NiceGUI that need no `unsafe-eval`: no JavaScript handlers, templates or computed
    properties.
    """
    nonce = secrets.token_urlsafe(16)
    start: Message | None = None
    body = b""

    async def send_with_policy(message: Message) -> None:
        nonlocal start, body
        if message["type"] == "http.response.start":
            kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
            if not any(kind.startswith(b"text/html") for kind in kinds):
                await send({**message, "headers": [*message["headers"], (b"x-content-type-options", b"nosniff")]})
                return
            start = message
        elif start is None or message["type"] != "http.response.body":
            await send(message)
        else:
            body += message.get("body", b"")
            if not message.get("more_body", False):
                body = body.replace(b"<script", b'<script nonce="' + nonce.encode() + b'"')
                headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
                more = [(b"content-length", str(len(body)).encode()), *policy(nonce)]
                await send({**start, "headers": [*headers, *more]})
                await send({"type": "http.response.body", "body": body})

    return send_with_policy if scope["type"] == "http" else send


def policy(nonce: str) -> list[tuple[bytes, bytes]]:
    """The headers of a page."""
    allowed = (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )
    return [
        (b"content-security-policy", allowed.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"same-origin"),
        (b"cross-origin-opener-policy", b"same-origin"),
    ]
