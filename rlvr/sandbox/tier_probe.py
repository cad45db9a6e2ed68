"""The self-test of a tier: tries, in a new fork of a zygote, what an answer must not be able to do.

Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

from rlvr.sandbox import seccomp

EXECUTABLES = ("/bin/true", "/usr/bin/true", "/bin/sh")


def create(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    os.unlink(path)


def escapes(tier: str, supervisor: int, user: int | None, hides_host: bool) -> list[str]:
    """What worked and must not, or failed and must work; empty if the tier isolates.

    `user`: the id under which answers run, if not the zygote's; `hides_host`: whether they see another host name.
    The first forbidden thing that works ends the test, before anything is tried that could do harm.
    """
    import fcntl  # imported here: a zygote imports this module and forks faster without these
    import socket

    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> Callable[[], None]:
        def attempt() -> None:
            if getattr(libc, name)(*arguments) < 0:
                raise OSError(ctypes.get_errno(), name)

        return attempt

    def fork() -> None:
        if os.fork() == 0:
            os._exit(0)

    def execute() -> None:
        os.execve(next(filter(os.path.exists, EXECUTABLES), EXECUTABLES[0]), ["true"], {})

    def fork_as_zygote() -> None:
        child = libc.syscall(seccomp.CLONE[seccomp.architecture()[0]], seccomp.ZYGOTE_FORK, 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        if child < 0:
            raise OSError(ctypes.get_errno(), "clone")

    forbidden: dict[str, Callable[[], object]] = {
        "read /etc/passwd": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "list /": lambda: None if tier == "namespaces" else os.listdir("/"),
        "read /proc": lambda: os.open("/proc/self/status", os.O_RDONLY),
        "write to /": lambda: create("/rlvr-escaped"),
        "write to the standard library": lambda: create(os.__file__ + ".rlvr-escaped"),
        "write to /dev": lambda: create("/dev/rlvr-escaped"),
        "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "open a local socket": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
        "fork": fork,
        "fork as its zygote does": fork_as_zygote,
        "execute a program": execute,
        "signal the supervisor": lambda: os.kill(supervisor, 0),
        "signal its parent": lambda: os.kill(os.getppid(), 0),
        "trace": call("ptrace", 0, 0, None, None),
        "unshare": call("unshare", 0x10000000),
        "mount": call("mount", b"none", b"/tmp", b"tmpfs", 0, None),
        "make memory files": call("memfd_create", b"x", 0),
        "become root": lambda: os.setresuid(0, 0, 0),
        "lock a shared file": lambda: fcntl.flock(1, fcntl.LOCK_EX | fcntl.LOCK_NB),
        "use keyrings": call("syscall", 250 if os.uname().machine == "x86_64" else 219, 0, -3, 0),
    }
    if tier == "namespaces":
        del forbidden["list /"]
    else:
        forbidden["write to /tmp"] = lambda: create("/tmp/rlvr-escaped")
        forbidden["change modes"] = lambda: os.chmod("/", os.stat("/").st_mode & 0o7777)
    if user is not None and {*os.getresuid(), *os.getresgid(), *os.getgroups()} != {user}:
        return [f"could run as user {os.getresuid()}, group {os.getresgid()}, groups {os.getgroups()}"]
    if hides_host and os.uname().nodename != "sandbox":
        return ["could read the host's name"]
    for name, attempt in forbidden.items():
        try:
            attempt()
        except OSError:
            continue
        return [f"could {name}"]
    missing = missing_abilities(tier)
    if tier == "namespaces":
        spoil_scratch()
    return missing


def spoil_scratch() -> None:
    """Try to spoil the scratch folder; the zygote checks whether that lasts."""
    os.makedirs("/tmp/a/b")
    os.chmod("/tmp/a", 0)
    with contextlib.suppress(PermissionError):  # with two ids the folder belongs to the other
        os.chmod("/tmp", 0)


def missing_abilities(tier: str) -> list[str]:
    """What honest answers need and cannot do here."""
    import threading

    def scratch() -> None:
        with open("/tmp/probe", "w") as file:
            file.write("x")

    def thread() -> None:
        started = threading.Thread(target=int)
        started.start()
        started.join()

    needed: dict[str, Callable[[], object]] = {
        "start a thread": thread,
        "read /dev/urandom": lambda: os.read(os.open("/dev/urandom", os.O_RDONLY), 1),
        "import from the standard library": lambda: __import__("colorsys"),
    }
    if tier == "namespaces":
        needed["write to its scratch folder"] = scratch
    found: list[str] = []
    for name, attempt in needed.items():
        try:
            attempt()
        except Exception as error:
            found.append(f"could not {name} ({type(error).__name__}: {error})")
    return found
