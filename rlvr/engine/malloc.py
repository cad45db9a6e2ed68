"""Keeps memory freed in glibc's malloc between operations, and releases it when nothing runs.

glibc returns free memory at the end of its heap to the system and later gets it back page by page, zeroed: a sixth of
the time of a small model's step. An `Engine` turns that off: between operations the process then holds what they used
at most, until an optimizer step leaves a gigabyte free and most of the heap. A rank, which holds a part of a model and
gathers the rest again and again, returns what it frees. Left out on purpose: other allocators, with settings of their
own.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping

# https://man7.org/linux/man-pages/man3/mallopt.3.html
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER = -1
LARGEST = 32 << 20  # bytes: larger blocks are not taken from the heap (malloc reaches this bound after a few frees)
LARGE = 1 << 20  # bytes that are worth a system call
MOST_FREE = 1 << 30  # bytes that an optimizer step may leave free; to get back a gigabyte takes 0.2 s
TRIM_SECONDS, KEPT_BYTES = 60.0, 256 << 20  # how often a server returns its free memory, if it has more than this
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> None:
    """Let this process keep the memory it frees, unless the user has configured malloc."""
    _configure({M_MMAP_THRESHOLD: LARGEST, M_TRIM_THRESHOLD: NEVER})


def return_freed_memory() -> None:
    """Let this process return every large block it frees, unless the user has configured malloc.

    A rank gathers and frees weights in every block of a pass. Out of one heap, beside what lives longer, they left more
    than half of its memory unused and not returned.
    """
    _configure({M_MMAP_THRESHOLD: LARGE})


def _configure(values: Mapping[int, int]) -> None:
    is_configured = any(name in os.environ for name in SETTINGS)
    if (library := _glibc()) is None or is_configured or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return
    for parameter, value in values.items():
        library.mallopt(parameter, value)


def release_free_memory(least: int = 0) -> None:
    """Return free memory to the system if it has at least `least` bytes."""
    if (library := _glibc()) is not None and (not least or _read_heap(library)[1] >= least):
        library.malloc_trim(0)


def release_unused_heap() -> None:
    """Return what a step left free if it is `MOST_FREE` or more, and more than what is in use.

    Passes of other lengths cut up what earlier ones freed, so the heap of a large model grows from step to step: with
    134 M weights the process held 8.6 GB after 28 steps, of which 1.8 were in use between steps.
    """
    if (library := _glibc()) is not None:
        used, free = _read_heap(library)
        if free >= MOST_FREE and used < free < math.inf:
            library.malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    """https://man7.org/linux/man-pages/man3/mallinfo.3.html"""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]


def _read_heap(library: ctypes.CDLL) -> tuple[float, float]:
    """Bytes of malloc's heaps in use, and free ones; 0 and infinity before glibc 2.33, which cannot say."""
    if not hasattr(library, "mallinfo2"):
        return 0.0, math.inf
    library.mallinfo2.restype = _Mallinfo
    found = library.mallinfo2()
    return found.uordblks, found.fordblks


def _glibc() -> ctypes.CDLL | None:
    """The C library if it is glibc, else None."""
    library = ctypes.CDLL(None) if os.name == "posix" else None
    return library if hasattr(library, "gnu_get_libc_version") else None
