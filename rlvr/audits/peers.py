"""Verifiers of other projects as rewards, to compare ours with in an audit.

    rlvr audit --reward math --labelled builtin --against rlvr.audits.peers:math_verify

`math_verify` runs math-verify in a child process with the same time limit of 5 s, after which the child is killed:
math-verify's own limit needs signals and the main thread, and misses some hangs. A hang or a crash gives the outcome
`timeout` with the reason `no_verdict`, which an audit counts apart.
"""

from __future__ import annotations

import atexit
import json
import select
import subprocess
import sys
import threading
from typing import Any

from rlvr.core.types import Outcome, Score

SECONDS = 5.0  # for one pair, without the start of the child, which imports sympy
_MEMORY = 4 << 30

_CHILD = f"""
import json, logging, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({_MEMORY}, {_MEMORY}))
logging.disable(logging.CRITICAL)
from math_verify import parse, verify
print("ready", flush=True)
for line in sys.stdin:
    gold, response = json.loads(line)
    try:
        gold, response = (parse(text, parsing_timeout=None) for text in (gold, response))
        said = bool(verify(gold, response, timeout_seconds=None))
    except BaseException as error:
        said = type(error).__name__
    print(json.dumps(said), flush=True)
"""


class _MathVerifyProcess:
    """The child process, started again after it was killed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, gold: str, response: str) -> bool | str:
        """True or false, or what went wrong: `timeout`, `died`, or the name of an exception."""
        with self.lock:
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([gold, response]).encode() + b"\n")
                process.stdin.flush()
                if not select.select([process.stdout], [], [], SECONDS)[0]:
                    self._stop()
                    return "timeout"
                line = process.stdout.readline()
            except OSError:
                line = b""
            if not line:
                self._stop()
                return "died"
            return json.loads(line)

    def _start(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CHILD],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            assert self.process.stdout is not None and self.process.stderr is not None
            if self.process.stdout.readline() != b"ready\n":
                lines = self.process.stderr.read().decode(errors="replace").strip().splitlines()
                self._stop()
                raise RuntimeError(
                    f"math-verify cannot be used ({lines[-1] if lines else 'no message'}); pip install math-verify"
                )
            self.process.stderr.close()
        return self.process

    def _stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


_child = _MathVerifyProcess()
atexit.register(_child._stop)


def math_verify(prompt: str, response: str, meta: dict[str, Any]) -> Score:
    """Whether math-verify finds the gold `meta["answer"]` in the response."""
    gold = str(meta["answer"])
    verdict = _child.ask(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", response)
    if isinstance(verdict, str):
        return Score(0.0, Outcome.TIMEOUT, "no_verdict", detail=verdict)
    return Score(float(verdict), Outcome.PASSED if verdict else Outcome.FAILED)
