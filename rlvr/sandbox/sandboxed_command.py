"""Runs sandboxed commands: what one can read, write, reach and use up is what it was given, and nothing is left.

    python -I -S sandboxed_command.py DESCRIPTOR PARENT

This process forks for each socket that arrives at the descriptor. The fork, a keeper, reads its config there and starts
pid 1 of new namespaces (user, pid, network, mount, ipc, uts, cgroup). Pid 1 builds a root of read-only binds and one
writable `/tmp`, passes the bytes of one TCP port to the Unix socket of the recorder, starts the command under another
user id where root may map one, and reads its output. When the command ends, pid 1 ends all that came from it, reports,
and the namespaces go with it. They also go when the other end of the socket is closed, or the parent ends.

The report is a line of JSON, the result file, and the end of the output. A config with `writable` begins a session: its
commands come as further messages, see the same folders, and have a report each. Standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import marshal
import math
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

if __name__ == "__main__":  # import the files next to this one without the imports of `rlvr`
    for _name, _path in (("rlvr", []), ("rlvr.sandbox", [os.path.dirname(os.path.abspath(__file__))])):
        _package = types.ModuleType(_name)
        _package.__path__ = _path
        sys.modules[_name] = _package

from rlvr.sandbox import command_filter, mounts, sandbox_root
from rlvr.sandbox.byte_relay import BACKLOG, MAX_RESULT, PORT, Relay

MAX_CONNECTIONS = 128
TASK, PROMPT, RESULT = "/tmp/task.json", "/tmp/prompt.txt", "/tmp/result.json"
PR_SET_PDEATHSIG = 1
CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SYS_PTRACE = 2, 5, 19  # of pid 1, over the command's user: read, end, measure
OVER_COMMAND = 1 << CAP_KILL | 1 << CAP_DAC_READ_SEARCH | 1 << CAP_SYS_PTRACE
CAP_SETGID, CAP_SETUID = 6, 7  # of a session's pid 1: it starts further commands
SOCKET_BYTES = 208 << 10  # that the buffers of one may hold
LOOK_SECONDS = 0.05  # between two sums of the memory of all processes
_libc = ctypes.CDLL(None, use_errno=True)


def listen() -> socket.socket:
    """The relay's port, on a loopback interface that this switches on."""
    listening = socket.socket()
    fcntl.ioctl(listening, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # SIOCSIFFLAGS: up, running
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", PORT))
    listening.listen(BACKLOG)
    return listening


def start(config: dict[str, Any], user: int | None, output: int, failure: int) -> int:
    """Fork the command. What keeps it from beginning goes to the descriptor `failure`."""
    given = os.open(config.get("input", PROMPT), os.O_RDONLY)
    child = os.fork()
    if child:
        os.close(given)
        return child
    try:
        os.setsid()
        for standard, descriptor in ((0, given), (1, output), (2, output)):
            os.dup2(descriptor, standard)
        limits = {
            resource.RLIMIT_DATA: config["memory"], resource.RLIMIT_FSIZE: config["scratch"],
            resource.RLIMIT_NPROC: config["processes"], resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_CORE: 0,
        }  # fmt: skip
        for kind, value in limits.items():
            hard = resource.getrlimit(kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))
        mounts.drop_privileges(user, spaces=False)
        try:
            os.chdir(config.get("folder", "/tmp"))
        except OSError:  # a command before this one has removed or closed it
            os.chdir("/")
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(config["command"][0], config["command"], config["environment"])
    except BaseException as error:
        os.write(failure, f"{type(error).__name__}: {error}".encode()[:2000])
    finally:
        os._exit(127)


def watch(config: dict[str, Any], command: int, output: int, listening: socket.socket | None) -> dict[str, Any]:
    """Pass bytes on until the command ends; how it ended, and the end of its output."""
    poller, said = select.poll(), bytearray()
    wakes, wakened = os.pipe()
    for descriptor in (wakes, wakened, output):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
    relay = Relay(poller, listening, sandbox_root.SOCKET, MAX_CONNECTIONS) if config["socket"] and listening else None
    poller.register(wakes, select.POLLIN)
    poller.register(output, select.POLLIN)
    used, look = "", time.monotonic() + LOOK_SECONDS
    deadline = time.monotonic() + config.get("seconds", math.inf)
    while True:
        for descriptor, _ in poller.poll(LOOK_SECONDS * 1000):
            if descriptor == output:
                if not read_output(output, said):
                    poller.unregister(output)
            elif descriptor == wakes:
                with suppress(BlockingIOError):
                    os.read(wakes, 4096)
            elif relay is not None:
                relay.handle(descriptor)
        code = reap(command)
        if code is None and time.monotonic() > look:
            used = "memory" if holds_more_than(config["memory"]) else ""
            look = time.monotonic() + LOOK_SECONDS
        if code is None and time.monotonic() > deadline:
            used = "time"
        if code is not None or used:
            end_all()
            while read_output(output, said):
                pass
            signal.set_wakeup_fd(-1)
            os.close(wakes)
            os.close(wakened)
            return {"code": code or 0, "used": used, "output": bytes(said[-MAX_RESULT:])}


def read_output(output: int, said: bytearray) -> bool:
    """Take what a pipe holds, and keep its end; False if there is nothing more."""
    try:
        piece = os.read(output, 1 << 16)
    except BlockingIOError:
        return False
    said += piece
    if len(said) > 2 * MAX_RESULT:
        del said[:-MAX_RESULT]
    return bool(piece)


def reap(command: int) -> int | None:
    """Bury every process that has ended; the exit code if the command is among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def end_all() -> None:
    """End every other process of this pid namespace."""
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def holds_more_than(limit: int) -> bool:
    """Whether all processes together have more than `limit` bytes of memory of their own. The quick sum counts a page
    that two share twice; if it is beyond the limit, the exact one decides. Without /proc there is no sum."""
    sockets = count_sockets() * SOCKET_BYTES
    return sockets + sum_memory(_read_resident) > limit and sockets + sum_memory(_read_share) > limit


def count_sockets() -> int:
    """How many sockets the network namespace has: their buffers are memory that belongs to no process."""
    with suppress(OSError), open("/proc/self/net/sockstat", "rb") as file:
        return int(file.readline().split()[2])  # sockets: used 3
    return 0


def sum_memory(read: Callable[[str], int]) -> int:
    total = 0
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdecimal() and name != "1":
                with suppress(OSError):  # it has ended
                    total += read(f"/proc/{name}")
    return total


def _read_sizes(path: str, names: tuple[bytes, ...]) -> int:
    with open(path, "rb") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith(names))


def _read_resident(folder: str) -> int:
    return _read_sizes(f"{folder}/status", (b"RssAnon:", b"VmPTE:"))


def _read_share(folder: str) -> int:
    """Of memory that several processes share, the part of one. A process may hide it: then all counts."""
    try:
        share = _read_sizes(f"{folder}/smaps_rollup", (b"Pss_Anon:",))
    except PermissionError:
        return _read_resident(folder)
    return share + _read_sizes(f"{folder}/status", (b"VmPTE:",))


def read_result(path: str) -> tuple[str, bytes]:
    """("", the result file), or why there is none. Only a regular file is opened, and no link is followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return "missing", b""
    except OSError:  # a link, a socket
        return "irregular", b""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return "irregular", b""
    with os.fdopen(descriptor, "rb") as file:
        result = file.read(MAX_RESULT + 1)
    return ("large", b"") if len(result) > MAX_RESULT else ("", result)


def drop_to(capabilities: int) -> None:
    """Drop all capabilities but these, and hide this process from other processes."""
    bits = struct.pack("IIIIII", capabilities, capabilities, 0, 0, 0, 0)
    mounts.check(_libc.capset(mounts.VERSION, bits), "capset")
    mounts.hide_memory()
    mounts.check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def send(channel: socket.socket, report: dict[str, Any], result: bytes = b"", output: bytes = b"") -> None:
    head = {**report, "result_bytes": len(result), "output_bytes": len(output)}
    channel.sendall(json.dumps(head).encode() + b"\n" + result + output)


def run_session(config: dict[str, Any], channel: socket.socket, second: bool) -> None:
    """Pid 1 of a session: run commands one after the other over the same folders, until the channel is closed.

    A message that has `files` empties the private places first, which no process can see then, and writes them there.
    """
    listen().close()
    sandbox_root.build(
        config["readable"], "", config["scratch"], config["writable"], config["private"], config["image"]
    )
    user = mounts.SECOND if second else None
    for place in config["writable"]:
        take_over(place, user)
    write_files(config["files"], user)
    command_filter.deny_for_command()
    drop_to(OVER_COMMAND | 1 << CAP_SETGID | 1 << CAP_SETUID if second else 0)
    send(channel, {})
    requests = channel.makefile("rb")
    while size := requests.read(8):
        message = marshal.loads(requests.read(int.from_bytes(size, "little")))
        if "files" in message:
            for place in config["private"]:
                os.chmod(place, 0o755)  # without a second user id it is the commands' as well
                mounts.wipe(place)
            write_files(message["files"], None)
            for folder in message["open_folders"]:
                os.makedirs(folder)
                os.chmod(folder, 0o777)
        ended = run_command({**config, **message, "socket": "", "input": "/dev/null"}, user, None)
        state, result = "missing", b""
        for path in message.get("results", ()):
            state, result = read_result(path)
            if state != "missing":
                break
        said = ended.pop("output", b"")
        send(channel, {**ended, "result": state}, result, said)


def take_over(path: str, user: int | None) -> None:
    if user is not None:
        os.chown(path, user, user)


def write_files(files: list[tuple[str, bool, bytes]], user: int | None) -> None:
    """Write (path, whether it is a program, bytes), with the folders above, as that user's."""
    for path, is_program, data in files:
        missing, folder = [], os.path.dirname(path)
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for one in reversed(missing):
            os.mkdir(one, 0o755)
            take_over(one, user)
        if path.endswith("/"):
            continue
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(path, 0o755 if is_program else 0o644)
        take_over(path, user)


def run_command(config: dict[str, Any], user: int | None, listening: socket.socket | None) -> dict[str, Any]:
    """Start a command and wait until it has ended; how it ended."""
    output, written = os.pipe()
    failed, failure = os.pipe()
    command = start(config, user, written, failure)
    for descriptor in (written, failure):
        os.close(descriptor)
    if listening is not None:  # a session starts more of them
        drop_to(OVER_COMMAND if user is not None else 0)
    try:
        if why := os.read(failed, 2000):  # ends when the command begins
            return {"refused": f"the command cannot be started: {why.decode(errors='replace')}"}
        return watch(config, command, output, listening)
    finally:
        os.close(failed)
        os.close(output)


def run_inside(config: dict[str, Any], channel: socket.socket, second: bool) -> None:
    """Pid 1."""
    if "writable" in config:
        run_session(config, channel, second)
        return
    listening = listen()
    sandbox_root.build(config["readable"], config["socket"], config["scratch"])
    for path, text in ((TASK, config["task"]), (PROMPT, config["prompt"])):
        with open(path, "wb") as file:
            file.write(text)
    command_filter.deny_for_command()
    ended = run_command(config, mounts.SECOND if second else None, listening)
    if "refused" in ended:
        send(channel, ended)
        return
    state, result = read_result(RESULT)
    said = ended.pop("output")
    send(channel, {**ended, "result": state}, result, said)


def keep(inside: int, channel: socket.socket, parent: int) -> None:
    """The keeper: end everything inside when the channel is closed or the parent ends; end when all of it has ended."""
    poller = select.poll()
    poller.register(channel, select.POLLRDHUP)
    poller.register(parent, select.POLLIN)
    poller.register(os.pidfd_open(inside), select.POLLIN)
    poller.poll()
    with suppress(ProcessLookupError):
        os.kill(inside, signal.SIGKILL)
    os.waitpid(inside, 0)  # returns when every process of the namespace is gone
    os._exit(0)


def run_one(channel: socket.socket, parent: int) -> None:
    """Run one command, in a fork of its own: read its config, then fork once more into its keeper and its pid 1."""
    with channel.makefile("rb") as file:
        config = marshal.loads(file.read(int.from_bytes(file.read(8), "little")))
    try:
        second = mounts.unshare(alone=mounts.SECOND)
        inside = os.fork()
        if inside:
            keep(inside, channel, parent)
        os.close(parent)
        run_inside(config, channel, second)
    except Exception as error:
        send(channel, {"refused": f"{type(error).__name__}: {error}"})


def main(descriptor: str, parent: str) -> None:
    os.environ.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # a signal with a handler can reach pid 1 from within
    control, driver = socket.socket(fileno=int(descriptor)), os.pidfd_open(int(parent))
    if os.getppid() != int(parent):
        return  # gone already
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no burial
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(driver, select.POLLIN)
    while all(ready == control.fileno() for ready, _ in poller.poll()):
        data, sent, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        channel = socket.socket(fileno=sent[0])
        channel.set_inheritable(False)  # received descriptors are: the command would have it
        try:
            child = os.fork()
        except OSError:  # for the moment there are too many processes: this command alone is not started
            channel.close()
            continue
        if child == 0:
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                run_one(channel, driver)
            finally:
                os._exit(0)
        channel.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
