"""The dashboard as a part of an application: its addresses, its access rules, and what a browser may do there.

    attach(app, source)                          # an application without keys, on this machine only
    attach(app, source, owner_of=keys.owner)     # with API keys: the dashboard asks for one, once

Its addresses are `/` and `/ui/...`; all others stay the application's, so a mistyped API path gets the application's
404. Pages and their templates are loaded by the first request, so a service without visitors does not pay for them. A
dashboard may be mounted under a prefix, or stand behind a proxy that takes one away and names it in
`X-Forwarded-Prefix`.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from rlvr.core.fair_queue import become_owner
from rlvr.core.fair_slots import FairSlots
from rlvr.service.dashboard.dashboard_data import OWNER, Source
from rlvr.service.dashboard.page_changes import PageChanges
from rlvr.service.dashboard.pages.page_parts import PREFIX
from rlvr.service.dashboard.sign_in import SignIn
from rlvr.web.middleware import LOOPBACK, Message, Receive, Scope, Send, headers_of, host_name
from rlvr.web.rate_limit import RateLimit

PAGES_PER_MINUTE = 600  # of one user
PAGES, PAGES_SHARE = 8, 2  # that are drawn at once, for all users and for one
ASSETS, EVENTS = "/ui/assets/", "/ui/events"
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+")
# What a browser may do with a page: nothing from or to other origins, no scripts or styles but the dashboard's files.
POLICY = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    b"connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-cache",
}


def is_dashboard(path: str) -> bool:
    """Whether an address is the dashboard's, which asks for keys by itself, with a form."""
    return path in ("/", "/ui") or path.startswith("/ui/")


def attach(
    app: Starlette,
    source: Source,
    *,
    owner_of: Callable[[str], str | None] | None = None,
    loopback_only: bool = True,
) -> Dashboard:
    """Add a dashboard after the routes that `app` has now. The caller stops it before the server.

    `owner_of` returns the owner of an API key, None for an unknown key; without it every client that can connect has
    access. `loopback_only` refuses requests by a host name that is not this machine's, which a web page could have
    made.
    """
    dashboard = Dashboard(source, owner_of, loopback_only)
    app.router.routes.extend(Route(path, dashboard) for path in ("/", "/ui", "/ui/{below:path}"))
    return dashboard


class Dashboard:
    """An ASGI application."""

    def __init__(
        self, source: Source, owner_of: Callable[[str], str | None] | None = None, loopback_only: bool = True
    ) -> None:
        self.source, self.loopback_only = source, loopback_only
        self.sign_in = SignIn(owner_of) if owner_of else None
        self._changes = PageChanges(source)
        self._inner: Any = None
        self._rate, self._slots = RateLimit(PAGES_PER_MINUTE), FairSlots(PAGES, PAGES_SHARE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send, path = _with_policy(send), path_of(scope)
        if (reason := self._refusal(scope)) is not None:
            return await PlainTextResponse(f"{reason}\n", 403)(scope, receive, send)
        PREFIX.set(prefix_of(scope))
        inner = self._inner or await self.load()
        is_asset, owner = path.startswith(ASSETS), ""
        if self.sign_in is not None and not is_asset:  # assets hold no data
            if path == self.sign_in.path:
                return await self.sign_in(scope, receive, send)
            owner = self.sign_in.owner(scope)
            if owner is None:
                return await self.sign_in.show_form(path, scope, receive, send)
        scope[OWNER] = owner
        if is_asset or path == EVENTS:
            return await inner(scope, receive, send)
        user = owner or "without keys"
        if wait := self._rate.acquire(user):
            headers = {"retry-after": str(math.ceil(wait))}
            answer = PlainTextResponse(f"more than {PAGES_PER_MINUTE} pages a minute\n", 429, headers)
            return await answer(scope, receive, send)
        become_owner(user)
        async with AsyncExitStack() as slot:
            await slot.enter_async_context(self._slots.hold(user))

            async def send_without_slot(message: Message) -> None:
                await slot.aclose()  # a client that reads slowly holds none
                await send(message)

            await inner(scope, receive, send_without_slot)

    async def load(self) -> Any:
        """Import the pages. The first request does it."""

        def create() -> Any:
            from rlvr.service.dashboard.dashboard_routes import create_pages

            return create_pages(self.source, self._changes)

        self._inner = await asyncio.to_thread(create)
        return self._inner

    def stop(self) -> None:
        """End the streams of open pages, which a server waits for; a signal handler may call it."""
        self._changes.end()

    def _refusal(self, scope: Scope) -> str | None:
        headers = headers_of(scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.loopback_only and host_name(host) not in LOOPBACK:
            return f"this dashboard answers to {', '.join(LOOPBACK)} only"
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return "a web page of another origin may not use this dashboard"
        return None


def path_of(scope: Scope) -> str:
    """The path of a request below the place where the dashboard is mounted."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def prefix_of(scope: Scope) -> str:
    """The prefix of the dashboard's own addresses in a browser."""
    prefix = headers_of(scope).get("x-forwarded-prefix", "").rstrip("/")
    return (prefix if _PREFIX.fullmatch(prefix) else "") + scope.get("root_path", "")


def _with_policy(send: Send) -> Send:
    """Add `POLICY` to a response, but for what it has itself."""

    async def send_with_policy(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message["headers"]}
            more = [(name, value) for name, value in POLICY.items() if name not in given]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return send_with_policy
