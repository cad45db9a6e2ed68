"""The service's rules for the middleware: HTTP problems, rate limits, CORS, security headers, metrics.

With keys a client sends one as `Authorization: Bearer` or as `X-API-Key`. The dashboard checks keys itself, in a way
that browsers can answer.
"""

from __future__ import annotations

from collections.abc import Callable

from rlvr.service.settings import ServiceLimits
from rlvr.web.auth import ApiKeys
from rlvr.web.errors import HttpProblem
from rlvr.web.logs import get_logger
from rlvr.web.middleware import AsgiApp, CountResponse, Middleware, Scope, headers_of, route_pattern
from rlvr.web.rate_limit import RateLimit
from rlvr.web.server import max_connections

OPEN_PATHS = ("/health", "/health/live", "/health/ready")  # without a key
QUIET_PATHS = (*OPEN_PATHS, "/metrics", "/metrics/prometheus")
SECURITY_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"x-frame-options": b"DENY",
}
# A JSON response is no page: nothing in it may run, and no cache may keep it.
JSON_HEADERS = {
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cache-control": b"no-store",
}
BODY_SECONDS = 60.0  # a slow body holds a connection, and what has arrived of it in memory
ARRIVING_BODIES = 32  # of the largest size, of one owner at a time


class ServiceMiddleware(Middleware):
    body_hint = " (limits.max_body)"
    max_drained_bytes = 64 << 20

    def __init__(
        self,
        app: AsgiApp,
        keys: ApiKeys,
        limits: ServiceLimits,
        cors_origins: tuple[str, ...] = (),
        *,
        count: CountResponse | None = None,
        has_own_auth: Callable[[str], bool] | None = None,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        """`count` is called with every response; `has_own_auth` tells which paths check keys by themselves."""
        super().__init__(app, keys, get_logger("rlvr.service.http"), loopback_only=not keys, count=count)
        self._limits, self._origins = limits, cors_origins
        self._has_own_auth = has_own_auth or (lambda path: False)
        self.body_seconds = body_seconds
        self.max_open_requests = max(1, max_connections() // 2)
        self.max_arriving_bytes = ARRIVING_BODIES * limits.max_body
        self._writes, self._reads = RateLimit(limits.requests_per_minute), RateLimit(limits.reads_per_minute)

    def error(self, status: int, code: str, detail: str, retry_after: float | None = None) -> HttpProblem:
        return HttpProblem(status, code, detail, retry_after=retry_after)

    def internal_error(self, error: Exception) -> HttpProblem:
        return internal_error()

    def is_open(self, path: str) -> bool:
        return path in OPEN_PATHS or self._has_own_auth(path)

    def is_probe(self, path: str) -> bool:
        return path in OPEN_PATHS

    def is_quiet(self, scope: Scope, status: int) -> bool:
        return status < 400 and (scope["path"] in QUIET_PATHS or route_pattern(scope) == "other")

    def is_own_origin(self, origin: str, headers: dict[str, str]) -> bool:
        return origin in self._origins or origin.partition("://")[2] == headers.get("host", "")

    def max_body(self, path: str) -> int:
        return self._limits.max_body

    def check_rate(self, scope: Scope, owner: str) -> None:
        if scope["path"] in OPEN_PATHS and scope["method"] == "GET":
            return
        is_read = scope["method"] in ("GET", "HEAD", "OPTIONS")
        if wait := (self._reads if is_read else self._writes).acquire(owner):
            most = self._limits.reads_per_minute if is_read else self._limits.requests_per_minute
            raise HttpProblem(429, "too_many_requests", f"{most} requests a minute are allowed", retry_after=wait)

    def is_preflight(self, scope: Scope) -> bool:
        return scope["method"] == "OPTIONS" and headers_of(scope).get("origin") in self._origins

    def response_headers(self, scope: Scope, headers: dict[bytes, bytes]) -> dict[bytes, bytes]:
        is_json = headers.get(b"content-type", b"").startswith(b"application/json")
        added = {**SECURITY_HEADERS, **(JSON_HEADERS if is_json else {})}
        origin = headers_of(scope).get("origin")
        if origin is not None and origin in self._origins:
            added[b"access-control-allow-origin"] = origin.encode("latin-1")
            added[b"vary"] = b"Origin"
            if scope["method"] == "OPTIONS":
                added[b"access-control-allow-methods"] = b"GET, POST"
                added[b"access-control-allow-headers"] = b"Authorization, X-API-Key, Content-Type, Last-Event-ID"
        return added


def internal_error() -> HttpProblem:
    return HttpProblem(500, "internal", "the service failed at this request; its log says why, under this request_id")
