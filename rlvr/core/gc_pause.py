"""No garbage collection while a program starts. Exercised by tests/test_tinker_loading.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Import and load in this context without looking for garbage; no later collection looks at what is made.

    torch and transformers make 400,000 objects that live as long as the process. Going through them again and again
    takes a fifth of the time of importing them, and later half a second of every full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
