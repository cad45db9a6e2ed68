"""Executes the requests of training runs, one at a time, and turns exceptions into failures that the client gets.

A request that fails changes nothing and uses up its seq_id. A wrong request is a `user` failure; a full disk, a lack
of memory or a bug is a `server` failure. After a failure in the middle of an update, or one that left weights that
are not finite, the adapter is restored from its snapshot and log. Only the engine thread calls these.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from rlvr.core.messages import NonFiniteError
from rlvr.tinker_server.backend.request_futures import FutureRegistry, Outcome, RequestFailure
from rlvr.tinker_server.backend.runs import run_operations as ops
from rlvr.tinker_server.backend.runs.adapter_cache import AdapterCache, FinishedRequest, QueuedRequest, RunQueue
from rlvr.tinker_server.backend.runs.run_worker import DivergedStep, RunWorker
from rlvr.tinker_server.backend.storage.checkpoints import Checkpoints
from rlvr.tinker_server.backend.storage.server_store import ServerStore
from rlvr.tinker_server.protocol.errors import TinkerServerError

log = logging.getLogger(__name__)
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
MAX_ERROR_CHARS = 2_000  # an error may quote what a client sent


@dataclass
class EngineCounters:
    """What an engine did since the server started. Only the engine thread writes. `requests`: number and seconds of
    each kind, without the sampling in between."""

    sampled_tokens: int = 0
    trained_tokens: int = 0
    sampling_seconds: float = 0.0
    requests: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    def add_request(self, kind: str, seconds: float) -> None:
        count, before = self.requests.get(kind, (0, 0.0))
        self.requests[kind] = (count + 1, before + seconds)


@dataclass(eq=False)
class RunExecutor:
    _store: ServerStore
    _futures: FutureRegistry
    _adapters: AdapterCache
    _checkpoints: Checkpoints
    worker: RunWorker
    counters: EngineCounters = field(default_factory=EngineCounters)
    paused_seconds: float = 0.0  # of calls between micro-batches, which a request is not charged for

    def __post_init__(self) -> None:
        self._adapters.replay = lambda run, entry: ops.decode(entry).replay(self.worker, run)

    def run_next(self, run: RunQueue) -> None:
        """Execute the run's next request and resolve its future."""
        begun, seq, queued = time.monotonic(), run.next_seq, run.queue[run.next_seq]
        paused_before = self.paused_seconds
        self._adapters.in_use.append(run)
        operation, is_damaged = queued.operation, False
        try:
            if operation is None:
                entry = self._store.log_entry(run.model, seq)
                assert entry is not None
                operation = ops.decode(entry)
            if not isinstance(operation, ops.CreateRun):
                self._adapters.get(run)
            outcome: Outcome = operation.execute(self.worker, run, seq)
        except Exception as error:
            outcome, is_damaged = classify_error(error)
            if is_damaged:
                log.exception("%s: request %d failed", run.model, seq)
        finally:
            self._adapters.in_use.remove(run)
        took = time.monotonic() - begun - (self.paused_seconds - paused_before)
        run.compute_seconds += took
        self._count(operation, outcome, took)
        self.finish(run, seq, queued, outcome)
        if is_damaged:
            self._adapters.drop(run)
        else:
            # A loaded checkpoint may be deleted or replaced, so the run keeps its own copy.
            is_load = isinstance(operation, (ops.CreateRun, ops.LoadWeights)) and operation.path
            if (is_load and not isinstance(outcome, RequestFailure)) or self._adapters.needs_snapshot(run):
                self._adapters.snapshot(run)

    def _count(self, operation: ops.RunOperation | None, outcome: Outcome, seconds: float) -> None:
        is_forward = isinstance(operation, ops.ForwardBackward) and operation.forward_only
        kind = "forward" if is_forward else "unreadable" if operation is None else operation.log_name
        self.counters.add_request(kind, seconds)
        if isinstance(operation, ops.ForwardBackward) and not isinstance(outcome, RequestFailure):
            self.counters.trained_tokens += sum(datum.model_input.length for datum in operation.data)

    def finish(self, run: RunQueue, seq: int, queued: QueuedRequest, outcome: Outcome) -> None:
        """Record a request's outcome and resolve its future; the next request may run."""
        if isinstance(outcome, RequestFailure):
            try:
                self._store.record_failure(run.model, seq, queued.digest, outcome)
            except Exception as error:  # the client gets it all the same
                log.warning("%s: the failure of request %d could not be recorded: %s", run.model, seq, error)
        with run.lock:
            run.queue.pop(seq, None)
            run.done[seq] = FinishedRequest(queued, outcome)
            run.log_bytes += queued.size + queued.future.size
            if isinstance(outcome, RequestFailure):
                run.failures[seq] = outcome
            if seq == run.next_seq:
                run.next_seq += 1
                run.skip_failures()
        queued.operation = None
        if queued.release_quota is not None:
            queued.release_quota()
        self._futures.resolve(queued.future, outcome)

    def remove_run_state(self, run: str) -> None:
        self._checkpoints.remove_run_state(run)


class ClassifiedError(NamedTuple):
    failure: RequestFailure
    is_damaged: bool  # whether the error may have left the adapter half changed


def classify_error(error: Exception) -> ClassifiedError:
    """The failure that the client gets for an exception."""
    if isinstance(error, TinkerServerError):
        return ClassifiedError(RequestFailure(str(error), error.category), isinstance(error, DivergedStep))
    if isinstance(error, NonFiniteError):
        detail = f"{error}; the weights and the gradients before this request are kept"
        return ClassifiedError(RequestFailure(detail, "user"), False)
    if isinstance(error, ValueError):
        return ClassifiedError(RequestFailure(str(error)[:MAX_ERROR_CHARS], "user"), False)
    hidden = re.search(r"\(os error (\d+)\)", str(error))  # safetensors puts the system's error into its message
    if isinstance(error, OSError) or hidden:
        number = int(hidden[1]) if hidden else getattr(error, "errno", None)
        why = os.strerror(number) if number else str(error)
        is_full = number in DISK_FULL_ERRORS
        fault = "the server's disk is full" if is_full else f"the server cannot write or read its files ({why})"
        return ClassifiedError(RequestFailure(f"{fault}; nothing was saved", "server"), False)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        detail = "the server has not enough memory for this request; send fewer or shorter rows"
    else:
        detail = f"the server failed at this request: {type(error).__name__}: {error}"
    return ClassifiedError(RequestFailure(detail, "server"), True)
