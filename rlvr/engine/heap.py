"""The C library's heap: kept between operations, given back when nothing runs.

What a pass frees, the next one asks for again. GNU's malloc returns free memory at the end of its heap to the system
when there are some megabytes of it, and gets it back page by page, cleared by the system: a sixth of the time of
a small model's step. An `Engine` turns that off; the most that a process holds stays what it was. Exercised by
`tests/test_engine_heap.py`. Left out on purpose: other allocators, which know their own settings.
"""

from __future__ import annotations

import ctypes
import os

# https://man7.org/linux/man-pages/man3/mallopt.3.html
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = -1
LARGEST = 32 << 20  # bytes that malloc takes from its heap at most: what it settles on by itself after a few frees
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")  # the user's own


def keep() -> None:
    """From now on this process keeps the memory it frees, unless its user has said what malloc should do."""
    asked = any(name in os.environ for name in SETTINGS) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if (library := _gnu()) is not None and not asked:
        library.mallopt(M_MMAP_THRESHOLD, LARGEST)
        library.mallopt(M_TRIM_THRESHOLD, NEVER)


def give_back() -> None:
    """Return to the system what is free now."""
    if (library := _gnu()) is not None:
        library.malloc_trim(0)


def _gnu() -> ctypes.CDLL | None:
    """The C library, where it is GNU's."""
    library = ctypes.CDLL(None) if os.name == "posix" else None
    return library if hasattr(library, "gnu_get_libc_version") else None
