"""Coroutines of async rewards, run to their end by whoever calls, inside a running event loop or not.

One loop in a thread of its own serves them all and stays: a client that a reward opened once (connections to a judge)
belongs to its loop and must find it again at the next call. Nothing that a reward does ends that loop: `sys.exit` in
one of its tasks reaches whoever awaits the task, and `loop.stop` does nothing.

The sampler of text endpoints (`rlvr.clients.endpoint`) has its requests there too, so that they need no threads.

Left out on purpose: a time limit. Only the reward knows how long its judge may take (`asyncio.timeout`); one that never
ends is waited for until Ctrl-C. `python -m pytest tests/test_reward_async.py` exercises it.
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

from rlvr.halt import look

T = TypeVar("T")

LOOK_SECONDS = 0.2  # between two looks at whether the loop's thread still lives; a result is seen at once


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
            # These end the loop, whichever task they are raised in; the task keeps them for whoever awaits it.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self.loop.run_forever()
        tasks = [task for task in asyncio.all_tasks(self.loop) if task.cancel()]
        if tasks and not self.loop.is_closed():  # so that connections are closed, and no task is lost while it waits
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


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What the coroutine returns; what it raises is raised here."""
    running = _running()
    if threading.current_thread() is running.thread:
        coroutine.close()
        raise RuntimeError("an async reward calls another reward that is async: await that function itself instead")

    async def caught() -> tuple[Any, BaseException | None]:
        try:
            return await coroutine, None
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return None, error

    future = asyncio.run_coroutine_threadsafe(caught(), running.loop)
    try:
        while not concurrent.futures.wait([future], timeout=LOOK_SECONDS).done:
            if not running.thread.is_alive():
                raise RuntimeError(
                    "the event loop of async rewards has ended: this process is ending, or one closed it"
                )
            look()
        value, error = future.result()
    except BaseException:
        if running.alive:
            future.cancel()  # Ctrl-C here: nobody waits for it any more
        raise
    if error is None:
        return value
    if isinstance(error, (Exception, SystemExit)):
        raise error
    # No key was pressed in the loop's thread: this must not pass for a Ctrl-C of whoever runs the training.
    raise RuntimeError(f"the async reward raised {type(error).__name__}: {error}") from error


def begin(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Start a coroutine of ours on that loop, and do not wait: its result comes, or it is cancelled, from any thread.

    For what never blocks and raises plain exceptions alone: a request to an endpoint.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, _running().loop)


def on_loop() -> bool:
    """Whether this is that loop's thread, which must not wait for what it has to do itself."""
    return _current is not None and threading.current_thread() is _current.thread


def _running() -> _Loop:
    global _current
    with _lock:
        if _current is None or not _current.alive:
            _current = _Loop()
            atexit.register(_current.close)
        return _current


def _forget() -> None:
    """In a forked copy: whoever held the lock, and the loop's thread, are not here."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
