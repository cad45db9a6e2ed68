"""Results that may not be there yet: every call of a client returns a future with `.result()` that can be awaited.

Left out on purpose: threads. A `LazyFuture` computes on the thread that asks. Exercised by `tests/test_rollout.py` and
`tests/test_overlap.py`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar, cast

T = TypeVar("T")
K = TypeVar("K")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """A result that may not be there yet: block with `.result()`, or await it."""

    def result(self, timeout: float | None = None) -> T_co: ...

    async def result_async(self, timeout: float | None = None) -> T_co: ...

    def __await__(self) -> Generator[Any, None, T_co]: ...


def _nothing_left() -> bool:
    return True


class LazyFuture(Generic[T]):
    """A future whose work happens on the thread that first asks for the result (once; an error is kept too).

    A `timeout` therefore bounds only the wait for another thread that is at work on it: then TimeoutError.

    Work that comes in pieces, which serve other futures too, may give `piece`, which does the next one and says whether
    it was the last, and `ready`, which only says so: whoever waits for many sees which of them are there first.
    """

    def __init__(
        self,
        work: Callable[[], T],
        piece: Callable[[], bool] = _nothing_left,
        ready: Callable[[], bool] = _nothing_left,
    ) -> None:
        self._work: Callable[[], T] | None = work
        self.piece, self.ready = piece, ready
        self._lock = threading.Lock()
        self._value: T | None = None
        self._error: Exception | None = None

    @classmethod
    def done(cls, value: T) -> LazyFuture[T]:
        future = cls(lambda: value)
        future.result()
        return future

    def result(self, timeout: float | None = None) -> T:
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"no result after {timeout} s: another thread is still computing it")
        try:
            if self._work is not None:
                try:
                    self._value = self._work()
                except Exception as error:
                    self._error = error
                # What the work holds on to may go now. (After a Ctrl-C in it, asking again tries again.)
                self._work, self.piece, self.ready = None, _nothing_left, _nothing_left
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    async def result_async(self, timeout: float | None = None) -> T:
        return await asyncio.to_thread(self.result, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


async def at_once(future: Future[T]) -> T:
    """Block: results are read in the order of the requests, and nothing else happens meanwhile."""
    return future.result()


async def in_turn(future: Future[T]) -> T:
    """Await: whatever else the event loop has to do goes on."""
    return await future


async def as_they_come(asked: Sequence[tuple[K, Future[T]]]) -> AsyncIterator[tuple[K, T]]:
    """(what it was asked for, result) of each, what is there first, first.

    Of what computes on this thread the first is taken further piece by piece, so the order is the same every time.
    """
    waiting = [(what, future) for what, future in asked if isinstance(future, LazyFuture)]
    away = {asyncio.ensure_future(in_turn(f)): what for what, f in asked if not isinstance(f, LazyFuture)}
    while waiting:
        waiting[0][1].piece()
        here = [(what, future) for what, future in waiting if future.ready()]
        waiting = [(what, future) for what, future in waiting if not future.ready()]
        for what, future in here:
            yield what, future.result()
        await asyncio.sleep(0)
    while away:
        done, _ = await asyncio.wait(away, return_when=asyncio.FIRST_COMPLETED)
        for read in [read for read in away if read in done]:
            yield away.pop(read), read.result()


def to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; where a loop is running on this thread already (a notebook's), on a thread beside."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(asyncio.run, work).result()
