"""A few workers of one job, each used by one thread at a time and warmed up before it gets an item.

    pool = WarmPool(lambda: Worker("package.job"), count=4, setup={}, first=None)
    pool.ask({"seconds": 0.5}, ["gold", "answer"], seconds=1.7)    # -> WorkerReply

A worker runs the item `first` (which loads a library, say) before it is given an item; after a kill it does so in a
background thread, when the item that caused the kill already has its reply. So a timeout is never the fault of a start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rlvr.sandbox.worker import Worker, WorkerReply

WARM_SECONDS = 60.0  # that a new worker may take to load its library, on a busy machine


class WarmPool:
    """At most `count` workers, started when they are needed; `spare` starts one more than that."""

    def __init__(self, make: Callable[[], Worker], count: int, setup: Any, first: Any, spare: bool = False) -> None:
        self._make, self._setup, self._first = make, setup, first
        self._free = threading.Semaphore(count)
        self.idle: list[Worker] = []  # warm ones, and perhaps not started; append and pop are atomic
        self._spare = threading.Lock()  # locked once, by the first thread that asks
        if not spare:
            self._spare.acquire()

    def ask(self, setup: Any, item: Any, seconds: float) -> WorkerReply:
        """The reply to an item. The failure `not_started` is not the fault of the item; every other is."""
        self._free.acquire()
        if self._spare.acquire(blocking=False) and self._free.acquire(blocking=False):
            self._in_background(self._make())  # so that a kill costs the next item no time either
        worker = self._take_worker()
        is_warm = False
        try:
            reply = self.warm_up(worker)
            if reply.failure:
                return WorkerReply(None, "not_started", f"{reply.failure}: {reply.detail}")
            (reply,) = worker.map(setup, [item], seconds)
            is_warm = reply.failure in ("", "raised")
            return reply
        finally:
            if is_warm:
                self._give_back(worker)
            else:
                self._in_background(worker)

    def warm_up(self, worker: Worker) -> WorkerReply:
        return worker.map(self._setup, [self._first], WARM_SECONDS)[0]

    def _take_worker(self) -> Worker:
        try:
            return self.idle.pop()
        except IndexError:
            return self._make()

    def _in_background(self, worker: Worker) -> None:
        threading.Thread(target=self._warm_again, args=(worker,), daemon=True).start()

    def _warm_again(self, worker: Worker) -> None:
        try:
            self.warm_up(worker)
        finally:
            self._give_back(worker)

    def _give_back(self, worker: Worker) -> None:
        self.idle.append(worker)
        self._free.release()
