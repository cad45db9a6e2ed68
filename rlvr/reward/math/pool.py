"""A few workers that ask math-verify, each used by one thread at a time, and warm before any answer is on the clock.

    ask("1+\\sqrt2", "\\sqrt{3+2\\sqrt2}", 0.5)     # -> Reply(value=True)

A worker loads sympy (about half a second) before it is given a pair. After a kill it does so in a thread of its own,
while the answer that caused it already has its reply. So an answer is late only by its own doing: the job counts the
processor time of the pair, and the worker is killed where even that does not end it (a multiplication in C).
`python -m pytest tests/test_math_peer.py` exercises it.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from typing import Any

from rlvr.sandbox.worker import Reply, Worker

WORKERS = 4  # at most, one per thread that asks; each holds about 100 MB
MEMORY = 512 << 20  # that each may use
WARM_SECONDS = 60.0  # that a fresh worker may take to load sympy, on a busy machine
GRACE_SECONDS = 1.2  # that a pair may take beside its processor time: a kill costs more than waiting


class _Pool:
    def __init__(self) -> None:
        self.free = threading.Semaphore(WORKERS)
        self.idle: list[Worker] = []  # warm ones, and perhaps not started; append and pop are atomic
        self.spare = threading.Lock()  # taken for good by the first thread that asks

    def ask(self, gold: str, answer: str, seconds: float) -> Reply:
        self.free.acquire()
        if self.spare.acquire(blocking=False) and self.free.acquire(blocking=False):
            self._in_background(_new())  # so that a kill costs the next pair no time either
        worker = self._taken()
        warm = False
        try:
            reply = _warmed(worker)
            if reply.failure:
                return Reply(None, "not_started", f"{reply.failure}: {reply.detail}")
            (reply,) = worker.map(_setup(seconds), [[gold, answer]], seconds + GRACE_SECONDS)
            warm = reply.failure in ("", "raised")
            return reply
        finally:
            if warm:
                self._give_back(worker)
            else:
                self._in_background(worker)

    def _taken(self) -> Worker:
        try:
            return self.idle.pop()
        except IndexError:
            return _new()

    def _in_background(self, worker: Worker) -> None:
        threading.Thread(target=self._warm_again, args=(worker,), daemon=True).start()

    def _warm_again(self, worker: Worker) -> None:
        try:
            _warmed(worker)
        finally:
            self._give_back(worker)

    def _give_back(self, worker: Worker) -> None:
        self.idle.append(worker)
        self.free.release()


def _new() -> Worker:
    return Worker("rlvr.reward.math.peer", memory=MEMORY)


def _setup(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "paths": [path for path in sys.path if os.path.isabs(path)]}


def _warmed(worker: Worker) -> Reply:
    return worker.map(_setup(0.0), [None], WARM_SECONDS)[0]


@cache
def _pool() -> _Pool:
    return _Pool()


os.register_at_fork(after_in_child=_pool.cache_clear)


def ask(gold: str, answer: str, seconds: float) -> Reply:
    """What math-verify says of a pair: a value of True or False, None where it used up `seconds`; or why it did not.

    `not_started` is no fault of the pair's; every other failure is.
    """
    return _pool().ask(gold, answer, seconds)
