"""Forks of a guarded worker: each item runs in a sandboxed fork of its own, so it changes nothing for the next.

    forks = ItemForks(readable)                      # once, in the child, after the imports
    forks.run(lambda: score(answer), seconds=2.0)    # -> ForkReport(value=1.0)

`ItemForks` locks the worker and all its forks out of every file but `readable` (Landlock) and out of the network, of
programs and of other processes (seccomp). A fork may start no process, and the kernel ends it when its processor time
or its wall time is over. `missing` names the limits that this system lacks. Standard library only, in a child of
`rlvr.sandbox.worker` with `may_fork`.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

from rlvr.sandbox import landlock, seccomp
from rlvr.sandbox.protocol import OUT_OF_MEMORY, write_all

DEVICES = ("/dev/null", "/dev/urandom")
REPORT = 1 << 16  # bytes that a fork may report
_LATE = {-signal.SIGPROF: "processor time", -signal.SIGXCPU: "processor time", -signal.SIGALRM: "wall time"}


class ForkReport(NamedTuple):
    """What a fork returned, or why it did not: `failure` is "", timeout, memory, died or raised."""

    value: Any = None
    failure: str = ""
    detail: str = ""


class ItemForks:
    """Isolates this process for good, and runs functions in forks of it."""

    def __init__(self, readable: list[str]) -> None:
        self.missing: list[str] = []
        self._filter: tuple[object, int] | None = None
        try:
            landlock.enter(readable, [device for device in DEVICES if os.path.exists(device)])
        except (OSError, AttributeError) as error:
            self.missing.append(f"Landlock ({error})")
        try:
            fork_filter = seccomp.answer_program()
            seccomp.confine(own_files=False)
            self._filter = fork_filter
        except (OSError, AttributeError) as error:
            self.missing.append(f"seccomp ({error})")

    def run(self, work: Callable[[], Any], seconds: float, wall_seconds: float) -> ForkReport:
        """Run `work` in a fork; its result must be JSON. `seconds` are of processor time."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            self._work_in_fork(work, write, seconds, wall_seconds)
        os.close(write)
        report = bytearray()
        while len(report) <= REPORT and (chunk := os.read(read, REPORT)):
            report += chunk
        os.close(read)  # a fork that goes on writing ends
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code in _LATE:
            return ForkReport(None, "timeout", f"no more {_LATE[code]}")
        if code == OUT_OF_MEMORY:
            return ForkReport(None, "memory", "no more memory")
        try:
            message = json.loads(report)
            whole = code == 0 and message.keys() == set(ForkReport._fields)
        except (ValueError, AttributeError):
            whole = False
        return ForkReport(**message) if whole else ForkReport(None, "died", f"exit status {code}")

    def _work_in_fork(self, work: Callable[[], Any], write: int, seconds: float, wall_seconds: float) -> None:
        """Drop what a fork must not have, then work. Never returns."""
        code = 1
        try:
            null = os.open("/dev/null", os.O_RDWR)
            for standard in (0, 1, 2):  # the first two are the worker's own requests and replies
                os.dup2(null, standard)
            for low, high in ((3, write), (write + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])):
                os.closerange(low, high)
            cpu = int(seconds) + 2
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
            signal.setitimer(signal.ITIMER_PROF, seconds)
            signal.setitimer(signal.ITIMER_REAL, wall_seconds)
            if self._filter is not None:
                ctypes.CDLL(None).prctl(seccomp.PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
                seccomp.confine_answer(self._filter)
            try:
                report = ForkReport(work())
            except MemoryError:
                raise
            except BaseException as error:
                report = ForkReport(None, "raised", f"{type(error).__name__}: {error}"[:300])
            write_all(write, json.dumps(report._asdict()).encode())
            code = 0
        except MemoryError:
            code = OUT_OF_MEMORY
        finally:
            os._exit(code)
