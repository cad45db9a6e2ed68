"""Coroutines of async rewards, run to their end by whoever calls, inside a running event loop or not.

One loop in a thread of its own serves them all and stays: a client that a reward opened once (connections to a judge)
belongs to its loop and must find it again at the next call. `python -m pytest tests/test_reward_async.py` exercises it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="rlvr-rewards", daemon=True)
        self.thread.start()

    def close(self) -> None:
        if os.getpid() != self.owner:  # a forked copy has no such thread
            return
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
        except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop's thread and leave us waiting
            return None, error

    future = asyncio.run_coroutine_threadsafe(caught(), running.loop)
    try:
        value, error = future.result()
    except BaseException:
        future.cancel()  # Ctrl-C here: nobody waits for it any more
        raise
    if error is not None:
        raise error
    return value


def _running() -> _Loop:
    global _current
    with _lock:
        if _current is None or _current.owner != os.getpid():
            _current = _Loop()
            atexit.register(_current.close)
        return _current


def _forget() -> None:
    """In a forked copy: whoever held the lock, and the loop's thread, are not here."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
