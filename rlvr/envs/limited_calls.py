"""Calls of a user's code with a limit of time, and `EpisodeError`, which ends an episode without a reward.

Python cannot end a thread: a call that is late goes on by itself, and counts as stuck until it ends.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
MOST_STUCK = 16  # late calls that go on, each on a thread of this process
_stuck: set[threading.Thread] = set()


class EpisodeError(Exception):
    """An episode cannot go on, through no fault of the policy. Its text is the episode's error: no reward, no zero."""


class CallError(Exception):
    """A call raised an exception; the text names it."""


def count_stuck() -> int:
    """The number of calls that are still running after their time limit."""
    return len(_stuck)


async def run_in_thread(function: Callable[[], T], seconds: float | None, *keeps: type[Exception]) -> T:
    """The result of a function on a daemon thread, which no exit waits for; what is awaitable is awaited there.

    TimeoutError if it is late, CallError for whatever it raises (SystemExit too, which ends no process of ours) but
    the exceptions that it `keeps`.
    """
    return await _run(function, seconds, keeps, may_hang=True)


async def run_ending_call(function: Callable[[], T], seconds: float | None, *keeps: type[Exception]) -> T:
    """`run_in_thread` for a function that ends by itself soon after its time: a late one does not count as stuck."""
    return await _run(function, seconds, keeps, may_hang=False)


async def _run(
    function: Callable[[], T], seconds: float | None, keeps: tuple[type[Exception], ...], *, may_hang: bool
) -> T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def work() -> None:
        result, failure = None, None
        try:
            result = wait_for_result(function())
        except keeps as error:
            failure = error
        except BaseException as error:
            failure = CallError(_describe(error))
        _stuck.discard(thread)
        with suppress(RuntimeError):  # the loop has ended, and with it the wait
            loop.call_soon_threadsafe(lambda: done.done() or done.set_result((result, failure)))

    thread = threading.Thread(target=work, name="limited call", daemon=True)
    thread.start()
    try:
        result, failure = await asyncio.wait_for(done, seconds)
    except TimeoutError:
        if may_hang:
            _stuck.add(thread)
        if not thread.is_alive():
            _stuck.discard(thread)
        raise
    if failure is not None:
        raise failure
    return result


def wait_for_result(result: Any) -> Any:
    """A result, or what it gives when it is awaited. Not for a thread with an event loop."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:  # an exception whose own text fails
        return type(error).__name__
