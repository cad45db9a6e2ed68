"""Stopping work that waits on another thread: whoever started it sets an event, and what waits looks at it.

A `KeyboardInterrupt` reaches the main thread alone. Verifications that a step has begun on threads of its own
(`rlvr.scoring`) are run `under` an event; the waits at the bottom (`Sandbox.verify_many`, the loop of async rewards)
look at it between naps, and end as they would by Ctrl-C. Exercised by `tests/test_overlap.py`. Left out on purpose:
stopping what computes.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_SECONDS = 0.2
_asked: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("halt", default=None)


def under(event: threading.Event, work: Callable[..., T], *args: Any) -> T:
    """`work(*args)`, which is to end soon after `event` is set."""
    context = contextvars.copy_context()
    context.run(_asked.set, event)
    return context.run(work, *args)


def nap() -> float | None:
    """How long a wait may take before it looks again; None where nobody may halt it."""
    return None if _asked.get() is None else LOOK_SECONDS


def look() -> None:
    """RuntimeError where this work is to end."""
    event = _asked.get()
    if event is not None and event.is_set():
        raise RuntimeError("stopped: nobody waits for this any more")
