"""The door of the server: who may come in, with how large a body, and a record of everybody who did.

An ASGI layer around the app, so that it also sees what no route does: a body is counted while it arrives and refused
as soon as it is too large, whatever its headers say. Without keys the server listens on this machine only, and then
`Host` and `Origin` are checked: a web page in a browser here must not reach it by a name that resolves to 127.0.0.1.
Exercised by tests/test_tinker_http.py.
"""

from __future__ import annotations

import json
import secrets
import time
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
from rlvr.service.keys import Keys
from rlvr.service.tinker_api.errors import Busy, CoreError
from rlvr.service.tinker_api.logs import LOGGER, log_request
from rlvr.service.tinker_api.waiting import Waiting

MAX_BODY = 64 << 20  # bytes as sent, of gradients; the SDK splits a batch at about 5 MB
MAX_JSON = 4 << 20  # bytes of everything else: reading JSON holds up everybody, and this is half a million tokens
BATCHES = "/api/v1/forward_backward"
ARRIVING = 8  # bodies of the largest size that one owner may be sending at a time
OPEN_PATHS = ("/api/v1/healthz",)  # what a load balancer asks, without a key
SIGNED = "/api/v1/external/"  # downloads: their address holds what permits them
QUIET = ("/api/v1/retrieve_future", "/api/v1/retrieve_futures", "/api/v1/session_heartbeat", "/api/v1/healthz")


class Refused(CoreError):
    """An answer with a status of its own: 401, 406, 413, 415."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Boundary:
    def __init__(
        self, app: App, keys: Keys, waiting: Waiting, *, max_body: int = MAX_BODY, loopback_only: bool = False
    ) -> None:
        self._app, self._keys, self._max_body, self._loopback_only = app, keys, max_body, loopback_only
        self._arriving: dict[str, int] = {}  # owner -> bytes of bodies that are being received and read
        self.waiting = waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, request_id = time.perf_counter(), f"req-{secrets.token_hex(8)}"
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"], state["owner"], state["reason"] = request_id, "", ""
        status, started, taken, most = 0, False, 0, self._most(scope)

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                size, owner = len(message.get("body", b"")), state["owner"]
                taken += size
                held = self._arriving[owner] = self._arriving.get(owner, 0) + size
                if taken > most or held > ARRIVING * self._max_body:
                    if message.get("more_body", False):
                        await drain(receive)
                    if taken > most:
                        raise Refused(413, too_large(f"more than {most:,} bytes", most))
                    raise Busy(f"{held:,} bytes of yours are arriving at the same time; send fewer requests at once")
            return message

        async def answered(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._admit(scope, state, most)
            await self._app(scope, counted, answered)
        except CoreError as error:
            if error.status == 413 and not taken:
                await drain(receive)
            await self._refuse(answered, error, state)
        except Exception as error:
            if started:  # answered, and logged where that was done
                return
            LOGGER.exception("a request failed by our fault", extra={"request_id": request_id, "path": shown(scope)})
            # Not a 5xx: the SDK would repeat it for five minutes before it showed anything.
            fault = Refused(422, f"the server failed at this request ({type(error).__name__}); its log says why")
            fault.category = "server"
            await self._refuse(answered, fault, state)
        finally:
            if taken:
                self._arriving[state["owner"]] -= taken
            log_request(
                request_id=request_id, owner=state["owner"], method=scope["method"], path=shown(scope), status=status,
                seconds=time.perf_counter() - begun, reason=state["reason"],
                quiet=scope["path"] in QUIET and (status < 400 or status == 408),
            )  # fmt: skip

    def _most(self, scope: Scope) -> int:
        return self._max_body if scope["path"] == BATCHES else min(MAX_JSON, self._max_body)

    def _admit(self, scope: Scope, state: dict[str, Any], most: int) -> None:
        headers = headers_of(scope)
        if self._loopback_only:
            host, origin = headers.get("host", ""), headers.get("origin")
            if host_name(host) not in LOOPBACK:
                raise Refused(
                    403, f"host {host[:100]!r}: a server without API keys answers on {', '.join(LOOPBACK)} only"
                )
            if origin is not None and host_name(origin.partition("://")[2]) not in LOOPBACK:
                raise Refused(403, "a web page of another origin may not use this server")
        owner = self._keys.owner(headers.get("x-api-key"))
        if owner is None and not (scope["path"] in OPEN_PATHS or scope["path"].startswith(SIGNED)):
            said = "is not one of this server's" if headers.get("x-api-key") else "is missing"
            raise Refused(401, f"the API key {said}: set TINKER_API_KEY (it is sent as X-API-Key)")
        state["owner"] = owner or ""
        if (declared := declared_length(headers)) > most:
            raise Refused(413, too_large(f"{declared:,} bytes", most))

    async def _refuse(self, send: Send, error: CoreError, state: dict[str, Any]) -> None:
        headers, body = refusal(error, state)
        await send({"type": "http.response.start", "status": error.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def too_large(found: str, most: int) -> str:
    return f"the body has {found}, this server takes {most:,} there; send fewer rows per request"


def shown(scope: Scope) -> str:
    """The path as it may be written down: who has the address of a download may use it."""
    path: str = scope["path"]
    return f"{SIGNED}.../{path.removeprefix(SIGNED).partition('/')[2]}" if path.startswith(SIGNED) else path


def refusal(error: CoreError, state: dict[str, Any]) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of a refusal: why, whose fault, and under which id the log has it."""
    state["reason"] = str(error)
    told = {"detail": str(error), "category": error.category, "request_id": state["request_id"]}
    body = json.dumps(told).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if (after := getattr(error, "retry_after", None)) is not None:
        headers.append((b"retry-after", str(max(1, round(after))).encode()))
    if error.status == 413:
        headers.append((b"connection", b"close"))
    return headers, body
