"""How many requests a minute one key may send: the service's API and its dashboard count them."""

from __future__ import annotations

import time
from collections.abc import Callable


class RateLimit:
    """A token bucket per key, filled at a steady rate: `per_minute` requests, up to a tenth of them (at least 10) at
    once; 0 is no limit. Buckets belong to this process: two instances behind one load balancer allow twice as much."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._speed = per_minute / 60
        self._most = max(10.0, per_minute / 10)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # owner -> (tokens, when)

    def acquire(self, owner: str) -> float:
        """Take a token and return 0; if there is none, the seconds until there is one."""
        if not self._speed:
            return 0.0
        now = self._clock()
        tokens, when = self._buckets.get(owner, (self._most, now))
        tokens = min(self._most, tokens + (now - when) * self._speed)
        if tokens < 1:
            self._buckets[owner] = (tokens, now)
            return (1 - tokens) / self._speed
        self._buckets[owner] = (tokens - 1, now)
        return 0.0
