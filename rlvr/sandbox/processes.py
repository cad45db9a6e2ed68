"""The supervisor's side of the sandbox processes: starts them, sends jobs, reads reports, replaces the dead.

A `Pair` is one worker: the zygote that runs answers and the zygote that holds the tests. `Pair.run` is one
verification, in the calling thread; the answer's values pass between the two and never come here.
"""

from __future__ import annotations

import array
import json
import marshal
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from rlvr.sandbox.protocol import JOB_HEAD, FrameTooLarge, take_frame
from rlvr.sandbox.verdict import Limits

START_SECONDS = 30.0  # a machine may be very busy; 0.1 s is usual
CHECKER_SECONDS = 0.2  # what the checker has beyond the answer's time, to judge what came
LATE_SECONDS = 0.3  # after that a zygote counts as stuck
REPORT_CAP = 8 << 20  # bytes; a report holds a verdict and at most 200 characters for each test
RENEW_JOBS, RENEW_BYTES = 20_000, 64 << 20  # verifications, and bytes of their tests, until a worker is restarted


class ZygoteStartError(Exception):
    """A zygote could not be started, or not isolated; the message says why."""


class ZygoteLost(Exception):
    """A zygote has died or is stuck, and was stopped. `cause` is `died`, `late` or `interrupted`."""

    def __init__(self, role: str, cause: str) -> None:
        super().__init__(role, cause)
        self.role, self.cause = role, cause


class Reports(NamedTuple):
    """What the two processes report; `solver` is `{}` if it was not needed."""

    checker: dict[str, Any]
    solver: dict[str, Any]


class ZygoteProcess:
    """One sandbox process, seen from outside: `role` is `solver` or `checker`."""

    def __init__(self, tier: str, role: str, limits: Limits) -> None:
        self.role = role
        self.received = bytearray()
        self.pending = 0  # reports still to come of past jobs, which are dropped
        config = {
            "tier": tier, "role": role, "supervisor": os.getpid(), "memory": limits.memory,
            "cpu": None if limits.cpu_s is None else max(1, int(limits.cpu_s + 1)),
            "scratch": limits.scratch, "files": limits.files, "threads": limits.threads,
        }  # fmt: skip
        if not sys.executable:
            raise ZygoteStartError("Python does not know where its own program is (sys.executable is empty)")
        self.control, theirs = socket.socketpair()
        program = str(Path(__file__).with_name("zygote.py"))
        flags = ("-s", "-P", "-S", "-B", "-W", "ignore")  # `-I`, but for the seed of hashes
        # A solver's hash seed is fixed, so an answer sees sets in the same order each time. The checker's is random.
        environment = {"PYTHONHASHSEED": "0"} if role == "solver" else {}
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, *flags, program, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()], env=environment, cwd="/", start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self.control.close()
                raise ZygoteStartError(f"{sys.executable} could not be started: {error}") from error
        try:
            self.send(marshal.dumps(config), 0.0, None)
            ready = self.wait(time.monotonic() + START_SECONDS)
        except BaseException as error:
            self.stop()
            if isinstance(error, ZygoteLost):
                problem = "ended at once" if error.cause == "died" else f"was not ready in {START_SECONDS:g} s"
                raise ZygoteStartError(f"the {role} process {problem}") from error
            raise
        if "ready" not in ready:
            self.stop()
            if "broken" in ready:
                raise RuntimeError(f"the sandbox's {role} process is broken: {ready['broken']}")
            raise ZygoteStartError(str(ready["refused"]))

    def send(self, body: bytes, seconds: float, channel: int | None, *, must_end: bool = False) -> None:
        """Send a job with a copy of `channel`. `must_end`: the answer has to end by itself, hung up or not."""
        data = memoryview(JOB_HEAD.pack(len(body), seconds, must_end) + body)
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [channel]))] if channel is not None else []
        try:
            sent = self.control.sendmsg([data], attached)
            if sent < len(data):
                self.control.settimeout(START_SECONDS)
                self.control.sendall(data[sent:])
                self.control.settimeout(None)
        except OSError as error:
            raise ZygoteLost(self.role, "died") from error

    def read(self) -> dict[str, Any] | None:
        """Read once the control socket is readable; returns the current job's report or None."""
        try:
            chunk = self.control.recv(1 << 16)
        except OSError as error:
            raise ZygoteLost(self.role, "died") from error
        if not chunk:
            raise ZygoteLost(self.role, "died")
        self.received += chunk
        try:
            while (body := take_frame(self.received, REPORT_CAP)) is not None:
                if not self.pending:
                    return json.loads(body)
                self.pending -= 1
        except FrameTooLarge:
            raise ZygoteLost(self.role, "died") from None
        return None

    def wait(self, deadline: float) -> dict[str, Any]:
        while True:
            poller = select.poll()
            poller.register(self.control, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise ZygoteLost(self.role, "late")
            report = self.read()
            if report is not None:
                return report

    def stop(self) -> None:
        """End the process and its forks, and reap it."""
        self.control.close()
        self.process.terminate()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def forget(self) -> None:
        """In a forked copy of this process: close our end of the socket. The zygote belongs to the original."""
        self.control.close()
        self.process.returncode = 0


class Pair:
    """One sandbox worker: the two processes of a verification (solver, checker), started on demand."""

    def __init__(self, tier: str, limits: Limits) -> None:
        self.tier, self.limits = tier, limits
        self.zygotes: dict[str, ZygoteProcess] = {}
        self.jobs = self.bytes = 0
        self.slow_tests: dict[bytes, bool] = {}  # whether tests take too long without any answer
        self.starting = 0.0  # seconds spent on starting processes
        self.interrupted = False

    def clock(self) -> float:
        """Seconds without those for starting processes: an answer does not pay for what another one broke."""
        return time.monotonic() - self.starting

    def start(self) -> None:
        """Start the processes that are missing; restart them from time to time, which bounds their memory."""
        if self.jobs >= RENEW_JOBS or self.bytes >= RENEW_BYTES:
            self.stop()
            self.jobs = self.bytes = 0
        start = time.monotonic()
        for role in ("solver", "checker"):
            if role not in self.zygotes:
                self.zygotes[role] = ZygoteProcess(self.tier, role, self.limits)
                self.starting += time.monotonic() - start
                start = time.monotonic()

    def run(self, answer: bytes | None, tests: bytes, seconds: float, *, must_end: bool = False) -> Reports:
        """Run one verification; without an answer, the tests alone. Raises `ZygoteLost`.

        The solver's report is not awaited if the checker's decides every test, unless the answer `must_end`.
        """
        if not self.interrupted:
            self.start()
        if self.interrupted:  # it may have been meanwhile
            raise ZygoteLost("solver", "interrupted")
        self.jobs += 1
        self.bytes += len(tests)
        solver, checker = self.zygotes["solver"], self.zygotes["checker"]
        for_answer, for_tests = socket.socketpair()
        whole = seconds if must_end or answer is None else 2 * seconds  # the answer's time and the test's own
        late = time.monotonic() + whole + CHECKER_SECONDS + LATE_SECONDS
        try:
            with for_answer, for_tests:
                if answer is not None:
                    solver.send(answer, whole, for_answer.fileno(), must_end=must_end)
                grace = CHECKER_SECONDS if must_end else 0.0
                checker.send(tests, seconds + grace, for_tests.fileno() if answer is not None else None)
            reports: dict[str, dict[str, Any]] = {} if answer is not None else {"solver": {}}
            poller = select.poll()
            poller.register(checker.control, select.POLLIN)
            poller.register(solver.control, select.POLLIN)
            while len(reports) < 2:
                ready = poller.poll(max(0.0, late - time.monotonic()) * 1000)
                if not ready:
                    raise ZygoteLost("solver" if "checker" in reports else "checker", "late")
                for descriptor, _ in ready:
                    zygote = checker if descriptor == checker.control.fileno() else solver
                    report = zygote.read()
                    if report is not None:
                        reports[zygote.role] = report
                        poller.unregister(descriptor)
                if not must_end and "checker" in reports and "solver" not in reports and is_decided(reports["checker"]):
                    solver.pending += 1
                    reports["solver"] = {}
        except BaseException:  # Ctrl-C too: reports that come later must not reach the next call
            self.stop()
            raise
        if reports["checker"].get("needs_restart"):
            self.bytes = RENEW_BYTES
        return Reports(reports["checker"], reports["solver"])

    def stop(self) -> None:
        for zygote in tuple(self.zygotes.values()):
            zygote.stop()
        self.zygotes.clear()

    def interrupt(self) -> None:
        """End the processes under a waiting thread; `run` raises `ZygoteLost` until `interrupted` is reset."""
        self.interrupted = True
        for zygote in tuple(self.zygotes.values()):
            zygote.process.terminate()

    def forget(self) -> None:
        for zygote in self.zygotes.values():
            zygote.forget()
        self.zygotes.clear()

    @property
    def pids(self) -> list[int]:
        return [zygote.process.pid for zygote in self.zygotes.values()]


def is_decided(report: dict[str, Any]) -> bool:
    """Whether a checker's report decides every test without the solver's."""
    return "tests" in report and all(row[1] != "lost" for row in report["tests"])
