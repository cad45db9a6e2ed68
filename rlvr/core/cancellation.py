"""A cancellation token for work that waits on other threads.

Ctrl-C (`KeyboardInterrupt`) reaches the main thread alone. Verifications that a step runs on threads of its own
(`rlvr.rollout.scoring`) are started by `run_with` and an event; the waits inside them (`Sandbox.verify_many`, the loop
of async rewards) poll the event and raise once it is set. Left out on purpose: cancelling work that computes.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.2
_token: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("cancellation", default=None)


def run_with(event: threading.Event, work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`, which is cancelled once `event` is set."""
    context = contextvars.copy_context()
    context.run(_token.set, event)
    return context.run(work, *args)


def poll_interval() -> float | None:
    """Seconds that a wait may take before it checks for cancellation; None if nothing can cancel it."""
    return None if _token.get() is None else POLL_SECONDS


def raise_if_cancelled() -> None:
    """Raise RuntimeError if this work was cancelled."""
    event = _token.get()
    if event is not None and event.is_set():
        raise RuntimeError("cancelled: the step that started this work has ended")
