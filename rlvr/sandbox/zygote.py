"""The program of a sandbox process: isolate itself, warm up, prove the isolation, then fork once per job.

    python -s -P -S -B zygote.py CONTROL_DESCRIPTOR PARENT_PID

Standard library only. The first frame on the control socket says what to be (`tier`, `role`, limits); the reply is
`{"ready": true}` or `{"refused": why}`. From then on a frame is a job with one descriptor attached: its end of the
stream on which the solver (runs answers, a fork each) and the checker (holds the tests) of one verification talk to
each other. A frame to us is four bytes of length, eight of seconds that are left (a double), one that says whether the
answer has to end by itself, and `marshal` data, which a fork reads with a quarter of the page faults that JSON costs;
ours are four bytes of length and JSON, since whoever reads them trusts nothing that comes out of here. What runs inside
is `rlvr.sandbox.solver` and `rlvr.sandbox.checker`.

Nearly all that a fork costs is pages: those that the zygote has (their tables are copied) and those that either side
writes to afterwards (each is copied, 3 us). So a zygote imports one role's modules, answers' usual imports and no more.

The process that our own process starts stays outside as a keeper: it ends as soon as our process does, however that
came about, and takes everything inside with it. `python -m pytest tests/test_sandbox_isolation.py` exercises it.
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
from typing import Any

if __name__ == "__main__":  # the files beside this one, without what `import rlvr` brings along
    for _name, _path in (("rlvr", []), ("rlvr.sandbox", [os.path.dirname(os.path.abspath(__file__))])):
        _package = types.ModuleType(_name)
        _package.__path__ = _path
        sys.modules[_name] = _package

from rlvr.sandbox import forks, landlock, libraries, mounts, probe, seccomp

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/urandom")
HEAD = struct.Struct("!Id?")
OUT_OF_MEMORY = 77  # exit status
PR_SET_CHILD_SUBREAPER = 36
# What answers import most, beside what the solver itself does: a fork would take 1 ms and more to import each.
USUAL = ("bisect", "cmath", "copy", "heapq", "math", "re", "string")
RESULT_CAP = 4 << 20  # bytes that a forked checker may report
Job = tuple[float, bytes, int | None, bool]


class Zygote:
    """One role under one tier; `serve` never returns."""

    def __init__(self, control: socket.socket, config: dict[str, Any], second: bool) -> None:
        self.control, self.config, self.second = control, config, second
        self.spaces = config["tier"] == "namespaces"
        self.role: str = config["role"]
        self.scratch_free = 0
        self.filter: tuple[object, int] | None = None
        self.fork: forks.Fork = forks.plain
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
            landlock.enter(readable, [device for device in DEVICES if os.path.exists(device)])
        self.limit()
        if tier == "unsafe":
            self.module.warm()
            return
        mounts.drop_privileges(self.second, self.spaces)
        mounts.hide_memory()
        if self.spaces:
            process_control(seccomp.PR_SET_PDEATHSIG, 9)  # the kernel forgets it on a change of ids
            self.fork, self.drop = forks.with_capability()
        else:
            self.filter = seccomp.answer_program()
        seccomp.confine(own_files=self.spaces)
        self.module.warm()

    def limit(self) -> None:
        """Limits that hold for this process and, but for processor time, for each fork alike."""
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
        for kind, wanted in bounds.items():
            hard = resource.getrlimit(kind)[1]
            bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (bound, bound))

    def serve(self) -> None:
        gc.collect()
        self.kept = forks.fill_pools()
        forks.trim()
        gc.freeze()
        gc.disable()
        job = receive(self.control)
        run = self.solve if self.role == "solver" else self.check
        while job is not None:
            run(job)
            if job[2] is not None:
                os.close(job[2])
            job = receive(self.control)

    def solve(self, job: Job) -> None:
        """Run an answer in a fork until it ends, time is out, or (if it need not end) the checker has hung up."""
        seconds, body, channel, ending = job
        assert channel is not None, "an answer without anybody to talk to"
        if not ending:
            self.poller.register(channel, select.POLLRDHUP)
        child, ended = self.fork()  # as long as the fork lives, all that is written to here is copied
        if child == 0:
            self.answer(seconds, lambda: self.module.main(marshal.loads(body), channel))
        self.poller.register(ended, select.POLLIN)
        ready = [descriptor for descriptor, _ in self.poller.poll(max(0.0, seconds) * 1000)]
        code = self.end(child, ended)
        self.poller.unregister(ended)
        if not ending:
            self.poller.unregister(channel)
        if ended in ready:
            status = "exited" if code >= 0 else "signal"
        else:
            status, code = "closed" if ready else "timeout", 0
        reply(self.control, b'{"status": "%s", "code": %d}' % (status.encode(), abs(code)))

    def check(self, job: Job) -> None:
        """Judge in this process where the plan allows it, else in a fork whose report comes through a pipe."""
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
            self.answer(seconds, lambda: write_all(write, json.dumps(self.module.judge(content, channel)).encode()))
        os.close(write)
        got = bytearray()
        poller = select.poll()
        poller.register(read, select.POLLIN)
        poller.register(self.control, select.POLLRDHUP)
        deadline = time.monotonic() + seconds
        while len(got) <= RESULT_CAP:
            events = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events or any(descriptor != read for descriptor, _ in events):
                break
            chunk = os.read(read, 1 << 16)
            if not chunk:
                break
            got += chunk
        late = time.monotonic() >= deadline
        os.close(read)
        code = self.end(child, ended)
        try:
            return json.loads(got)
        except ValueError:
            return {"failed": "timeout" if late else "died", "detail": f"exit status {code}"}

    def answer(self, seconds: float, run: Any) -> None:
        """In a fresh fork that has so much time left: the last privileges go, then `run`. Never returns."""
        code = 1
        try:
            os.close(self.descriptor)
            null = os.open("/dev/null", os.O_RDWR)  # a lock or a flag on what we share would outlive the fork
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            os.close(null)
            cpu = int(max(0.0, seconds)) + 2 if self.cpu is None else self.cpu
            resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
            if self.drop is not None:
                self.drop()
            elif self.filter is not None:
                process_control(seccomp.PR_SET_PDEATHSIG, 9)  # with the zygote: it has one thread, so with its process
                seccomp.confine_answer(self.filter)
            gc.freeze()  # what the zygote has made since: a collection would copy all its pages
            gc.enable()
            run()
            code = 0
        except MemoryError:
            code = OUT_OF_MEMORY
        finally:
            os._exit(code)

    def end(self, child: int, ended: int) -> int:
        """Kill and reap a fork, and remove what it wrote; its exit status, or less than 0 for a signal.

        It cannot have left a process behind: the filter lets it start none.
        """
        signal.pidfd_send_signal(ended, 9)
        os.close(ended)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if self.spaces:
            if not self.second:
                os.chmod("/tmp", mounts.SCRATCH_MODE)  # an answer has our id: it may have locked everybody out
            if os.statvfs("/tmp").f_ffree != self.scratch_free:
                mounts.wipe("/tmp")
        return code

    def prove(self) -> list[str]:
        """What a fork could do that it must not be able to, by trying."""
        read, write = os.pipe()
        child, ended = self.fork()
        if child == 0:
            os.close(read)
            outside = self.config["supervisor"]
            seconds, tier = 10.0, self.config["tier"]
            self.answer(seconds, lambda: write_all(write, json.dumps(probe.escapes(tier, outside)).encode()))
        os.close(write)
        try:
            got = b""
            while chunk := os.read(read, 1 << 16):
                got += chunk
        finally:
            os.close(read)
        code = self.end(child, ended)
        if self.spaces and (os.stat("/tmp").st_mode & 0o7777 != mounts.SCRATCH_MODE or os.listdir("/tmp")):
            return ["could spoil the scratch folder of those to come"]
        return json.loads(got) if got else [f"the self-test ended with exit status {code}"]


def process_control(option: int, value: int) -> None:
    if seccomp.libc.prctl(option, int(value), 0, 0, 0):
        raise OSError(f"prctl({option}, {value}) is refused")


def write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def reply(control: socket.socket, message: dict[str, Any] | bytes) -> None:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    control.sendall(len(body).to_bytes(4, "big") + body)


def receive(control: socket.socket) -> Job | None:
    """The next job, None where our process has gone. A frame is never read beyond its end."""
    data, ancillary, _, _ = control.recvmsg(HEAD.size, socket.CMSG_SPACE(4))
    channel = None
    for _, _, sent in ancillary:
        channel = struct.unpack("i", sent[:4])[0]
    while len(data) < HEAD.size:
        more = control.recv(HEAD.size - len(data)) if data else b""
        if not more:
            return None
        data += more
    size, seconds, ending = HEAD.unpack(data)
    body = bytearray()
    while len(body) < size:
        more = control.recv(min(size - len(body), 1 << 20))
        if not more:
            return None
        body += more
    return seconds, bytes(body), channel, ending


def keep(inside: int, supervisor: int) -> None:
    """Outside: end as soon as our process or the one inside ends, or on a SIGTERM, and take all the others along."""

    def end(*_: object) -> None:
        os.kill(inside, signal.SIGKILL)
        try:
            while True:
                os.wait()  # what the zygote had forked comes to us
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
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # what has a handler reaches pid 1 from within: Python sets this one
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
        keep(inside, supervisor)
    os.close(supervisor)
    process_control(seccomp.PR_SET_PDEATHSIG, signal.SIGKILL)
    zygote = Zygote(control, config, second)
    try:
        zygote.isolate(readable, hidden)
        escapes = [] if config["tier"] == "unsafe" else zygote.prove()
    except OSError as error:
        reply(control, {"refused": f"{type(error).__name__}: {error}"})
        return
    except Exception as error:  # not the system's doing: a mistake in what runs here
        reply(control, {"broken": f"{type(error).__name__}: {error}"})
        return
    if escapes:
        reply(control, {"refused": "self-test: " + "; ".join(escapes)})
        return
    reply(control, {"ready": True})
    zygote.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
