"""Futures: every call of a client returns one, with `.result()` to block and `await` to wait.

Left out on purpose: threads. A `LazyFuture` computes on the thread that calls `.result()`.
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

    def result(self, timeout: float | None = None) -> T_co:
        """The result, or the error of the call. TimeoutError after `timeout` seconds; None waits without end."""
        ...

    async def result_async(self, timeout: float | None = None) -> T_co: ...

    def __await__(self) -> Generator[Any, None, T_co]: ...


def _is_done() -> bool:
    return True


class LazyFuture(Generic[T]):
    """A future whose work runs once, on the thread that first asks for the result; an error is stored too.

    So a `timeout` bounds only the wait for another thread that is computing it: then TimeoutError.

    Work in steps that also serve other futures may pass `advance`, which does the next step and returns whether it was
    the last, and `is_ready`, which only tells: a caller with many futures sees which of them complete first.
    """

    def __init__(
        self,
        work: Callable[[], T],
        advance: Callable[[], bool] = _is_done,
        is_ready: Callable[[], bool] = _is_done,
    ) -> None:
        self._work: Callable[[], T] | None = work
        self.advance, self.is_ready = advance, is_ready
        self._lock = threading.Lock()
        self._value: T | None = None
        self._error: Exception | None = None

    @classmethod
    def from_value(cls, value: T) -> LazyFuture[T]:
        """A future that has its result already."""
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
                # Release what the work refers to. After a Ctrl-C inside it, the next call tries again.
                self._work, self.advance, self.is_ready = None, _is_done, _is_done
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    async def result_async(self, timeout: float | None = None) -> T:
        return await asyncio.to_thread(self.result, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


async def read_blocking(future: Future[T]) -> T:
    """Block for the result: results are read in the order of the requests, and no other coroutine runs."""
    return future.result()


async def read_async(future: Future[T]) -> T:
    """Await the result: other coroutines of the event loop run meanwhile."""
    return await future


async def as_completed(futures: Sequence[tuple[K, Future[T]]]) -> AsyncIterator[tuple[K, T]]:
    """Yield (key, result) of each future, in the order in which they complete.

    Lazy futures are advanced step by step on this thread, the first one first, so their order is always the same.
    """
    waiting = [(key, future) for key, future in futures if isinstance(future, LazyFuture)]
    tasks = {asyncio.ensure_future(read_async(f)): key for key, f in futures if not isinstance(f, LazyFuture)}
    while waiting:
        waiting[0][1].advance()
        ready = [(key, future) for key, future in waiting if future.is_ready()]
        waiting = [(key, future) for key, future in waiting if not future.is_ready()]
        for key, future in ready:
            yield key, future.result()
        await asyncio.sleep(0)
    while tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in tasks if task in done]:
            yield tasks.pop(task), task.result()


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; on another thread if this one runs an event loop already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, work).result()
