"""How a zygote forks: without what libc and Python do around a fork, and by a call that only a zygote may make.

What Python runs after a fork does not matter in a process with one thread, and costs 150 page faults. It would also
reseed `random`: a zygote must not import that module, so that each answer imports it and gets its own random numbers.
Standard library only.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from rlvr.sandbox.mounts import NO_CAPABILITIES
from rlvr.sandbox.seccomp import CLONE, ZYGOTE, ZYGOTE_FORK, architecture

GET_TID_ADDRESS = 40
POOL = 1 << 14  # bytes that Python's allocator takes for blocks of one size
_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL, which the fork then has too
Fork = Callable[[], tuple[int, int]]


def plain_fork() -> tuple[int, int]:
    """Fork; returns (process id, its descriptor), and (0, -1) in the fork."""
    child = _libc.fork()
    if child < 0:
        raise OSError(ctypes.get_errno(), "fork failed")
    return (child, os.pidfd_open(child)) if child else (0, -1)


def capability_fork() -> tuple[Fork, Callable[[], None]]:
    """Returns a fork function that uses `seccomp.ZYGOTE_FORK`, and one that gives up the capability for it.

    Call it before a filter is loaded. Both use one foreign function, whose pages the zygote has then touched already.
    """
    column, _ = architecture()
    descriptor, own_id = ctypes.c_int(-1), ctypes.c_void_p()
    _libc.prctl(GET_TID_ADDRESS, ctypes.byref(own_id), 0, 0, 0)  # where libc stores the thread's id; 0 if refused
    last = [own_id, ctypes.c_void_p()]  # and thread-local storage, unchanged
    arguments = (
        ctypes.c_long(CLONE[column]), ctypes.c_ulong(ZYGOTE_FORK), ctypes.c_void_p(),
        ctypes.c_void_p(ctypes.addressof(descriptor)), *(last if column == 0 else reversed(last)),
    )  # fmt: skip
    call = _libc.syscall
    call.restype = ctypes.c_long

    def fork() -> tuple[int, int]:
        child = call(*arguments)
        if child < 0:
            raise OSError(ctypes.get_errno(), "clone")
        return (child, descriptor.value) if child else (0, -1)

    nothing = (ctypes.c_long(ZYGOTE["capset"][column]), *(ctypes.c_char_p(part) for part in NO_CAPABILITIES))

    def drop() -> None:
        if call(*nothing):
            raise OSError(ctypes.get_errno(), "capset")

    return fork, drop


def fill_pools() -> list[object]:
    """Fill the gaps between small objects, so that a fork places its own next to each other on new pages.

    Else each of its objects takes the place of a freed one, on a page that must be copied. Keep the returned list. Two
    adjacent blocks at the start of a pool mean that a new pool was begun.
    """
    objects: list[object] = []
    makers: dict[int, Callable[[], object]] = {16: object, 32: lambda: complex(1, 2)}
    for size in range(16, 513, 16):
        make = makers.get(size, lambda size=size: bytes(size - 33))
        last = 0
        for _ in range(4 * POOL // size):
            before, last = last, id(one := make())
            objects.append(one)
            if last - before == size and before % POOL < size + 48:
                break
    return objects


def trim_heap() -> None:
    """Return free pages of libc's heap, if it can: a fork copies the table of all pages."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
