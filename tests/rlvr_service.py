"""`rlvr serve` in a process of its own, on a free port of this machine, for tests that talk to it as clients do.

    with RlvrService(tmp_path / "state", LLM_ENDPOINT=endpoint.plain_url) as service:
        service.post("/train", {"task_id": "t", "prompt": "2 + 2?"})

`kill` is what a power cut is; `start` begins again on the same port and state folder.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from text_endpoint import Asked, Said, serving

STARTED = re.compile(r"listening at (http://\S+)")
PATIENCE = 60.0  # seconds; two on a quiet core
OURS = re.compile(r"RLVR_|LLM_|JUDGE_|DATABASE_URL|PORT$|HOST$|LOG_LEVEL|RUST_LOG")  # of the environment of the tests


SOLUTION = "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"


class RlvrService:
    def __init__(self, state: Path, *options: str, dashboard: bool = False, keys: str = "", **environment: str) -> None:
        self.state, self.url = state, ""
        self._options = ["--state", str(state), *([] if dashboard else ["--no-dashboard"]), *options]
        outer = {name: value for name, value in os.environ.items() if not OURS.match(name)}
        self._environment = {**outer, "OMP_NUM_THREADS": "1", "RLVR_API_KEYS": keys, **environment}
        self._headers = {"authorization": f"Bearer {keys.split(',')[0]}"} if keys else {}
        self._port = 0
        self.command: tuple[str, ...] = (sys.executable, "-m", "rlvr.cli", "serve")
        self.process: subprocess.Popen[str] | None = None
        self.said = ""  # to standard error, since it was started last
        self.started_after = 0.0  # seconds until it said where it listens

    def __enter__(self) -> RlvrService:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> None:
        assert self.process is None
        command = [*self.command, *self._options, "--port", str(self._port)]
        began = time.perf_counter()
        self.process = subprocess.Popen(
            command, env=self._environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, bufsize=1
        )
        self.said, started = "", threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self.process, started), daemon=True)
        self._reader.start()
        if not started.wait(PATIENCE) or not self.url:
            self.kill()
            raise AssertionError(f"the service did not start:\n{self.said}")
        self.started_after = time.perf_counter() - began

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

    def signal(self) -> None:
        """SIGTERM, without waiting for what becomes of it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> int:
        if self.process is None:
            return 0
        if self.process.poll() is None:
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

    def memory_mb(self) -> float:
        """What it holds of the machine's memory."""
        assert self.process is not None
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, headers=self._headers, timeout=60, trust_env=False, **options)

    def get(self, path: str, **options: Any) -> httpx2.Response:
        with self.client() as client:
            return client.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def logged(self) -> list[dict[str, Any]]:
        """What it wrote down, as JSON."""
        return [json.loads(line) for line in self.said.splitlines() if line.startswith("{")]


def script(asked: Asked) -> str | Said:
    """What the model behind the endpoint says: by a word of the task."""
    prompt = asked.prompt
    if "forever" in prompt:
        return Said("Too late.", delay=60.0)
    if "slowly" in prompt:
        return Said("It took me a while, and here it is.", delay=1.0)
    if "refuse" in prompt:
        return Said("", status=400)
    if "144" in prompt or "12 * 12" in prompt:
        return "It is \\boxed{144}."
    if "badly" in prompt:
        return "no"
    return SOLUTION


@contextmanager
def scripted(state: Path, *options: str, **environment: str) -> Iterator[RlvrService]:
    """A service whose model says what `script` says, and that logs as JSON."""
    with (
        serving(script) as endpoint,
        RlvrService(state, "--log-format", "json", *options, LLM_ENDPOINT=endpoint.plain_url, **environment) as running,
    ):
        yield running
