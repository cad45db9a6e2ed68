"""Runs the coroutines of async rewards from synchronous code, inside a running event loop or not.

One event loop in a thread of its own runs them all and stays, because a client that a reward opened once (connections
to a judge) belongs to its loop and is used again at the next call. A reward cannot end that loop: `sys.exit` in a task
is raised where the task is awaited, and `loop.stop` has no effect.

The sampler of text endpoints (`rlvr.clients.endpoint`) sends its requests there too, so that they need no threads.

Left out on purpose: a time limit. Only the reward knows how long its judge may take (`asyncio.timeout`); a call that
never ends is waited for until Ctrl-C.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlvr.core.cancellation import raise_if_cancelled

T = TypeVar("T")

POLL_SECONDS = 0.2  # between two checks that the loop's thread lives; a result is seen at once


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="rlvr-rewards", daemon=True)
        self._closing = False
        self.thread.start()

    @property
    def alive(self) -> bool:
        return self.owner == os.getpid() and self.thread.is_alive() and not self._closing

    def _run(self) -> None:
        while not (self._closing or self.loop.is_closed()):
            # These end the loop, whichever task raises them; the task keeps them for its awaiter.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
        tasks = [task for task in asyncio.all_tasks(self.loop) if task.cancel()]
        if tasks and not self.loop.is_closed():  # so that connections are closed and no task is lost
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=1))

    def close(self) -> None:
        if os.getpid() != self.owner or self._closing:  # a forked copy has no such thread
            return
        self._closing = True
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=5)
        if not self.thread.is_alive():
            self.loop.close()


_lock = threading.Lock()
_current: _Loop | None = None


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what the coroutine returns, or raise what it raises."""
    running = _reward_loop()
    if threading.current_thread() is running.thread:
        coroutine.close()
        raise RuntimeError("an async reward calls another reward that is async: await that function itself instead")

    async def capture() -> tuple[Any, BaseException | None]:
        try:
            return await coroutine, None
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return None, error

    future = asyncio.run_coroutine_threadsafe(capture(), running.loop)
    try:
        while not concurrent.futures.wait([future], timeout=POLL_SECONDS).done:
            if not running.thread.is_alive():
                raise RuntimeError(
                    "the event loop of async rewards has ended: this process is ending, or one closed it"
                )
            raise_if_cancelled()
        value, error = future.result()
    except BaseException:
        if running.alive:
            future.cancel()  # Ctrl-C here: the result is not needed any more
        raise
    if error is None:
        return value
    if isinstance(error, (Exception, SystemExit)):
        raise error
    # Not a Ctrl-C of the user, so it must not look like one.
    raise RuntimeError(f"the async reward raised {type(error).__name__}: {error}") from error


def start_coroutine(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine on the event loop of async rewards, without waiting for it.

    The future can be read or cancelled from any thread. Only for coroutines that never block and raise plain
    exceptions: requests to an endpoint.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, _reward_loop().loop)


def in_loop_thread() -> bool:
    """Whether this is the thread of the event loop of async rewards, which must not wait for its own work."""
    return _current is not None and threading.current_thread() is _current.thread


def _reward_loop() -> _Loop:
    global _current
    with _lock:
        if _current is None or not _current.alive:
            _current = _Loop()
            atexit.register(_current.close)
        return _current


def _replace_lock() -> None:
    """In a forked child the thread that held the lock does not exist."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock)
