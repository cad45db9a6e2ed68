"""Which clients are still there: sessions, by when they were last heard of.

The SDK sends a heartbeat every 10 seconds; asking for samples, or for their results, counts as well. What a client
that vanished was sampling is given up (`core.py`), so that those who are there get the chip. Exercised by
tests/test_tinker_core_sampling.py. Left out on purpose: training, which runs to its end whoever waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Presence:
    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}
        self._looked = clock()

    def heard(self, session: str) -> None:
        with self._lock:
            self._heard[session] = self._clock()

    def left(self, session: str) -> None:
        with self._lock:
            self._heard.pop(session, None)

    def present(self) -> set[str]:
        """Who is there. To be asked often: where it was not, it is us who were not there to listen."""
        with self._lock:
            now = self._clock()
            if now - self._looked > self._seconds / 2:
                self._heard = dict.fromkeys(self._heard, now)
            self._looked = now
            self._heard = {session: at for session, at in self._heard.items() if at > now - self._seconds}
            return set(self._heard)
