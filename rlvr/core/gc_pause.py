"""No garbage collection while a program starts, or builds a large answer."""

from __future__ import annotations

import gc
import threading
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


class CollectionPause:
    """A context, for any number of threads at once, in which there is no garbage collection.

    Millions of lists and dicts that are built and soon freed by their last reference hold no garbage, but set off
    searches through all of them, which stop every thread for a tenth of a second.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._was_enabled = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._was_enabled = gc.isenabled()
                gc.disable()

    def __exit__(self, *failure: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._was_enabled:
                gc.enable()
