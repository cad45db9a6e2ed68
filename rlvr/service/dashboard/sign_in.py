"""Access to a dashboard when API keys are set: the user enters the key once, and then has a cookie.

The cookie is random and holds no data. It is HttpOnly and SameSite=Strict, so no script can read it and no page of
another site can make a browser send it. It lasts half a day, or until the service stops. The service checks the keys.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from rlvr.service.dashboard.pages.page_parts import address

COOKIE = "rlvr_dashboard"
SECONDS = 12 * 3600.0
MOST = 10_000  # valid cookies at a time
LONGEST = 4096  # bytes of a form
SLOW = 0.5  # seconds, at least, for a wrong key


class SignIn:
    """The form, its response, and the valid cookies. `owner_of` returns the owner of a key."""

    path = "/ui/sign-in"

    def __init__(self, owner_of: Callable[[str], str | None], clock: Callable[[], float] = time.monotonic) -> None:
        self._owner_of, self._clock = owner_of, clock
        self._cookies: dict[bytes, tuple[str, float]] = {}  # hash of a cookie -> owner, expiry

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        if request.method == "POST":
            answer = await self._answer(request)
        elif request.method in ("GET", "HEAD"):
            answer = self.form("/")
        else:
            answer = Response(status_code=405, headers={"allow": "GET, POST"})
        await answer(scope, receive, send)

    def owner(self, scope: MutableMapping[str, Any]) -> str | None:
        """The name of the API key that signed in with a request's cookie; None without a valid one."""
        given = b"; ".join(value for name, value in scope["headers"] if name == b"cookie")
        try:
            morsel = SimpleCookie(given.decode("latin-1")).get(COOKIE)
        except CookieError:
            return None
        owner, until = self._cookies.get(_hash(morsel.value), ("", 0.0)) if morsel else ("", 0.0)
        return owner if until > self._clock() else None

    def show_form(self, path: str, scope: MutableMapping[str, Any], receive: Any, send: Any) -> Awaitable[None]:
        """The form in the place of the page at `path`, which is shown after it."""
        query = scope.get("query_string", b"").decode("latin-1")
        target = quote(path, safe="/:@!$'()*+,;=~") + (f"?{query}" if query else "")
        return self.form(target, status=401)(scope, receive, send)

    def form(self, target: str, error: str = "", status: int = 200) -> Response:
        from rlvr.service.dashboard.page_templates import render  # with the first page, not with the service

        given = {"path": address(self.path), "target": to_local_address(target), "error": error}
        text = render("sign_in.html", page={"title": "Sign in"}, **given)
        allowed = "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'"
        return HTMLResponse(text, status, {"content-security-policy": allowed, "cache-control": "no-store"})

    async def _answer(self, request: Request) -> Response:
        fields = await read_form(request)
        target = to_local_address(fields.get("next", "/"))
        owner = self._owner_of(fields.get("key", "").strip())
        if owner is None:
            await asyncio.sleep(SLOW)
            return self.form(target, "unknown API key", 401)
        now, cookie = self._clock(), secrets.token_urlsafe(32)
        self._cookies = {key: cookie for key, cookie in self._cookies.items() if cookie[1] > now}
        while len(self._cookies) >= MOST:
            del self._cookies[next(iter(self._cookies))]
        self._cookies[_hash(cookie)] = (owner, now + SECONDS)
        answer = RedirectResponse(address(target), 303, headers={"cache-control": "no-store"})
        answer.set_cookie(
            COOKIE, cookie, max_age=int(SECONDS), httponly=True, samesite="strict",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return answer


async def read_form(request: Request) -> dict[str, str]:
    """The fields of a form; none of one that is too long."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > LONGEST:
            return {}
    return {name: values[0] for name, values in parse_qs(body.decode("latin-1")).items()}


def _hash(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode()).digest()


def to_local_address(address: str) -> str:
    """An address of the dashboard; any other, e.g. of another site, becomes the first page."""
    ours = address.startswith("/") and not address.startswith(("//", "/\\")) and address.isprintable()
    return address if ours else "/"
