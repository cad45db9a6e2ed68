"""The sandbox's pool of workers: verifications wait in a fair queue until one of the pairs is free.

Owners (`rlvr.core.fair_queue.current_owner`) take turns, and so do the calls of one owner: another program waits for
one that runs, never for all that were sent before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlvr.core.fair_queue import FairQueue, current_owner
from rlvr.sandbox.processes import Pair
from rlvr.sandbox.verdict import Verdict
from rlvr.sandbox.verification_job import VerificationJob


@dataclass(eq=False)
class QueuedVerification:
    """A verification that waits, or that runs on `pair`."""

    job: VerificationJob
    future: Future[Verdict] = field(default_factory=Future[Verdict])
    pair: Pair | None = None


class VerificationPool(Protocol):
    """What a `Sandbox` needs of the workers that judge: here or on a Ray cluster (`rlvr.sandbox.ray_pool`)."""

    closed: bool

    @property
    def running(self) -> int:
        """How many verifications run now."""
        ...

    def submit(self, jobs: Sequence[VerificationJob]) -> list[Any]: ...

    def cancel(self, verifications: Sequence[Any]) -> None: ...

    def close(self) -> None: ...

    def renew(self) -> None: ...


class WorkerPool:
    """Runs `judge` on one thread for each of the `pairs`."""

    def __init__(self, pairs: Sequence[Pair], judge: Callable[[Pair, VerificationJob], Verdict]) -> None:
        self._pairs, self._judge = pairs, judge
        self.closed = False
        self.renew()

    def renew(self) -> None:
        """Forget threads and queue: those of a forked copy belong to the original process."""
        self._lock = threading.Lock()
        self._waiting = FairQueue[QueuedVerification]()
        self._free = list(reversed(self._pairs))  # the last used has the warmest caches
        self._threads = ThreadPoolExecutor(len(self._pairs), thread_name_prefix="sandbox")

    @property
    def running(self) -> int:
        return len(self._pairs) - len(self._free)

    def submit(self, jobs: Sequence[VerificationJob]) -> list[QueuedVerification]:
        """Queue the jobs of one call, for the current owner."""
        if self.closed:
            raise ValueError("this Sandbox is closed: make another")
        queued, owner = [QueuedVerification(job) for job in jobs], current_owner()
        with self._lock:
            for one in queued:
                self._waiting.add(owner, id(queued), one)
        for _ in queued:
            self._threads.submit(self._serve_next)
        return queued

    def _serve_next(self) -> None:
        """Judge the next verification in turn: not always the one that this call was made for."""
        with self._lock:
            one = self._waiting.pop()
            if one is None or not one.future.set_running_or_notify_cancel():
                return
            pair = one.pair = self._free.pop()
            pair.interrupted = self.closed
        try:
            verdict = self._judge(pair, one.job)
        except BaseException as error:
            self._release(one)
            one.future.set_exception(error)
        else:
            self._release(one)
            one.future.set_result(verdict)

    def _release(self, one: QueuedVerification) -> None:
        assert one.pair is not None
        with self._lock:
            self._free.append(one.pair)
            one.pair = None

    def cancel(self, verifications: Sequence[QueuedVerification]) -> None:
        """Drop those that wait, and kill those that run, whose verdicts are then errors. Does not wait for them."""
        chosen = set(verifications)
        with self._lock:
            dropped = self._waiting.remove(chosen.__contains__)
            for one in chosen:
                if one.pair is not None:
                    one.pair.interrupt()
        for one in dropped:
            one.future.cancel()
            one.future.set_running_or_notify_cancel()

    def close(self) -> None:
        """End all processes, when every verification has its verdict."""
        with self._lock:
            self.closed = True
            for pair in self._pairs:
                pair.interrupt()
        self._threads.shutdown()
        for pair in self._pairs:
            pair.stop()
