"""Results that may not be there yet: every call of a client returns a future with `.result()` that can be awaited.

Left out on purpose: threads. A `LazyFuture` computes on the thread that asks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar, cast

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Future(Protocol[T_co]):
    """A result that may not be there yet: block with `.result()`, or await it."""

    def result(self, timeout: float | None = None) -> T_co: ...

    async def result_async(self, timeout: float | None = None) -> T_co: ...

    def __await__(self) -> Generator[Any, None, T_co]: ...


class LazyFuture(Generic[T]):
    """A future whose work happens on the thread that first asks for the result (once; an error is kept too).

    A `timeout` therefore bounds only the wait for another thread that is at work on it: then TimeoutError.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
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
                self._work = None
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    async def result_async(self, timeout: float | None = None) -> T:
        return await asyncio.to_thread(self.result, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()
