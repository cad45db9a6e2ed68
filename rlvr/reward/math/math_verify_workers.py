"""A few workers that run math-verify, each used by one thread at a time and warmed up before it gets an answer.

    ask("1+\\sqrt2", "\\sqrt{3+2\\sqrt2}", 0.5)     # -> WorkerReply(value=True)

A worker loads sympy (about half a second) before it is given a pair; after a kill it does so in a background thread,
when the answer that caused the kill already has its reply. So a timeout is always the fault of its own answer: the job
counts the processor time of the pair, and the worker is killed where that does not end it (a multiplication in C).
`python -m pytest tests/test_math_verify.py` exercises it.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from typing import Any

from rlvr.sandbox.worker import Worker, WorkerReply

WORKERS = 4  # at most, one per thread that asks; each holds about 100 MB
MEMORY = 512 << 20  # that each may use
WARM_SECONDS = 60.0  # that a new worker may take to load sympy, on a busy machine
GRACE_SECONDS = 1.2  # that a pair may take on top of its processor time: a kill costs more than waiting


class _Pool:
    def __init__(self) -> None:
        self.free = threading.Semaphore(WORKERS)
        self.idle: list[Worker] = []  # warm ones, and perhaps not started; append and pop are atomic
        self.spare = threading.Lock()  # locked once, by the first thread that asks

    def ask(self, gold: str, answer: str, seconds: float) -> WorkerReply:
        self.free.acquire()
        if self.spare.acquire(blocking=False) and self.free.acquire(blocking=False):
            self._in_background(_new())  # so that a kill costs the next pair no time either
        worker = self._take_worker()
        warm = False
        try:
            reply = _warm_up(worker)
            if reply.failure:
                return WorkerReply(None, "not_started", f"{reply.failure}: {reply.detail}")
            (reply,) = worker.map(_setup(seconds), [[gold, answer]], seconds + GRACE_SECONDS)
            warm = reply.failure in ("", "raised")
            return reply
        finally:
            if warm:
                self._give_back(worker)
            else:
                self._in_background(worker)

    def _take_worker(self) -> Worker:
        try:
            return self.idle.pop()
        except IndexError:
            return _new()

    def _in_background(self, worker: Worker) -> None:
        threading.Thread(target=self._warm_again, args=(worker,), daemon=True).start()

    def _warm_again(self, worker: Worker) -> None:
        try:
            _warm_up(worker)
        finally:
            self._give_back(worker)

    def _give_back(self, worker: Worker) -> None:
        self.idle.append(worker)
        self.free.release()


def _new() -> Worker:
    return Worker("rlvr.reward.math.math_verify_job", memory=MEMORY)


def _setup(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "paths": [path for path in sys.path if os.path.isabs(path)]}


def _warm_up(worker: Worker) -> WorkerReply:
    return worker.map(_setup(0.0), [None], WARM_SECONDS)[0]


@cache
def _pool() -> _Pool:
    return _Pool()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_pool.cache_clear)


def ask(gold: str, answer: str, seconds: float) -> WorkerReply:
    """math-verify's verdict on a pair: True, False, or None where it used up `seconds`; or a failure.

    The failure `not_started` is not the fault of the pair; every other is.
    """
    return _pool().ask(gold, answer, seconds)
