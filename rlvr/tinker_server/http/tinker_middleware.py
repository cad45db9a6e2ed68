"""The Tinker server's rules for the middleware: its error form, its body limits, and paths that need no key.

It answers from the start. Until `open` gives it the application, which needs the models, requests are held: those of
the SDK then go on without an error. After `poll_seconds` they get 503 with `Retry-After`, which the SDK repeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from rlvr.core.fair_slots import LoopTurns
from rlvr.tinker_server.protocol.errors import Busy, LoadingError, StatusError, TinkerServerError
from rlvr.tinker_server.protocol.server_limits import ServerLimits, WireLimits
from rlvr.web.auth import ApiKeys
from rlvr.web.logs import get_logger
from rlvr.web.middleware import LOOPBACK, AsgiApp, Middleware, Receive, Scope, Send, host_name
from rlvr.web.prometheus import Prometheus
from rlvr.web.server import max_connections

T = TypeVar("T")
BATCH_PATH = "/api/v1/forward_backward"
HEALTH_PATH = "/api/v1/healthz"  # a load balancer asks without a key
METRICS_PATH = "/metrics"
SIGNED_PREFIX = "/api/v1/external/"  # downloads: the address itself is the permission
ROLLOUT_PREFIX = "/r/"  # rollouts of agents: the address itself is the permission
MAX_DOWNLOADS = 256  # of one owner's files at a time; each holds a connection and an open file
QUIET_PATHS = (
    "/api/v1/retrieve_future", "/api/v1/retrieve_futures", "/api/v1/session_heartbeat", HEALTH_PATH, METRICS_PATH,
)  # fmt: skip


class LongPolls:
    """Requests that are held open until there is a result, and released when the server stops."""

    def __init__(self, poll_seconds: float) -> None:
        self.poll_seconds = poll_seconds
        self._polls: set[asyncio.Task[Any]] = set()
        self._turns = LoopTurns()
        self.closing = False

    async def hold(self, owner: str, answer: Awaitable[T]) -> T | None:
        """Wait for the answer of an owner's poll; None if the server stops first. Thousands of polls of one owner may
        end in the same moment: they go on one by one."""
        task = asyncio.current_task()
        assert task is not None
        self._polls.add(task)
        try:
            found = await answer
            await self._turns.take(owner)
            return found
        except asyncio.CancelledError:
            if not self.closing:
                raise
            task.uncancel()
            return None
        finally:
            self._polls.discard(task)

    def close(self) -> None:
        """End every held poll without a result. Call it on the event loop."""
        self.closing = True
        for task in self._polls:
            task.cancel()


class TinkerMiddleware(Middleware):
    key_hint = "set TINKER_API_KEY, or OPENAI_API_KEY (it is sent as X-API-Key, or as Authorization: Bearer KEY)"
    open_requests_hint = "end some, send fewer at once, or ask the operator for more (limits.owner_requests)"
    body_hint = "; send fewer rows per request"

    def __init__(
        self,
        keys: ApiKeys,
        limits: ServerLimits,
        wire: WireLimits = WireLimits(),
        *,
        loopback_only: bool | None = None,
    ) -> None:
        """Without keys it answers on the loopback interface only, unless `loopback_only` says otherwise."""
        self.prometheus = Prometheus()
        loopback_only = not keys if loopback_only is None else loopback_only
        log, count = get_logger("rlvr.tinker_server.http"), self.prometheus.count
        super().__init__(_no_app, keys, log, loopback_only=loopback_only, count=count)
        self.limits, self.wire, self.polls = limits, wire, LongPolls(limits.poll_seconds)
        self.body_seconds, self.body_rate = limits.body_seconds, limits.body_rate
        self.max_open_requests = min(limits.owner_requests, max(1, max_connections() // 2))
        self.max_arriving_bytes = limits.arriving_bodies * limits.max_body
        self.rollout_owner: Callable[[str], str] = lambda path: ""
        self.progress = "the models are being loaded"
        self._is_open = asyncio.Event()

    def open(self, app: AsgiApp) -> None:
        """Answer with this application, also what is held. Call it on the event loop, or before that runs."""
        self._app = app
        self._is_open.set()

    async def wait_until_ready(self, scope: Scope) -> None:
        if self._is_open.is_set():
            return
        if scope["path"] not in (HEALTH_PATH, METRICS_PATH):
            with suppress(TimeoutError):
                async with asyncio.timeout(self.polls.poll_seconds):
                    await self._is_open.wait()
                    return
        raise LoadingError(f"{self.progress}; try again")

    def error(self, status: int, code: str, detail: str, retry_after: float | None = None) -> TinkerServerError:
        return Busy(detail) if status == 429 else StatusError(status, detail)

    def internal_error(self, error: Exception) -> TinkerServerError:
        return internal_error(error)

    def is_open(self, path: str) -> bool:
        return path == HEALTH_PATH or path.startswith((SIGNED_PREFIX, ROLLOUT_PREFIX))

    def _owner_of(self, scope: Scope) -> str:
        """A request to the address of a rollout is its owner's, whatever key it has."""
        if scope["path"].startswith(ROLLOUT_PREFIX):
            return self.rollout_owner(scope["path"])
        return super()._owner_of(scope)

    def is_probe(self, path: str) -> bool:
        return path == HEALTH_PATH

    def open_requests_of(self, scope: Scope, owner: str) -> tuple[str, float]:
        """A download has no key, and counts as one of the owner in its address."""
        if not scope["path"].startswith(SIGNED_PREFIX):
            return super().open_requests_of(scope, owner)
        parts = scope["path"].removeprefix(SIGNED_PREFIX).split("/", 3)
        return f"downloads of {parts[2][:100] if len(parts) > 2 else ''}", MAX_DOWNLOADS

    def is_quiet(self, scope: Scope, status: int) -> bool:
        """Polls without a result and heartbeats, of which there are thousands, and the same while the models load."""
        is_loading = status == 503 and not self._is_open.is_set()
        return scope["path"] in QUIET_PATHS and (status < 400 or status == 408 or is_loading)

    def is_own_origin(self, origin: str, headers: dict[str, str]) -> bool:
        return host_name(origin.partition("://")[2]) in LOOPBACK

    def max_body(self, path: str) -> int:
        return self.limits.max_body if path == BATCH_PATH else min(self.limits.max_json, self.limits.max_body)

    def logged_path(self, path: str) -> str:
        """Without the signature of a download's address, and the token of a rollout's: the log's readers must not be
        able to use them."""
        if path.startswith(ROLLOUT_PREFIX):
            return f"{ROLLOUT_PREFIX}.../{path.removeprefix(ROLLOUT_PREFIX).partition('/')[2]}"
        if not path.startswith(SIGNED_PREFIX):
            return path
        return f"{SIGNED_PREFIX}.../{path.removeprefix(SIGNED_PREFIX).partition('/')[2]}"


async def _no_app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("a request that was not held")


def internal_error(error: Exception) -> TinkerServerError:
    """Not a 5xx status: the SDK would retry that for five minutes before it shows anything."""
    fault = StatusError(422, f"the server failed at this request ({type(error).__name__}); its log says why")
    fault.category = "server"
    return fault
