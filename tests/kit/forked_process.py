"""Programs of ours in processes of their own, forked from one that has the heavy libraries imported already.

    program = Program(["-m", "rlvr.cli.main", "serve"], stderr=subprocess.PIPE)      # as subprocess.Popen
    done = ran(["examples/grpo_from_scratch.py", "--steps", "2"], timeout=300)  # as subprocess.run, output captured

A fresh interpreter spends five seconds of a core on importing torch, transformers and the tinker SDK, and the tests
start more than a hundred programs. Here that is paid once: a process without threads (this file, started when the
first program is asked for) imports them and then only forks. What is forked has its own arguments,
environment, folder, standard streams, random numbers and `__main__`, runs as `python` would run it, ends by itself,
and is killed like any other.

Left out: what depends on a new interpreter. Options of `python` but `-X faulthandler`, another hash seed in each
process, and what is imported: tests of those (test_layers.py, test_service_starts.py) start their own.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
# What the programs spend their start on, in the order in which they import it.
HEAVY = (
    "torch", "transformers.models.qwen3.modeling_qwen3", "peft", "scipy.stats", "matplotlib.figure", "tinker",
    "fastapi", "uvicorn", "sqlalchemy", "alembic.config", "rlvr.runs.build_job", "rlvr.clients.local",
    "rlvr.training.loop",
)  # fmt: skip
# As the environment of every program says; what they import reads these once.
ALIKE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}


class Program:
    """A running program, `words` being what follows `python`: of `subprocess.Popen` what the tests use."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: int | IO[Any] = subprocess.DEVNULL,
        stderr: int | IO[Any] = subprocess.DEVNULL,
        connection: socket.socket | None = None,
    ) -> None:
        """`connection` is open in the program, whose last word then becomes its descriptor there."""
        self.args = list(words)
        self.returncode: int | None = None
        told = {"words": self.args, "env": dict(os.environ if env is None else env), "cwd": str(cwd or os.getcwd())}
        self._ending, theirs = socket.socketpair()
        with contextlib.ExitStack() as handed_over, theirs:
            self.stdout, out = _stream(stdout, handed_over)
            self.stderr, err = (None, out) if stderr == subprocess.STDOUT else _stream(stderr, handed_over)
            passed = [] if connection is None else [connection.fileno()]
            _forker().ask(told, [theirs.fileno(), out, err, *passed])
        self.pid = int(self._read_status(None) or 0)
        assert self.pid, "the process that forks has ended"

    def _read_status(self, timeout: float | None) -> bytes | None:
        """What the process above it says next: its id, then how it ended. None when that takes longer."""
        return self._ending.recv(64) if select.select([self._ending], [], [], timeout)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            said = self._read_status(timeout)
            if said is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            assert said, "the process above it was killed"
            self.returncode = int(said)
            self._ending.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, how: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended, and its end has not been said yet
                os.kill(self.pid, how)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    words: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, and what it wrote."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        program = Program(words, env=env, cwd=cwd, stdout=out, stderr=err)
        try:
            program.wait(timeout)
        finally:
            program.kill()
            program.wait()
            for file in (out, err):
                file.seek(0)
            done = subprocess.CompletedProcess(list(words), program.wait(), out.read(), err.read())
        return done


def _stream(asked: int | IO[Any], closing: contextlib.ExitStack) -> tuple[IO[str] | None, int]:
    """(our end of a pipe, the file descriptor of the program)."""
    if not isinstance(asked, int):
        return None, asked.fileno()
    if asked == subprocess.DEVNULL:
        return None, closing.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
    assert asked == subprocess.PIPE
    ours, theirs = os.pipe()
    closing.callback(os.close, theirs)
    return open(ours, encoding="utf-8", errors="replace"), theirs


class _Forker:
    """Our end of the process that forks. It ends when this one does."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                env={**os.environ, **ALIKE, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self._turn = threading.Lock()
        atexit.register(self.close)

    def ask(self, program: dict[str, Any], files: list[int]) -> None:
        with self._turn:
            socket.send_fds(self._line, [json.dumps(program).encode()], files)

    def close(self) -> None:
        self._line.close()
        self._process.wait()


@functools.cache
def _forker() -> _Forker:
    return _Forker()


# What follows runs in the process that forks, and in what it forked.


def serve(line: socket.socket) -> dict[str, Any] | None:
    """Fork each requested program; in the fork, return its request. None when the requesting process has ended."""
    for name in HEAVY:
        with contextlib.suppress(ImportError):  # an extra that is not installed: its tests are skipped
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread, and only this one would be forked"
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, all of it in every program
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; they end what they started
    while True:
        told, files, _, _ = socket.recv_fds(line, 1 << 18, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # the keepers of programs that have ended
                pass
        if not told:
            return None
        if not os.fork():
            line.close()
            if keep_files(files):
                os._exit(0)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            program = json.loads(told)
            program["words"][-1:] = map(str, files[3:] or program["words"][-1:])
            return program
        for file in files:
            os.close(file)


def keep_files(files: list[int]) -> bool:
    """Fork a program and see it through: its parent says how it ended, as only a parent can. False in the program."""
    ending, out, err = files[:3]
    if pid := os.fork():
        for file in files[1:]:
            os.close(file)
        with socket.socket(fileno=ending) as told, contextlib.suppress(BrokenPipeError, ConnectionError):
            told.send(str(pid).encode())
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            told.send(str(status).encode())
        return True
    os.dup2(out, 1)
    os.dup2(err, 2)
    for file in files[:3]:
        os.close(file)
    return False


def become(program: dict[str, Any]) -> None:
    """Run it as `python` would."""
    os.environ.clear()
    os.environ.update(program["env"])
    os.chdir(program["cwd"])
    words = program["words"]
    if words[:2] == ["-X", "faulthandler"]:
        faulthandler.enable()
        words = words[2:]
    kind, name, *rest = words if words[0] in ("-m", "-c") else ["", *words]
    home = str(Path(name).resolve().parent) if not kind else program["cwd"] if kind == "-m" else ""
    # A program started by the path of a file or by -c has the same path, but for its first entry.
    sys.path[:1] = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [kind or name, *rest]
    importlib.invalidate_caches()
    if kind == "-m":
        sys.modules.pop(name, None)  # it is to be __main__, not what it was imported as
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(name, "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asking:
        program = serve(asking)
    if program is not None:
        become(program)
