"""Turns on an event loop: of the requests of one owner, one goes on at a time.

A loop runs everything that is ready before it looks at its sockets again, so that of 3,000 requests that begin, time
out or lose their client in the same moment, a millisecond each, another owner's single one would wait for all at every
step. Exercised by tests/test_service_middleware.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable


class Turns:
    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # owner -> those behind the last that went on

    async def take(self, owner: Hashable) -> None:
        """Go on at once, or behind the others of this owner, one in each round of the loop."""
        loop = asyncio.get_running_loop()
        if (waiting := self._waiting.get(owner)) is None:
            self._waiting[owner] = deque()
            loop.call_soon(self._pass_on, owner)
            return
        turn = loop.create_future()
        waiting.append(turn)
        await turn

    def _pass_on(self, owner: Hashable) -> None:
        waiting = self._waiting[owner]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on, owner)
                return
        del self._waiting[owner]
