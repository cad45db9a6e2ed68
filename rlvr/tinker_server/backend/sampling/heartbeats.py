"""Heartbeats: which sessions are alive.

The SDK sends a heartbeat every 10 seconds; requesting samples or their results counts as one. The samples of a client
without heartbeats are cancelled (`sample_requests.py`), so that the others get the engine. Exercised by
tests/test_tinker_backend_sampling.py. Left out on purpose: training, which is completed even if its client is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Heartbeats:
    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._last_beat: dict[str, float] = {}
        self._last_poll = clock()

    def record(self, session: str) -> None:
        with self._lock:
            self._last_beat[session] = self._clock()

    def remove(self, session: str) -> None:
        with self._lock:
            self._last_beat.pop(session, None)

    def live_sessions(self) -> set[str]:
        """Sessions with a heartbeat in the last `seconds`. Poll regularly: after a gap between polls nothing expires,
        since this server may have missed heartbeats."""
        with self._lock:
            now = self._clock()
            if now - self._last_poll > self._seconds / 2:
                self._last_beat = dict.fromkeys(self._last_beat, now)
            self._last_poll = now
            self._last_beat = {session: at for session, at in self._last_beat.items() if at > now - self._seconds}
            return set(self._last_beat)
