"""How many episodes run at the same time, over all groups of a task source: of programs and servers outside."""

from __future__ import annotations

import asyncio
import threading

_LOOK_SECONDS = 0.01


class EpisodeSlots:
    """Limits the episodes that run at once to `most` slots. The episodes of a wave take theirs together: one by one,
    two waves could wait for each other."""

    def __init__(self, most: int) -> None:
        self.most, self._free = most, most
        self._lock = threading.Lock()

    async def take(self, count: int) -> None:
        """Wait for `count` free slots; ValueError if `count` is more than all slots."""
        if count > self.most:
            raise ValueError(f"{count} slots are asked for, expected at most {self.most}")
        while not self._try(count):
            await asyncio.sleep(_LOOK_SECONDS)

    def _try(self, count: int) -> bool:
        with self._lock:
            if self._free < count:
                return False
            self._free -= count
            return True

    def give_back(self, count: int) -> None:
        with self._lock:
            self._free += count
