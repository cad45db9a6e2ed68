"""The Tinker server's rules for the middleware: its error form, its body limits, and paths that need no key.

Exercised by tests/test_tinker_http.py.
"""

from __future__ import annotations

from rlvr.tinker_server.errors import Busy, StatusError, TinkerServerError
from rlvr.tinker_server.http.long_poll import LongPolls
from rlvr.web.auth import ApiKeys
from rlvr.web.logs import get_logger
from rlvr.web.middleware import LOOPBACK, AsgiApp, Middleware, Scope, host_name

MAX_BODY = 64 << 20  # bytes as sent, of gradients; the SDK splits a batch at about 5 MB
MAX_JSON = 4 << 20  # bytes of every other body: parsing JSON blocks the event loop, and this is half a million tokens
BATCH_PATH = "/api/v1/forward_backward"
MAX_ARRIVING_BODIES = 8  # of the largest size, that one owner may be sending at a time
HEALTH_PATH = "/api/v1/healthz"  # a load balancer asks without a key
SIGNED_PREFIX = "/api/v1/external/"  # downloads: the address itself is the permission
QUIET_PATHS = ("/api/v1/retrieve_future", "/api/v1/retrieve_futures", "/api/v1/session_heartbeat", HEALTH_PATH)


class TinkerMiddleware(Middleware):
    key_hint = "set TINKER_API_KEY (it is sent as X-API-Key)"
    body_hint = "; send fewer rows per request"

    def __init__(
        self, app: AsgiApp, keys: ApiKeys, polls: LongPolls, *, max_body: int = MAX_BODY, loopback_only: bool = False
    ) -> None:
        super().__init__(app, keys, get_logger("rlvr.tinker_server.http"), loopback_only=loopback_only)
        self._max_body, self.polls = max_body, polls
        self.max_arriving_bytes = MAX_ARRIVING_BODIES * max_body

    def error(self, status: int, code: str, detail: str, retry_after: float | None = None) -> TinkerServerError:
        return Busy(detail) if status == 429 else StatusError(status, detail)

    def internal_error(self, error: Exception) -> TinkerServerError:
        return internal_error(error)

    def is_open(self, path: str) -> bool:
        return path == HEALTH_PATH or path.startswith(SIGNED_PREFIX)

    def is_quiet(self, scope: Scope, status: int) -> bool:
        """Polls without a result and heartbeats: there are thousands of them."""
        return scope["path"] in QUIET_PATHS and (status < 400 or status == 408)

    def is_own_origin(self, origin: str, headers: dict[str, str]) -> bool:
        return host_name(origin.partition("://")[2]) in LOOPBACK

    def max_body(self, path: str) -> int:
        return self._max_body if path == BATCH_PATH else min(MAX_JSON, self._max_body)

    def logged_path(self, path: str) -> str:
        """Without the signature of a download's address: the log's readers must not be able to use it."""
        if not path.startswith(SIGNED_PREFIX):
            return path
        return f"{SIGNED_PREFIX}.../{path.removeprefix(SIGNED_PREFIX).partition('/')[2]}"


def internal_error(error: Exception) -> TinkerServerError:
    """Not a 5xx status: the SDK would retry that for five minutes before it shows anything."""
    fault = StatusError(422, f"the server failed at this request ({type(error).__name__}); its log says why")
    fault.category = "server"
    return fault
