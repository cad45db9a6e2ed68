"""A program of ours that listens on a free port of this machine, in a process of its own: how it is started and ended.

`kill` is what a power cut is; `start` begins again on the same port. rlvr_service.py and tinker_server.py
are the two such programs. It is forked (tests/kit/forked_process.py) unless `command` names another way to start it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.kit.forked_process import Program

FRESH = (sys.executable, "-m", "rlvr.cli.main", "serve")  # a new interpreter, as a user's is


class ServerProcess:
    def __init__(self, words: Sequence[str], environment: dict[str, str], listening: str, patience: float) -> None:
        self.url = ""
        self.said = ""  # to standard error, since it was started last
        self.started_after = 0.0  # seconds until it said where it listens
        self.command: tuple[str, ...] = ()  # instead of a fork of `python -m rlvr.cli.main serve`
        self._words, self._environment = list(words), environment
        self._listening, self._patience = re.compile(listening), patience
        self._port = 0
        self._process: Program | subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def start(self) -> None:
        assert self._process is None
        began = time.perf_counter()
        words = [*self._words, "--port", str(self._port)]
        if self.command:
            self._process = subprocess.Popen(
                [*self.command, *words], env=self._environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                text=True, bufsize=1,
            )  # fmt: skip
        else:
            words = ["-m", "rlvr.cli.main", "serve", *words]
            self._process = Program(words, env=self._environment, stderr=subprocess.PIPE)
        self.said, started = "", threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self._process.stderr, started), daemon=True)
        self._reader.start()
        if not started.wait(self._patience) or not self.url:
            self.kill()
            raise AssertionError(f"it did not start:\n{self.said}")
        self.started_after = time.perf_counter() - began

    def _read(self, lines: Any, started: threading.Event) -> None:
        for line in lines:
            self.said += line
            if found := self._listening.search(line):
                self.url = found[1]
                self._port = int(self.url.rsplit(":", 1)[1])
                started.set()
        started.set()  # its output has ended, and so has it

    def stop(self) -> int:
        """As Ctrl-C or a supervisor does it; its exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def signal(self, how: signal.Signals = signal.SIGTERM) -> None:
        """A signal, without waiting for what becomes of it."""
        assert self._process is not None
        self._process.send_signal(how)

    def _end(self, how: signal.Signals) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(how)  # which does nothing where it has ended by itself
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        code, self._process = self._process.returncode, None
        assert code is not None
        return code

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def cpu_seconds(self) -> float:
        """The processor time of this process so far, without its children."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mb(self) -> float:
        """What it holds of the machine's memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
