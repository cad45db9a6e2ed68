"""A solver and a checker over a socket pair, the solver in a plain fork: what runs inside, without isolation."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

from rlvr.sandbox import checker, solver
from rlvr.sandbox.setup_parts import for_answer


def judge(solution: str, tests: Any, seconds: float = 5.0, **rest: Any) -> dict[str, Any]:
    job = {"solution": solution, "tests": tests, "imports": [], "setup": "", "seconds": seconds, **rest}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            try:
                ours.close()
                known = {key: job[key] for key in ("solution", "imports", "stdin") if key in job}
                solver.main({**known, "setup": for_answer(job["setup"])}, theirs.fileno())
            finally:
                os._exit(1)
        theirs.close()
        try:
            report = checker.judge(job, ours.fileno())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if report.get("needs_objects") and not job.get("objects"):
        return judge(solution, tests, seconds, **rest, objects=True)
    return report


def rows(*args: Any, **kwargs: Any) -> list[tuple[bool, str]]:
    return [(passed, reason) for passed, reason, _ in judge(*args, **kwargs)["tests"]]
