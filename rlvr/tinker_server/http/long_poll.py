"""Long polls: requests held open until there is a result, and released when the server stops.

Thousands of one owner's may end in the same moment, with one result or at their timeout: they go on one by one.
Exercised by tests/test_tinker_http.py and tests/test_tinker_long_polls.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from rlvr.core.fair_slots import LoopTurns

T = TypeVar("T")


class LongPolls:
    def __init__(self, poll_seconds: float) -> None:
        self.poll_seconds = poll_seconds
        self._polls: set[asyncio.Task[Any]] = set()
        self._turns = LoopTurns()
        self.closing = False

    async def hold(self, owner: str, answer: Awaitable[T]) -> T | None:
        """Wait for the answer of an owner's poll; None if the server stops first."""
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
