"""A process of another interpreter, which answers calls: what other projects' packages need is installed there.

The script is in `guests/`, and speaks as `guests/pipe_server.py` says. The process begins with the first call, and ends
with this one. If it does not answer a cancellation it is ended, with all its calls, and the next call starts another.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

GUESTS = Path(__file__).parent / "guests"
CANCEL_SECONDS = 10.0  # to answer a cancellation, or to close
_TAIL = 2_000  # bytes of what a process wrote, in messages

OnReply = Callable[[Any, str], None]  # (result, error)


class GuestError(Exception):
    """A call failed; the text says why."""


class GuestProcess:
    """The interpreter `python` with the script `guests/<script>`, in `folder`."""

    def __init__(self, python: str, script: str, folder: str) -> None:
        self._command, self._folder = [python, str(GUESTS / script)], folder
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0
        self._waiting: dict[int, OnReply] = {}
        self._last = 0
        self._output: IO[bytes] | None = None
        atexit.register(self.close)

    def send(self, method: str, params: Mapping[str, Any], on_reply: OnReply) -> int:
        """Begin a call; `on_reply` is called once, on some thread. Returns the call's number."""
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            self._last += 1
            number = self._last
            self._waiting[number] = on_reply
            self._write({"id": number, "method": method, "params": dict(params)})
        return number

    def call(self, method: str, params: Mapping[str, Any], seconds: float) -> Any:
        """The result of a call. GuestError if it fails, or takes longer: then the process is ended."""
        future = Future[Any]()

        def take(result: Any, error: str) -> None:
            future.set_exception(GuestError(error)) if error else future.set_result(result)

        self.send(method, params, take)
        try:
            return future.result(seconds)
        except TimeoutError:
            self.kill()
            raise GuestError(f"{method} took longer than {seconds:g} seconds; its process was ended") from None

    def cancel(self, number: int) -> None:
        """End a call. If it goes on all the same, the process is ended."""
        with self._lock:
            if number not in self._waiting or self._process is None:
                return
            process = self._process
            self._write({"id": number, "method": "cancel"})

        def look() -> None:
            with self._lock:
                hangs = number in self._waiting and self._process is process
            if hangs:
                self.kill()

        timer = threading.Timer(CANCEL_SECONDS, look)
        timer.daemon = True
        timer.start()

    def _write(self, call: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):  # it has ended; the thread that reads says so
            self._process.stdin.write(json.dumps(call) + "\n")
            self._process.stdin.flush()

    def _start(self) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        kept.setdefault("PYTHONHASHSEED", "0")  # sets of texts have one order in all processes
        kept["PATH"] = os.pathsep.join([os.path.dirname(self._command[0]), kept.get("PATH", os.defpath)])
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output, text=True,
                encoding="utf-8", cwd=self._folder, env=kept, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ValueError(f"{self._command[0]} cannot be started: {error}") from error
        self._owner, self._waiting = os.getpid(), {}
        arguments = (self._process, self._waiting, self._output)
        threading.Thread(target=self._read, args=arguments, name="guest", daemon=True).start()

    def _read(self, process: subprocess.Popen[str], waiting: dict[int, OnReply], output: IO[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            with self._lock:
                on_reply = waiting.pop(answer["id"], None)
            if on_reply is not None:
                on_reply(answer.get("result"), answer.get("error", ""))
        code = process.wait()
        with self._lock:
            left = list(waiting.values())
            waiting.clear()
        with output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
            said = output.read().decode("utf-8", "replace").strip()
        with suppress(OSError), process:  # closes its pipes
            pass
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        what = f"the process of the environment ({self._command[0]}) {how}; the end of its output: {said!r}"
        for on_reply in left:
            on_reply(None, what)

    def kill(self) -> None:
        """End the process and all that it started. Its calls fail."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        with self._lock:
            process = self._process
        if process is None or process.stdin is None or self._owner != os.getpid():
            return
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(CANCEL_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


def find_guest(python: str, script: str, number: int = 0) -> GuestProcess:
    """The process of an interpreter and a script in the current folder; of further ones, the one of this number."""
    return _find_guest(python, script, os.getcwd(), number)


@functools.cache
def _find_guest(python: str, script: str, folder: str, number: int) -> GuestProcess:
    return GuestProcess(python, script, folder)
