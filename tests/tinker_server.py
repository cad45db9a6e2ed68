"""A real server in a process of its own, on a free port of this machine, for tests that talk to it as clients do.

    with TinkerServer({"Qwen/Qwen3-8B": folder}, tmp_path / "state") as server:
        client = tinker.ServiceClient(base_url=server.url, api_key=server.key)

`kill` is what a power cut is; `start` begins again on the same port and state folder.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")  # of the SDK, in this process: nobody here reads it
STARTED = re.compile(r"TINKER_BASE_URL=(http://\S+)")
PATIENCE = 90.0  # seconds; importing torch takes a few on a busy machine


class TinkerServer:
    def __init__(self, models: Mapping[str, Path], state: Path, *options: str, keys: str = "") -> None:
        self.state, self.key, self.url = state, keys.split(",")[0] or "tml-no-key-needed", ""
        self._options = [part for name, folder in models.items() for part in ("--model", f"{name}={folder}")]
        self._options += ["--state", str(state), "--threads", "1", *options]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RLVR_API_KEYS": keys}
        self._port = 0
        self.process: subprocess.Popen[str] | None = None
        self.said = ""  # to standard error, since it was started last

    def __enter__(self) -> TinkerServer:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> None:
        assert self.process is None
        command = [sys.executable, "-m", "rlvr.cli", "serve", "engine", *self._options, "--port", str(self._port)]
        self.process = subprocess.Popen(
            command, env=self._environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, bufsize=1
        )
        self.said, started = "", threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self.process, started), daemon=True)
        self._reader.start()
        if not started.wait(PATIENCE) or not self.url:
            self.kill()
            raise AssertionError(f"the server did not start:\n{self.said}")

    def _read(self, process: subprocess.Popen[str], started: threading.Event) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.said += line
            if found := STARTED.search(line):
                self.url = found[1]
                self._port = int(self.url.rsplit(":", 1)[1])
                started.set()
        started.set()  # its output has ended, and so has it

    def stop(self) -> int:
        """As Ctrl-C or a supervisor does it; its exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(how)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        code, self.process = self.process.returncode, None
        return code

    @property
    def port(self) -> int:
        return self._port

    def log(self) -> str:
        return (self.state / "server.log").read_text(encoding="utf-8")


def aborted_at_exit(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a program that uses the SDK, run with `-X faulthandler`, aborted when all of its Python was over.

    A program that ends as soon as it has its last answer may: the thread of the SDK's transport (pyqwest: Rust) that
    passed this answer on then asks for the GIL of an interpreter that is being finalized, and CPython before 3.14 ends
    such a thread by `pthread_exit`, which cannot unwind Rust's frames and aborts. On a busy machine that is one run in
    thirty; what our own programs do about it is `rlvr.clients.sdk.leave`. Whether the work was done is for the caller.
    """
    told = "Fatal Python error: Aborted" in done.stderr and "<no Python frame>" in done.stderr
    return done.returncode == -signal.SIGABRT and told and "most recent call first):\n  File" not in done.stderr


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """An application on a free port of this machine, on a thread of this process; its port."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
