"""Training runs as they live in the engine, and their way to disk and back.

A `RunQueue` is one run: its requests in order of seq_id, and its adapter while that is in memory. A snapshot is a
folder `live/<seq>` with weights, optimizer and accumulated gradients after request `seq`. Replaying the log from there
gives the same bits, since a run's gradients depend on nothing but its own requests. This restores a run after a
restart, after its adapter was evicted, and after an update that failed half way.

Only the engine thread calls these.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlvr.core.files import new_folder
from rlvr.tinker_server.backend.request_futures import FutureRegistry, Outcome, RequestFailure, ResultFuture
from rlvr.tinker_server.backend.storage.disk_usage import DiskAccounts
from rlvr.tinker_server.backend.storage.paths import run_folder
from rlvr.tinker_server.backend.storage.server_store import LogEntry, Row, ServerStore, StoredResult
from rlvr.tinker_server.protocol.errors import UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine
    from rlvr.engine.policy import Policy

log = logging.getLogger(__name__)


@dataclass(eq=False)
class QueuedRequest:
    """A logged request. `operation` is one of `run_operations.py`, or None after a restart: it is read from the log in
    its turn.
    """

    digest: str
    future: ResultFuture
    size: int
    queued_at: float
    operation: Any = None
    release_quota: Callable[[], None] | None = None


class FinishedRequest(NamedTuple):
    request: QueuedRequest
    outcome: Outcome


@dataclass(eq=False)
class RunQueue:
    """One training run. Requests below `next_seq` are executed; those up to `snapshot_seq` have left the log."""

    model: str
    owner: str
    base_model: str
    snapshot_seq: int
    next_seq: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    queue: dict[int, QueuedRequest] = field(default_factory=dict[int, QueuedRequest])
    done: dict[int, FinishedRequest] = field(default_factory=dict[int, FinishedRequest])
    failures: dict[int, RequestFailure] = field(default_factory=dict[int, RequestFailure])
    unlogged: dict[int, str] = field(default_factory=dict[int, str])  # requests the log could not take, and why
    is_deleted: bool = False
    policy: Policy | None = None
    steps: int = 0  # optimizer steps since the snapshot
    log_bytes: int = 0  # of log and results since then
    compute_seconds: float = 0.0  # since then: what replaying the log would take
    snapshot_seconds: float = 0.0  # that writing the snapshot took
    last_used: float = 0.0

    @property
    def loaded_policy(self) -> Policy:
        """The weights and the optimizer of the run, which `AdapterCache` has loaded for the request under way."""
        assert self.policy is not None
        return self.policy

    def skip_failures(self) -> None:
        while self.next_seq in self.failures:
            self.next_seq += 1

    @property
    def is_ready(self) -> bool:
        return self.next_seq in self.queue


def load_run_queue(row: Row, store: ServerStore, futures: FutureRegistry) -> RunQueue:
    """Build a run from its records: the requests in its log wait to be executed (again)."""
    now = time.monotonic()
    run = RunQueue(
        row["id"], row["owner"], row["base_model"], row["snapshot_seq"], row["snapshot_seq"] + 1, last_used=now
    )
    run.failures = store.recorded_failures(run.model)
    for entry in store.log_index(run.model):
        seq, request_id = entry["seq"], training_request_id(run.model, entry["seq"])
        future = futures.create(request_id, run.owner, pinned=True) or futures.find(request_id)
        assert future is not None
        queued = QueuedRequest(entry["digest"], future, entry["size"], now)
        if seq in run.failures:
            run.done[seq] = FinishedRequest(queued, run.failures[seq])
            futures.resolve(future, run.failures[seq])
        else:
            run.queue[seq] = queued
    run.skip_failures()
    return run


def training_request_id(model: str, seq: int) -> str:
    """The id of a run's request, the same whenever it is sent again."""
    return f"{model}:{seq}"


class AdapterCache:
    def __init__(
        self,
        engine: Engine,
        store: ServerStore,
        futures: FutureRegistry,
        root: Path,
        limits: ServerLimits,
        disk: DiskAccounts,
    ) -> None:
        self._engine, self._store, self._futures, self._root, self._limits = engine, store, futures, root, limits
        self._disk = disk
        self._in_memory: OrderedDict[str, RunQueue] = OrderedDict()  # least recently used first
        self.in_use: list[RunQueue] = []  # whose requests are being executed
        # Applies one entry of the log to a policy, without its result; `executor.py` sets it.
        self.replay: Callable[[RunQueue, LogEntry], None] | None = None

    def __len__(self) -> int:
        """The adapters in memory."""
        return len(self._in_memory)

    def folder(self, run: RunQueue, seq: int) -> Path:
        return run_folder(self._root, run.model) / "live" / str(seq)

    def get(self, run: RunQueue) -> Policy:
        """The run's adapter, restored if it is not in memory; UserError if it was never made."""
        if run.policy is None:
            self._restore(run)
        assert run.policy is not None
        self._in_memory[run.model] = run
        self._in_memory.move_to_end(run.model)
        run.last_used = time.monotonic()
        return run.policy

    def create(self, run: RunQueue, config: Any, seed: int) -> Policy:
        """Make a new adapter, evicting others if memory is full."""
        while len(self._in_memory) >= self._limits.live_policies and self._evict_one(run):
            pass
        run.policy = self._engine.create_policy(run.model, lora=config, seed=seed)
        self._in_memory[run.model] = run
        if (most := self._limits.live_bytes) is not None:
            while sum(map(measure_adapter, self._in_memory.values())) > most and self._evict_one(run):
                pass
        return run.policy

    def _evict_one(self, new: RunQueue) -> bool:
        """Evict the adapter that was not used for the longest time; False if all are in use."""
        unused = (run for run in self._in_memory.values() if run is not new and run not in self.in_use)
        if (run := next(unused, None)) is None:
            return False
        self.evict(run)
        return True

    def _restore(self, run: RunQueue) -> None:
        from rlvr.engine.checkpoint import load_policy
        from rlvr.engine.value_head import add_value_head

        if (failed := run.failures.get(0)) is not None:
            raise UserError(f"this training run was never made: {failed.error}")
        begun = time.monotonic()
        try:
            if run.snapshot_seq >= 0:
                row = self._store.fetch_one("SELECT lora, rank FROM models WHERE id = ?", run.model)
                assert row is not None
                choice = json.loads(row["lora"])
                policy = self.create(run, lora_config(self._engine, row["rank"], choice), seed=0)
                if choice.get("critic"):
                    add_value_head(policy, self._engine.model)
                folder = self.folder(run, run.snapshot_seq)
                load_policy(folder, policy, self._engine.model, optimizer=True, gradients=True)
            for seq in range(run.snapshot_seq + 1, run.next_seq):
                if seq not in run.failures:
                    entry = self._store.log_entry(run.model, seq)
                    assert entry is not None and self.replay is not None
                    self.replay(run, entry)
        except BaseException:
            self.drop(run)
            raise
        if run.policy is None:
            raise UserError("this training run was never made: send create_model first")
        log.info("%s: restored at seq_id %d in %.2f s", run.model, run.next_seq - 1, time.monotonic() - begun)

    def drop(self, run: RunQueue) -> None:
        """Drop the adapter from memory; the next request restores it from disk."""
        if run.policy is not None:
            self._engine.drop_policy(run.model)
        run.policy = None
        self._in_memory.pop(run.model, None)

    def forget(self, run: RunQueue) -> None:
        """Drop a deleted run, without a snapshot."""
        self.drop(run)
        with run.lock:
            for finished in run.done.values():
                self._futures.unpin(finished.request.future)
            run.done.clear()

    def evict(self, run: RunQueue) -> None:
        """Write the adapter to disk and drop it. If writing fails, the older snapshot and the log remain."""
        self.snapshot(run)
        self.drop(run)

    def needs_snapshot(self, run: RunQueue) -> bool:
        """Whether the log is long enough for a snapshot, and writing one takes a small share of the time."""
        enough = (
            run.steps >= self._limits.snapshot_steps
            and run.compute_seconds * self._limits.snapshot_share >= run.snapshot_seconds
        )
        return enough or run.log_bytes >= self._limits.snapshot_bytes

    def snapshot(self, run: RunQueue) -> None:
        """Write the run's state, then truncate its log. If that fails the log stays, and nothing is lost."""
        from rlvr.engine.checkpoint import save_policy

        seq, begun = run.next_seq - 1, time.monotonic()
        if run.policy is None or seq <= run.snapshot_seq:
            return
        try:
            with new_folder(self.folder(run, seq)) as folder:
                model = self._engine.model
                save_policy(folder, run.policy, model, optimizer=True, gradients=True, tokenizer=False)
            with run.lock:
                over = [n for n in run.done if n <= seq]
                results = {n: StoredResult(run.done[n].request.digest, run.done[n].outcome) for n in over}
                self._store.truncate_log(run.model, seq, results)
                for n in over:
                    self._futures.unpin(run.done.pop(n).request.future)
        except Exception as error:
            log.warning("%s: no snapshot at seq_id %d: %s; the log is kept", run.model, seq, error)
            run.steps, run.log_bytes, run.compute_seconds = 0, 0, 0.0  # try again after as many more steps
            shutil.rmtree(self.folder(run, seq), ignore_errors=True)
            return
        old, run.snapshot_seq, run.steps, run.log_bytes, run.compute_seconds = run.snapshot_seq, seq, 0, 0, 0.0
        run.snapshot_seconds = time.monotonic() - begun
        run.failures = {n: failed for n, failed in run.failures.items() if n > seq}
        shutil.rmtree(self.folder(run, old), ignore_errors=True)
        self._disk.refresh(run.model)

    def evict_idle(self, idle_since: float) -> None:
        """Evict adapters without queued requests, last used before `idle_since` (monotonic seconds)."""
        for run in list(self._in_memory.values()):
            if run.last_used < idle_since and not run.queue:
                self.evict(run)

    def close(self) -> None:
        for run in list(self._in_memory.values()):
            self.evict(run)


def measure_adapter(run: RunQueue) -> int:
    """The bytes of a run's adapter in memory: weights, gradients and the two moments of AdamW."""
    assert run.policy is not None
    return sum(4 * master.numel() * master.element_size() for master in run.policy.masters.values())


def lora_config(engine: Engine, rank: int, choice: dict[str, Any]) -> Any:
    """The adapter for the parts of the model that a client trains."""
    from rlvr.engine.engine_options import LoraConfig
    from rlvr.engine.lora import lora_targets

    names = lora_targets(engine.model, attn=choice["attn"], mlp=choice["mlp"], unembed=choice["unembed"])
    return LoraConfig(rank=rank, alpha=choice["alpha"], targets=tuple(names))
