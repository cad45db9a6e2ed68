"""Slots and threads that owners share: those that wait take turns (`rlvr.core.fair_queue`), and no owner has them all.

    slots = FairSlots(20)                 # on one event loop
    async with slots.hold("key-1", "batch-7"):
        ...
    rows = await slots.run("key-1", read_rows)       # a call that blocks, in a thread

    threads = FairThreads(80, "work")     # a thread pool, for `asyncio.to_thread` too
    loop.set_default_executor(threads)

One owner gets three quarters, so that another one never waits for work of the first to end. Work without an owner gets
all: it shares with no one.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rlvr.core.fair_queue import FairQueue, current_owner, run_as_owner

T = TypeVar("T")


def share_of(count: int) -> int:
    """How many of `count` places one owner gets: three quarters, rounded up."""
    return (3 * count + 3) // 4


@dataclass(eq=False)
class _Turn:
    owner: str
    come: asyncio.Future[None]
    has_slot: bool = False


class FairSlots:
    """Limits concurrent work to `count` slots, of which one owner gets `share`. All methods belong to one event
    loop."""

    def __init__(self, count: int, share: int | None = None) -> None:
        self._count, self._share = count, share or share_of(count)
        self._waiting, self._held = FairQueue[_Turn](), Counter[str]()

    def waiting(self, owner: str | None = None) -> int:
        """How many wait, of one owner or of all."""
        return len(self._waiting) if owner is None else self._waiting.count(owner)

    @asynccontextmanager
    async def hold(self, owner: str, group: Hashable = None) -> AsyncIterator[None]:
        """Wait for a slot and hold it. The groups of an owner take turns too."""
        await self._take(owner, group)
        try:
            yield
        finally:
            self._release(owner)

    async def run(self, owner: str, call: Callable[[], T]) -> T:
        """Wait for a slot, and for a call that blocks, in a thread of the event loop. The slot is held until the call
        ends, also if the caller is cancelled before. The slots are its turn: in `FairThreads` it waits for no other."""
        await self._take(owner)
        context = contextvars.copy_context()
        running = run_as_owner("", asyncio.get_running_loop().run_in_executor, None, lambda: context.run(call))

        def end(done: asyncio.Future[T]) -> None:
            self._release(owner)
            _ = done.cancelled() or done.exception()  # read here: its caller may have left

        running.add_done_callback(end)
        return await asyncio.shield(running)

    async def _take(self, owner: str, group: Hashable = None) -> None:
        turn = _Turn(owner, asyncio.get_running_loop().create_future())
        self._waiting.add(owner, group, turn)
        self._admit()
        try:
            await turn.come
        except BaseException:
            self._waiting.remove(lambda other: other is turn)
            if turn.has_slot:  # it was cancelled at the moment at which its turn came
                self._release(owner)
            raise

    def refuse_waiting(self, error: Exception) -> None:
        """Raise `error` in all that wait."""
        for turn in self._waiting.remove(lambda turn: True):
            if not turn.come.done():
                turn.come.set_exception(error)

    def _release(self, owner: str) -> None:
        self._held[owner] -= 1
        self._held += Counter()  # drops owners at zero
        self._admit()

    def _admit(self) -> None:
        """Give free slots to those who are next in turn."""
        while self._held.total() < self._count:
            turn = self._waiting.pop(lambda turn: not turn.owner or self._held[turn.owner] < self._share)
            if turn is None:
                return
            if not turn.come.done():
                self._held[turn.owner] += 1
                turn.has_slot = True
                turn.come.set_result(None)


class LoopTurns:
    """Turns on an event loop: of the requests of one owner, one goes on in each round.

    A loop runs everything that is ready before it looks at its sockets again, so that of 3,000 requests that begin,
    time out or lose their client in the same moment, a millisecond each, another owner's single one would wait for all.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # owner -> those behind the last that went on

    async def take(self, owner: Hashable) -> None:
        """Go on at once, or after the earlier calls of this owner: one call in each round of the loop."""
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


class FairThreads(ThreadPoolExecutor):
    """A thread pool of `count` threads whose work belongs to the `current_owner` of the call that submits it, and of
    `unowned` more for work without an owner, which the others can never keep waiting."""

    def __init__(self, count: int, name: str, unowned: int = 0) -> None:
        super().__init__(count + unowned, thread_name_prefix=name)
        self._count, self._share, self._turns = count, share_of(count), threading.Lock()
        self._waiting, self._running = FairQueue[tuple[str, Future[Any], Callable[[], Any]]](), Counter[str]()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        owner, future = current_owner(), Future[Any]()
        with self._turns:
            super().submit(self._run_waiting)  # waits for the lock; RuntimeError after a shutdown
            self._waiting.add(owner, None, (owner, future, partial(fn, *args, **named)))
        return future

    def _run_waiting(self) -> None:
        """Run waiting work in turn, as far as the owners' shares allow. The rest runs when work of its owner ends."""
        while (taken := self._take()) is not None:
            owner, future, work = taken
            try:
                if future.set_running_or_notify_cancel():
                    _complete(future, work)
            finally:
                with self._turns:
                    self._running[owner] -= 1
                    self._running += Counter()
            del taken, future, work  # or a thread that waits would keep the result

    def _take(self) -> tuple[str, Future[Any], Callable[[], Any]] | None:
        with self._turns:
            is_full = self._running.total() - self._running[""] >= self._count
            taken = self._waiting.pop(lambda one: not one[0] or (not is_full and self._running[one[0]] < self._share))
            if taken is not None:
                self._running[taken[0]] += 1
            return taken


def _complete(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
