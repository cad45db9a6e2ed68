"""Long polls: requests held open until there is a result, and released when the server stops.

Exercised by tests/test_tinker_http.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class LongPolls:
    def __init__(self, poll_seconds: float) -> None:
        self.poll_seconds = poll_seconds
        self._polls: set[asyncio.Task[Any]] = set()
        self.closing = False

    async def hold(self, answer: Awaitable[T]) -> T | None:
        """Wait for the answer; None if the server stops first."""
        task = asyncio.current_task()
        assert task is not None
        self._polls.add(task)
        try:
            return await answer
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
