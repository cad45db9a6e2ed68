"""The requests to /grade: each may take minutes, so keys take turns and share the slots, and a client that leaves frees
its slot at once.

    results = await queue.run(owner, request, partial(grade, body, settings, judge))

Programs that wait for the sandbox are dropped, those that run are killed (`rlvr.core.cancellation`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Request

from rlvr.core.cancellation import run_with
from rlvr.core.fair_queue import run_as_owner
from rlvr.core.fair_slots import FairSlots
from rlvr.service.problems import stopping
from rlvr.web.errors import HttpProblem

T = TypeVar("T")

SLOTS, SHARE = 16, 4  # requests that run at once: of all keys, and of one key
WAITING, WAITING_SHARE = 64, 32  # more that may wait, with their texts in memory


class GradingQueue:
    """All methods belong to the event loop."""

    def __init__(self) -> None:
        self._slots, self._threads = FairSlots(SLOTS, SHARE), CapacityLimiter(SLOTS)
        self._cancels: set[threading.Event] = set()
        self._is_closed = False

    async def run(self, owner: str, request: Request, work: Callable[[], T]) -> T:
        """The result of `work`, which blocks, in a thread; HttpProblem 429 if too many wait. `work` is cancelled when
        the client of `request` leaves."""
        cancel = threading.Event()
        self._cancels.add(cancel)
        result = asyncio.create_task(self._run(owner, cancel, work))
        gone = asyncio.create_task(_wait_for_disconnect(request))
        try:
            await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise HttpProblem(499, "client_gone", "the client left before its response")
            return result.result()
        finally:
            cancel.set()
            self._cancels.discard(cancel)
            for task in (result, gone):
                task.cancel()
            await asyncio.wait((result, gone))

    async def _run(self, owner: str, cancel: threading.Event, work: Callable[[], T]) -> T:
        if self._slots.waiting() >= WAITING or self._slots.waiting(owner) >= WAITING_SHARE:
            raise HttpProblem(429, "busy", "too many requests to /grade wait already; try again later", retry_after=10)
        async with self._slots.hold(owner):
            try:
                if self._is_closed:
                    raise stopping()
                return await to_thread.run_sync(run_with, cancel, run_as_owner, owner, work, limiter=self._threads)
            except RuntimeError:
                if self._is_closed and cancel.is_set():
                    raise stopping() from None
                raise

    def close(self) -> None:
        """End all: those that run and those that wait get 503."""
        self._is_closed = True
        for cancel in self._cancels:
            cancel.set()
        self._slots.refuse_waiting(stopping())


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
