"""The processes of this machine, read from /proc; none where there is no /proc."""

from __future__ import annotations

import ctypes
import glob
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Process:
    name: str  # at most 15 characters
    state: str  # one letter; Z and X are dead
    parent: int
    resident_pages: int  # shared pages included


def read_processes() -> dict[int, Process]:
    """Every process by its id."""
    processes: dict[int, Process] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            name, _, rest = Path(path).read_text(errors="replace").partition("(")[2].rpartition(")")
        except OSError:  # it has ended
            continue
        fields = rest.split()
        processes[int(path.split("/")[2])] = Process(name, fields[0], int(fields[1]), int(fields[21]))
    return processes


def read_descendants() -> dict[int, Process]:
    """This process and all its living descendants, by process id."""
    alive = {pid: process for pid, process in read_processes().items() if process.state not in "ZX"}
    ours = {os.getpid()}
    while more := {pid for pid, process in alive.items() if process.parent in ours} - ours:
        ours |= more
    return {pid: alive[pid] for pid in ours if pid in alive}


@contextmanager
def without_main() -> Iterator[None]:
    """Processes that the block spawns do not import this program's main module: a script would begin again in each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end_with_parent(parent: int) -> None:
    """In a worker process: leave Ctrl-C to the parent, and die when it dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before that took effect
        os._exit(1)
