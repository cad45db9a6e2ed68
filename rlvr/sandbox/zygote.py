"""The program of a sandbox process: isolate itself, warm up, prove the isolation, then fork once per job.

    python -s -P -S -B zygote.py CONTROL_DESCRIPTOR PARENT_PID

The first frame on the control socket holds the config (`tier`, `role`, limits); the reply is `{"ready": true}` or
`{"refused": why}`. Each further frame is a job with one descriptor attached: this process's end of the stream on which
the solver (runs answers, a fork each) and the checker (holds the tests) of one verification talk to each other. A job
is a `JOB_HEAD` (`rlvr.sandbox.protocol`) and `marshal` data, which costs a fork a quarter of the page faults of JSON.
Replies are frames of JSON, because their reader must not trust this process. Inside runs `rlvr.sandbox.solver` or
`rlvr.sandbox.checker`. Standard library only.

Nearly all of a fork's cost is pages: the zygote's (their tables are copied) and those that either side writes to
afterwards (each is copied, 3 us). So a zygote imports one role's modules, the usual imports of answers and no more.

The process that the supervisor starts stays outside as a keeper: it ends as soon as the supervisor does, for whatever
reason, and ends everything inside with it.
"""

from __future__ import annotations

import _socket as socket  # without the enumerations of `socket`, which cost every fork
import gc
import importlib
import json
import marshal
import os
import resource
import select
import signal
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

if __name__ == "__main__":  # import the files next to this one without the imports of `rlvr`
    for _name, _path in (("rlvr", []), ("rlvr.sandbox", [os.path.dirname(os.path.abspath(__file__))])):
        _package = types.ModuleType(_name)
        _package.__path__ = _path
        sys.modules[_name] = _package

from rlvr.sandbox import forks, landlock, libraries, mounts, seccomp, tier_probe
from rlvr.sandbox.protocol import JOB_HEAD, OUT_OF_MEMORY, frame, write_all

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom")
PR_SET_CHILD_SUBREAPER = 36
# The most usual imports of answers beside the solver's own: importing one takes a fork 1 ms or more.
USUAL = ("bisect", "cmath", "copy", "heapq", "math", "re", "string")
RESULT_CAP = 4 << 20  # bytes that a forked checker may report


class ZygoteJob(NamedTuple):
    """A job for the zygote. `channel`: a descriptor to the other process. `must_end`: the answer has to end by itself,
    hung up or not."""

    seconds: float
    body: bytearray
    channel: int | None
    must_end: bool


class Zygote:
    """A sandbox process that is ready to fork: a solver or a checker, isolated by one tier. `serve` never returns."""

    def __init__(self, control: socket.socket, config: dict[str, Any], second: bool) -> None:
        self.control, self.config, self.second = control, config, second
        self.spaces = config["tier"] == "namespaces"
        self.user: int | None = mounts.SECOND if second else None  # that this process takes, if any
        self.hides_host = self.spaces
        self.role: str = config["role"]
        self.scratch_free = 0
        self.filter: tuple[object, int] | None = None
        self.fork: forks.Fork = forks.plain_fork
        self.drop: Callable[[], None] | None = None
        self.cpu: int | None = config["cpu"]
        self.poller = select.poll()
        self.poller.register(control, select.POLLRDHUP)
        self.descriptor = control.fileno()

    def isolate(self, readable: list[str], hidden: list[str]) -> None:
        config = self.config
        self.module: Any = importlib.import_module("rlvr.sandbox." + self.role)
        if self.role == "solver":
            for name in USUAL:
                importlib.import_module(name)
        tier = config["tier"]
        if tier == "namespaces":
            mounts.new_root(readable, hidden, list(DEVICES), config["scratch"], config["files"])
            self.scratch_free = os.statvfs("/tmp").f_ffree
        elif tier == "landlock":
            self.hides_host = mounts.hide_host_name()
            self.user = mounts.NOBODY_UID if mounts.can_change_user(readable) else None
            landlock.enter(readable, [device for device in DEVICES if os.path.exists(device)])
        self.limit()
        if tier == "unsafe":
            self.module.warm()
            return
        mounts.drop_privileges(self.user, self.spaces)
        mounts.hide_memory()
        process_control(seccomp.PR_SET_PDEATHSIG, 9)  # the kernel forgets it on a change of ids
        if self.spaces:
            self.fork, self.drop = forks.capability_fork()
        else:
            self.filter = seccomp.answer_program()
        seccomp.confine(own_files=self.spaces)
        self.module.warm()

    def limit(self) -> None:
        """Set the limits of this process, which (except processor time) hold for each fork too."""
        config = self.config
        bounds = {
            resource.RLIMIT_AS: config["memory"],
            resource.RLIMIT_FSIZE: config["scratch"],
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
        }
        # Counted per user: inside a user namespace these are ours, from Linux 5.14 on.
        if self.spaces and tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2]) >= (5, 14):
            bounds[resource.RLIMIT_NPROC] = config["threads"] + 2
        for kind, value in bounds.items():
            hard = resource.getrlimit(kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))

    def serve(self) -> None:
        gc.collect()
        self.filler = forks.fill_pools()
        forks.trim_heap()
        gc.freeze()
        gc.disable()
        job = receive(self.control)
        run = self.solve if self.role == "solver" else self.check
        while job is not None:
            run(job)
            if job.channel is not None:
                os.close(job.channel)
            job = receive(self.control)

    def solve(self, job: ZygoteJob) -> None:
        """Run an answer in a fork until it ends, time is up, or the checker hangs up (unless the answer must end)."""
        seconds, body, channel, must_end = job
        assert channel is not None, "an answer needs a channel to its checker"
        if not must_end:
            self.poller.register(channel, select.POLLRDHUP)
        child, ended = self.fork()  # while the fork lives, every page written to here is copied
        if child == 0:
            self.answer(seconds, lambda: self.module.main(marshal.loads(body), channel))
        self.poller.register(ended, select.POLLIN)
        ready = [descriptor for descriptor, _ in self.poller.poll(max(0.0, seconds) * 1000)]
        code = self.end(child, ended)
        body[:] = bytes(len(body))  # later answers could read this one in the memory that their forks share
        self.poller.unregister(ended)
        if not must_end:
            self.poller.unregister(channel)
        if ended in ready:
            status = "exited" if code >= 0 else "signal"
        else:
            status, code = "closed" if ready else "timeout", 0
        reply(self.control, b'{"status": "%s", "code": %d}' % (status.encode(), abs(code)))

    def check(self, job: ZygoteJob) -> None:
        """Judge in this process if the plan allows it, else in a fork whose report comes through a pipe."""
        seconds, body, channel, _ = job
        try:
            content = marshal.loads(body)
            content["seconds"] = seconds
            result = None if self.module.needs_fork(content) else self.module.judge(content, channel)
        except BaseException as error:
            result = {"failed": "raised", "detail": f"{type(error).__name__}: {error}"[:200]}
            content = {}
        if result is None:
            result = self.check_in_fork(content, seconds, channel)
        reply(self.control, result)

    def check_in_fork(self, content: dict[str, Any], seconds: float, channel: int | None) -> dict[str, Any]:
        read, write = os.pipe()
        child, ended = self.fork()
        if child == 0:
            os.close(read)
            self.answer(2 * seconds, lambda: write_all(write, json.dumps(self.module.judge(content, channel)).encode()))
        os.close(write)
        report = bytearray()
        poller = select.poll()
        poller.register(read, select.POLLIN)
        poller.register(self.control, select.POLLRDHUP)
        deadline = time.monotonic() + (seconds if channel is None else 2 * seconds)  # the answer's time, the test's own
        while len(report) <= RESULT_CAP:
            events = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events or any(descriptor != read for descriptor, _ in events):
                break
            chunk = os.read(read, 1 << 16)
            if not chunk:
                break
            report += chunk
        late = time.monotonic() >= deadline
        os.close(read)
        code = self.end(child, ended)
        try:
            return json.loads(report)
        except ValueError:
            return {"failed": "timeout" if late else "died", "detail": f"exit status {code}"}

    def answer(self, seconds: float, run: Any) -> None:
        """In a new fork with `seconds` left: drop the last privileges, then `run`. Never returns."""
        code = 1
        try:
            os.close(self.descriptor)
            null = os.open("/dev/null", os.O_RDWR)  # a lock or a flag on a shared descriptor would outlive the fork
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            os.close(null)
            cpu = int(max(0.0, seconds)) + 2 if self.cpu is None else self.cpu
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
            if self.drop is not None:
                self.drop()
            elif self.filter is not None:
                process_control(seccomp.PR_SET_PDEATHSIG, 9)  # end with the zygote, which has one thread
                seccomp.confine_answer(self.filter)
            gc.freeze()  # a collection would copy all pages of the zygote
            gc.enable()
            run()
            code = 0
        except MemoryError:
            code = OUT_OF_MEMORY
        finally:
            os._exit(code)

    def end(self, child: int, ended: int) -> int:
        """Kill and reap a fork and remove its files; returns its exit status, less than 0 for a signal.

        It cannot leave a process behind, because the filter lets it start none.
        """
        signal.pidfd_send_signal(ended, 9)
        os.close(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if self.spaces:
            if not self.second:
                os.chmod("/tmp", mounts.SCRATCH_MODE)  # an answer with the zygote's id may have changed it
            if os.statvfs("/tmp").f_ffree != self.scratch_free:
                mounts.wipe("/tmp")
        return code

    def prove(self) -> list[str]:
        """Try in a fork what must be impossible; returns what was possible."""
        read, write = os.pipe()
        child, ended = self.fork()
        if child == 0:
            os.close(read)
            outside = self.config["supervisor"]
            shown = (self.user, self.hides_host)
            probe = lambda: tier_probe.escapes(self.config["tier"], outside, *shown)  # noqa: E731
            self.answer(10.0, lambda: write_all(write, json.dumps(probe()).encode()))
        os.close(write)
        try:
            report = b""
            while chunk := os.read(read, 1 << 16):
                report += chunk
        finally:
            os.close(read)
        code = self.end(child, ended)
        if self.spaces and (os.stat("/tmp").st_mode & 0o7777 != mounts.SCRATCH_MODE or os.listdir("/tmp")):
            return ["could spoil the scratch folder of later answers"]
        return json.loads(report) if report else [f"the self-test ended with exit status {code}"]


def process_control(option: int, value: int) -> None:
    if seccomp.libc.prctl(option, int(value), 0, 0, 0):
        raise OSError(f"prctl({option}, {value}) is refused")


def reply(control: socket.socket, message: dict[str, Any] | bytes) -> None:
    control.sendall(frame(message if isinstance(message, bytes) else json.dumps(message).encode()))


def receive(control: socket.socket) -> ZygoteJob | None:
    """The next job; None if the supervisor has gone. Never reads beyond the end of a frame."""
    data, ancillary, _, _ = control.recvmsg(JOB_HEAD.size, socket.CMSG_SPACE(4))
    channel = None
    for _, _, sent in ancillary:
        channel = struct.unpack("i", sent[:4])[0]
    while len(data) < JOB_HEAD.size:
        more = control.recv(JOB_HEAD.size - len(data)) if data else b""
        if not more:
            return None
        data += more
    size, seconds, must_end = JOB_HEAD.unpack(data)
    body = bytearray(size)  # the only copy, see `Zygote.solve`
    left = memoryview(body)
    while left:
        count = control.recv_into(left)
        if not count:
            return None
        left = left[count:]
    return ZygoteJob(seconds, body, channel, must_end)


def keep_alive(inside: int, supervisor: int) -> None:
    """The keeper: when the supervisor or the process inside ends, or on SIGTERM, end everything."""

    def end(*_: object) -> None:
        os.kill(inside, signal.SIGKILL)
        try:
            while True:
                os.wait()  # the zygote's forks are reparented to this process
        except ChildProcessError:
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    poller = select.poll()
    poller.register(supervisor, select.POLLIN)
    poller.register(os.pidfd_open(inside), select.POLLIN)
    poller.poll()
    end()


def main(descriptor: str, parent: str) -> None:
    os.environ.clear()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a signal with a handler can reach pid 1 from within
    control = socket.socket(fileno=int(descriptor))
    supervisor = os.pidfd_open(int(parent))
    if os.getppid() != int(parent):
        return  # gone already
    job = receive(control)
    if job is None:
        return
    config = marshal.loads(job[1])
    try:
        readable, hidden = libraries.needed_files()
        second = mounts.unshare() if config["tier"] == "namespaces" else False
        process_control(PR_SET_CHILD_SUBREAPER, 1)
        inside = os.fork()
    except OSError as error:
        reply(control, {"refused": f"{error.strerror or error}"})
        return
    if inside:
        control.close()
        keep_alive(inside, supervisor)
    os.close(supervisor)
    process_control(seccomp.PR_SET_PDEATHSIG, signal.SIGKILL)
    zygote = Zygote(control, config, second)
    try:
        zygote.isolate(readable, hidden)
        escapes = [] if config["tier"] == "unsafe" else zygote.prove()
    except OSError as error:
        reply(control, {"refused": f"{type(error).__name__}: {error}"})
        return
    except Exception as error:  # an error of this program, not of the system
        reply(control, {"broken": f"{type(error).__name__}: {error}"})
        return
    if escapes:
        reply(control, {"refused": "self-test: " + "; ".join(escapes)})
        return
    reply(control, {"ready": True})
    zygote.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
