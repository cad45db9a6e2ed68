"""How many episodes of programs outside run at the same time, over all groups of a task source."""

from __future__ import annotations

import asyncio
import threading

_LOOK_SECONDS = 0.01


class EpisodeSlots:
    """`most` slots, which a group takes together: taken one by one, two groups could wait for each other for ever."""

    def __init__(self, most: int) -> None:
        self.most, self._free = most, most
        self._lock = threading.Lock()

    async def take(self, count: int) -> None:
        """Wait for so many slots. ValueError for more than there are."""
        if count > self.most:
            raise ValueError(
                f"a group has {count} episodes, and {self.most} run at the same time (rules.max_concurrent); raise it, "
                "or make groups smaller (training.group_size, evaluation.samples)"
            )
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
