"""How a zygote forks: without what libc and Python do around a fork, and in a way that only a zygote can.

Nothing of what Python runs after a fork matters in a process with one thread, and it costs 150 page faults. It would
seed `random` anew, too: a zygote must not import that, so that each answer does, and draws its own numbers.
Standard library only. `python -m pytest tests/test_sandbox_isolation.py` exercises it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from rlvr.sandbox.mounts import NO_CAPABILITIES
from rlvr.sandbox.seccomp import CLONE, ZYGOTE, ZYGOTE_FORK, architecture

GET_TID_ADDRESS = 40
POOL = 1 << 14  # bytes: what Python's allocator takes for blocks of one size
_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: the fork has it, too
Fork = Callable[[], tuple[int, int]]


def plain() -> tuple[int, int]:
    """(process, descriptor of it), and (0, -1) in the fork."""
    child = _libc.fork()
    if child < 0:
        raise OSError(ctypes.get_errno(), "fork")
    return (child, os.pidfd_open(child)) if child else (0, -1)


def with_capability() -> tuple[Fork, Callable[[], None]]:
    """(the same by `seccomp.ZYGOTE_FORK`, what gives the capability for it up); call it before a filter is loaded.

    Both go by one foreign function: the pages that a fork touches on the way are touched already, or half of them.
    """
    column, _ = architecture()
    descriptor, own_id = ctypes.c_int(-1), ctypes.c_void_p()
    _libc.prctl(GET_TID_ADDRESS, ctypes.byref(own_id), 0, 0, 0)  # where libc keeps the thread's id; 0 if refused
    last = [own_id, ctypes.c_void_p()]  # and thread-local storage, which stays
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
    """Use up the gaps between small objects, so that a fork writes its own side by side on fresh pages.

    Else each of its objects goes to where one was freed, on a page that must be copied for it. What is returned is to
    be kept. Two blocks that follow each other at the start of a pool mean that a new one was begun.
    """
    kept: list[object] = []
    makers: dict[int, Callable[[], object]] = {16: object, 32: lambda: complex(1, 2)}
    for size in range(16, 513, 16):
        make = makers.get(size, lambda size=size: bytes(size - 33))
        last = 0
        for _ in range(4 * POOL // size):
            before, last = last, id(one := make())
            kept.append(one)
            if last - before == size and before % POOL < size + 48:
                break
    return kept


def trim() -> None:
    """Give free pages of libc's heap back: a fork copies the table of all there are. Not every libc can."""
    give_back = getattr(_libc, "malloc_trim", None)
    if give_back is not None:
        give_back(0)
