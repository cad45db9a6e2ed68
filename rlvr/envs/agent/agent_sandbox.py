"""The sandbox of an agent that is a command: what it can read and use, and the process that starts it there.

`rlvr.sandbox.sandboxed_command` builds it. Left out on purpose: GPUs, a network beyond the recorder, and other systems
than Linux. Where the system refuses namespaces the sandbox is an error at the start: it is never silently missing.
"""

from __future__ import annotations

import json
import marshal
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.core.registry import check_kwargs
from rlvr.reward.reward_options import check_integer
from rlvr.sandbox.byte_relay import MAX_RESULT, PORT

ADDRESS = f"http://127.0.0.1:{PORT}"  # of the recorder, as seen in the sandbox
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ssl/cert.pem",
    "/etc/ca-certificates", "/etc/pki/ca-trust", "/etc/pki/tls/certs", "/etc/crypto-policies", "/etc/ld.so.cache",
    "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime", "/etc/mime.types",
    "/etc/nsswitch.conf", "/etc/protocols", "/etc/services",
)  # fmt: skip
_OWN = ("/", "/tmp", "/dev", "/dev/shm", "/proc", "/run")  # a sandbox has its own of each
_LAUNCHER = Path(__file__).parents[2] / "sandbox" / "sandboxed_command.py"
_LIBRARIES = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # else none might start
_TRIAL_PROCESSES = 16
_INTERPRETERS = ("python", "python3", "bash", "sh", "node")  # whose first word is the file of a script
# Printed by the trial: whether the number of processes is limited, and which of the paths cannot be read.
_TRIAL = """
import os, sys
made = 0
try:
    for _ in range(int(sys.argv[1]) + 8):
        if os.fork() == 0:
            import time
            time.sleep(600)
        made += 1
except OSError:
    pass
def is_readable(path):
    return os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0))
print(made, *[path for path in sys.argv[2:] if not is_readable(path)], sep=chr(0), end="")
"""


@dataclass(frozen=True)
class AgentSandbox:
    """What a sandboxed agent may read beside the system, its interpreter and its script, and what it may use: bytes
    of `memory`, for each process and for all together, `processes` and threads, and bytes of `scratch`, its one
    writable folder."""

    readable: Sequence[str] = ()
    memory: int = 2 << 30
    processes: int = 256
    scratch: int = 256 << 20

    def __post_init__(self) -> None:
        if isinstance(self.readable, str) or not all(isinstance(path, str) for path in self.readable):
            raise ValueError(f"agent: sandbox.readable={self.readable!r:.200}, expected a list of paths")
        for path in self.readable:
            if not os.path.exists(os.path.expanduser(path)):
                raise ValueError(f"agent: sandbox.readable: {path!r} does not exist")
            if os.path.abspath(os.path.expanduser(path)) in _OWN:
                raise ValueError(
                    f"agent: sandbox.readable: {path!r} is replaced in the sandbox; name folders inside it"
                )
        check_integer("agent: sandbox.memory (bytes)", self.memory, 64 << 20)
        check_integer("agent: sandbox.processes", self.processes, 1)
        check_integer("agent: sandbox.scratch (bytes)", self.scratch, 1 << 20)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> AgentSandbox:
        if not isinstance(options, Mapping):
            raise ValueError(
                f"agent: sandbox={options!r:.80}, expected a mapping of its options ({{}} for the defaults)"
            )
        check_kwargs("agent: sandbox", AgentSandbox, dict(options))
        return cls(**options)


def list_readable(command: Sequence[str], sandbox: AgentSandbox) -> tuple[list[str], list[str]]:
    """(all paths that a command may read, those of them that are its own): the system's folders, what its program
    needs, the folder of its script (the first file among its words), other files among them, and what the user named.

    The folder of a script that holds the working directory of the training is not read, but the script alone: data,
    rewards and runs are there.
    """
    own = [os.path.abspath(os.path.expanduser(path)) for path in sandbox.readable]
    own += _list_program(command[0])
    files = [word for word in command[1:] if os.path.isabs(word) and os.path.isfile(word)]
    for number, file in enumerate(files):
        folder = os.path.dirname(file)
        own.append(file if number or _is_private(folder) else folder)
    system = [path for path in SYSTEM if os.path.exists(path)]
    kept: list[str] = []
    for path in sorted({*own, *system}):
        if not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept, own


def _is_private(folder: str) -> bool:
    home = os.path.expanduser("~")
    return any(f"{path}/".startswith(f"{folder.rstrip('/')}/") for path in (os.getcwd(), home)) or folder in (
        "/tmp", "/var", "/etc", os.path.join(home, ".local"),
    )  # fmt: skip


def _list_program(program: str) -> list[str]:
    """The prefixes in which a program lies, one for each link on the way to it, or the program alone."""
    found: list[str] = []
    at = program
    for _ in range(20):
        folder = os.path.dirname(at)
        prefix = os.path.dirname(folder)
        is_prefix = os.path.basename(folder) in ("bin", "Scripts") and os.path.isdir(os.path.join(prefix, "lib"))
        found.append(prefix if is_prefix and not _is_private(prefix) else at)
        if not os.path.islink(at):
            break
        at = os.path.normpath(os.path.join(folder, os.readlink(at)))
    return found


def resolve_command(command: Sequence[str]) -> list[str]:
    """The command with the full paths of its program and of the files among its words: it runs in another folder.
    `python` is the interpreter of this process."""
    program = sys.executable if command[0] == "python" else shutil.which(command[0])
    script = command[1] if len(command) > 1 and os.path.basename(command[0]) in _INTERPRETERS else "-"
    if program is None:
        raise ValueError(
            f"agent: the command {list(command)} cannot be started: there is no program {command[0]!r} on the PATH; "
            "install it, or give its full path"
        )
    if not script.startswith("-") and not os.path.exists(script):
        raise ValueError(
            f"agent: the command {list(command)} cannot be started: there is no file {script!r} in {os.getcwd()}; give "
            "its path from the folder in which the training starts, or its full path"
        )
    return [os.path.abspath(program), *(os.path.abspath(w) if os.path.isfile(w) else w for w in command[1:])]


class SandboxLauncher:
    """The process that starts sandboxed commands. It forks for each, which costs less than a new Python."""

    def __init__(self, command: Sequence[str], sandbox: AgentSandbox) -> None:
        self.command, self.sandbox = list(command), sandbox
        self._readable, self._own = list_readable(command, sandbox)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def readable(self) -> list[str]:
        return list(self._readable)

    def check(self, otherwise: str = ", or leave env.kwargs.sandbox out") -> None:
        """ValueError if this system cannot build the sandbox, or the command could not be read in it."""
        python = os.path.realpath(sys.executable)
        needed = [*self._readable, *_list_program(python)]
        trial = [python, "-I", "-S", "-c", _TRIAL, str(_TRIAL_PROCESSES), *self._own, *self.command[:1]]
        channel = self.launch(
            "", {}, b"", b"", command=trial, readable=_without_nested(needed), processes=_TRIAL_PROCESSES
        )
        report, _, output = read_report(channel)
        if "refused" in report or report.get("code"):
            why = report.get("refused") or f"a trial ended with {report}, {output[-500:]!r}"
            raise ValueError(
                f"agent: this system cannot build the sandbox: {why:.500}; it needs Linux 5.12 or newer with user "
                "namespaces (in a container: --security-opt seccomp=unconfined --security-opt apparmor=unconfined; on "
                f"Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0){otherwise}"
            )
        made, *unreadable = os.fsdecode(output).split("\0")
        if int(made) >= _TRIAL_PROCESSES + 8:
            raise ValueError(
                "agent: this system cannot build the sandbox: the number of processes is not limited; run as an "
                "ordinary user, or as root where the user id 65534 can be mapped"
            )
        if unreadable:
            raise ValueError(
                f"agent: sandbox: {unreadable[0]} cannot be read by the user id under which agents run; allow it "
                f"(chmod -R o+rX {unreadable[0]}), or run as an ordinary user"
            )

    def launch(
        self,
        socket_path: str,
        variables: Mapping[str, str],
        task: bytes,
        prompt: bytes,
        command: Sequence[str] | None = None,
        readable: Sequence[str] | None = None,
        processes: int | None = None,
    ) -> socket.socket:
        """Start the command, or another one. Returns the socket of its report; to shut it down ends the command."""
        folder = os.path.dirname((command or self.command)[0])
        environment = {
            "PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8",
            **_LIBRARIES, **variables,
        }  # fmt: skip
        config = {
            "readable": list(readable or self._readable), "socket": socket_path, "memory": self.sandbox.memory,
            "processes": processes or self.sandbox.processes, "scratch": self.sandbox.scratch,
            "environment": environment, "command": list(command or self.command), "task": task, "prompt": prompt,
        }  # fmt: skip
        return self.open(config)

    def open(self, config: Mapping[str, Any]) -> socket.socket:
        """Send a config to a new sandbox; the socket of its reports."""
        raw = marshal.dumps(dict(config))
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._send(theirs)
            ours.sendall(len(raw).to_bytes(8, "little") + raw)
        except OSError as error:
            ours.close()
            raise ValueError(f"agent: the process that builds sandboxes has ended ({error})") from error
        return ours

    def _send(self, channel: socket.socket) -> None:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            socket.send_fds(self._control, [b"x"], [channel.fileno()])

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-I", "-S", str(_LAUNCHER), str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, env=_LIBRARIES, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._control = ours
        weakref.finalize(self, _end, ours, self._process)


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait()


def _without_nested(paths: Sequence[str]) -> list[str]:
    return [path for path in sorted(set(paths)) if not any(path.startswith(f"{other}/") for other in paths)]


def read_report(channel: socket.socket) -> tuple[dict[str, Any], bytes, bytes]:
    """(how a command ended, its result file, the end of its output), once all its processes have ended. How it ended is
    {} if the sandbox was torn down before it did."""
    raw = bytearray()
    with channel, suppress(OSError):
        while len(raw) <= 2 * MAX_RESULT + 8192 and (piece := channel.recv(1 << 16)):
            raw += piece
    head, _, rest = bytes(raw).partition(b"\n")
    try:
        report = json.loads(head)
    except ValueError:
        return {}, b"", b""
    result = rest[: report["result_bytes"]]
    return report, result, rest[len(result) : len(result) + report["output_bytes"]]
