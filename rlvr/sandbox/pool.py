"""Our side of the sandbox processes: start them, hand them jobs, take their reports, replace what has died.

A `Pair` is one worker: the zygote that runs answers and the zygote that holds the tests. `Pair.run` is one
verification's exchange, in the thread that calls it; the answer's values pass between the two and never come here.
`python -m pytest tests/test_sandbox_pool.py` exercises it.
"""

from __future__ import annotations

import array
import json
import marshal
import os
import select
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlvr.sandbox.verdict import Limits

START_SECONDS = 30.0  # a machine may be very busy; 0.1 s is usual
CHECKER_SECONDS = 0.2  # what the checker has beyond the answer's time, to judge what did come
LATE_SECONDS = 0.3  # beyond that a zygote is taken for stuck
REPORT_CAP = 8 << 20  # bytes; a report holds a verdict and at most 200 characters for each test
RENEW_JOBS, RENEW_BYTES = 20_000, 64 << 20  # verifications, and bytes of their tests, until a worker is started anew
HEAD = struct.Struct("!Id?")


class Refused(Exception):
    """A zygote could not be started, or not isolated; the message says why."""


class Lost(Exception):
    """A zygote has died or is stuck, and was stopped. `args[0]` is its role, `args[1]` `died` or `late`."""


class Zygote:
    """One sandbox process of ours: `role` is `solver` or `checker`."""

    def __init__(self, tier: str, role: str, limits: Limits) -> None:
        self.role = role
        self.got = bytearray()
        self.owed = 0  # reports of past jobs that nobody waited for
        config = {
            "tier": tier, "role": role, "supervisor": os.getpid(), "memory": limits.memory,
            "cpu": None if limits.cpu_s is None else max(1, int(limits.cpu_s + 1)),
            "scratch": limits.scratch, "files": limits.files, "threads": limits.threads,
        }  # fmt: skip
        if not sys.executable:
            raise Refused("Python does not know where its own program is (sys.executable is empty)")
        self.control, theirs = socket.socketpair()
        program = str(Path(__file__).with_name("zygote.py"))
        flags = ("-s", "-P", "-S", "-B", "-W", "ignore")  # `-I`, but for the seed of hashes
        # An answer sees the same order of a set each time; what it returns meets hashes that it cannot foresee.
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
                raise Refused(f"{sys.executable} could not be started: {error}") from error
        try:
            self.send(marshal.dumps(config), 0.0, None)
            ready = self.wait(time.monotonic() + START_SECONDS)
        except BaseException as error:
            self.stop()
            if isinstance(error, Lost):
                said = "ended without a word" if error.args[1] == "died" else f"was not ready in {START_SECONDS:g} s"
                raise Refused(f"the {role} process {said}") from error
            raise
        if "ready" not in ready:
            self.stop()
            if "broken" in ready:
                raise RuntimeError(f"the sandbox's {role} process is broken: {ready['broken']}")
            raise Refused(str(ready["refused"]))

    def send(self, body: bytes, seconds: float, channel: int | None, *, ending: bool = False) -> None:
        """A job; `channel` is copied to the other process. `ending`: what runs has to end by itself, hung up or not."""
        data = memoryview(HEAD.pack(len(body), seconds, ending) + body)
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [channel]))] if channel is not None else []
        try:
            sent = self.control.sendmsg([data], attached)
            if sent < len(data):
                self.control.settimeout(START_SECONDS)
                self.control.sendall(data[sent:])
                self.control.settimeout(None)
        except OSError as error:
            raise Lost(self.role, "died") from error

    def read(self) -> dict[str, Any] | None:
        """Once the control socket is readable: the report of the job at hand, None where it is not there yet."""
        try:
            chunk = self.control.recv(1 << 16)
        except OSError as error:
            raise Lost(self.role, "died") from error
        if not chunk:
            raise Lost(self.role, "died")
        self.got += chunk
        while len(self.got) >= 4:
            size = int.from_bytes(self.got[:4], "big")
            if size > REPORT_CAP:
                raise Lost(self.role, "died")
            if len(self.got) < 4 + size:
                return None
            body = bytes(self.got[4 : 4 + size])
            del self.got[: 4 + size]
            if not self.owed:
                return json.loads(body)
            self.owed -= 1
        return None

    def wait(self, deadline: float) -> dict[str, Any]:
        while True:
            poller = select.poll()
            poller.register(self.control, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise Lost(self.role, "late")
            report = self.read()
            if report is not None:
                return report

    def stop(self) -> None:
        """End it and all that it has forked, and reap it."""
        self.control.close()
        self.process.terminate()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def forget(self) -> None:
        """In a forked copy of our process: it belongs to the original, only our end of its socket is closed."""
        self.control.close()
        self.process.returncode = 0


class Pair:
    """One worker: a solver and a checker, started when they are needed."""

    def __init__(self, tier: str, limits: Limits) -> None:
        self.tier, self.limits = tier, limits
        self.zygotes: dict[str, Zygote] = {}
        self.jobs = self.bytes = 0
        self.starting = 0.0  # seconds spent on starting processes
        self.interrupted = False

    def clock(self) -> float:
        """Seconds, but for those in which its processes are started: no answer pays for what another has broken."""
        return time.monotonic() - self.starting

    def start(self) -> None:
        """Have both. From time to time they are started anew: whatever may gather in them, memory stays bounded."""
        if self.jobs >= RENEW_JOBS or self.bytes >= RENEW_BYTES:
            self.stop()
            self.jobs = self.bytes = 0
        begun = time.monotonic()
        for role in ("solver", "checker"):
            if role not in self.zygotes:
                self.zygotes[role] = Zygote(self.tier, role, self.limits)
                self.starting += time.monotonic() - begun
                begun = time.monotonic()

    def run(
        self, answer: bytes | None, tests: bytes, seconds: float, *, ending: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the checker's report, the solver's): of an answer, or without one of how the tests fare with none.

        The solver's is `{}` where every test is decided, unless `ending` asks how the process ended. Raises `Lost`.
        """
        self.start()
        if self.interrupted:
            raise Lost("solver", "interrupted")
        self.jobs += 1
        self.bytes += len(tests)
        solver, checker = self.zygotes["solver"], self.zygotes["checker"]
        for_answer, for_tests = socket.socketpair()
        late = time.monotonic() + seconds + CHECKER_SECONDS + LATE_SECONDS
        try:
            with for_answer, for_tests:
                if answer is not None:
                    solver.send(answer, seconds, for_answer.fileno(), ending=ending)
                checker.send(tests, seconds + CHECKER_SECONDS, for_tests.fileno() if answer is not None else None)
            reports: dict[str, dict[str, Any]] = {} if answer is not None else {"solver": {}}
            poller = select.poll()
            poller.register(checker.control, select.POLLIN)
            poller.register(solver.control, select.POLLIN)
            while len(reports) < 2:
                ready = poller.poll(max(0.0, late - time.monotonic()) * 1000)
                if not ready:
                    raise Lost("solver" if "checker" in reports else "checker", "late")
                for descriptor, _ in ready:
                    zygote = checker if descriptor == checker.control.fileno() else solver
                    report = zygote.read()
                    if report is not None:
                        reports[zygote.role] = report
                        poller.unregister(descriptor)
                if not ending and "checker" in reports and "solver" not in reports and decided(reports["checker"]):
                    solver.owed += 1
                    reports["solver"] = {}
        except BaseException:  # Ctrl-C, too: reports that nobody waits for must not meet the next call
            self.stop()
            raise
        if reports["checker"].get("worn"):
            self.bytes = RENEW_BYTES
        return reports["checker"], reports["solver"]

    def stop(self) -> None:
        for zygote in tuple(self.zygotes.values()):
            zygote.stop()
        self.zygotes.clear()

    def interrupt(self) -> None:
        """End its processes while another thread waits for them: that call gets `Lost`, as does each until `taken`."""
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


def decided(report: dict[str, Any]) -> bool:
    """Whether a checker's report leaves nothing to ask the solver for."""
    return "tests" in report and all(row[1] != "lost" for row in report["tests"])
