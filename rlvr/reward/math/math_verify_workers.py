"""A few workers that run math-verify, warmed up before they get an answer (`rlvr.sandbox.warm_pool`).

    ask("1+\\sqrt2", "\\sqrt{3+2\\sqrt2}", 0.5)     # -> WorkerReply(value=True)

A worker loads sympy (about half a second) before it is given a pair, so a timeout is always the fault of its own
answer: the job counts the processor time of the pair, and the worker is killed where that does not end it (a
multiplication in C).
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

from rlvr.sandbox.warm_pool import WarmPool
from rlvr.sandbox.worker import Worker, WorkerReply

WORKERS = 4  # at most, one per thread that asks; each holds about 100 MB
MEMORY = 512 << 20  # that each may use
GRACE_SECONDS = 1.2  # that a pair may take on top of its processor time: a kill costs more than waiting


def _setup(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "paths": [path for path in sys.path if os.path.isabs(path)]}


@cache
def _pool() -> WarmPool:
    return WarmPool(
        lambda: Worker("rlvr.reward.math.math_verify_job", memory=MEMORY), WORKERS, _setup(0.0), None, spare=True
    )


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_pool.cache_clear)


def ask(gold: str, answer: str, seconds: float) -> WorkerReply:
    """math-verify's verdict on a pair: True, False, or None where it used up `seconds`; or a failure.

    The failure `not_started` is not the fault of the pair; every other is.
    """
    return _pool().ask(_setup(seconds), [gold, answer], seconds + GRACE_SECONDS)
