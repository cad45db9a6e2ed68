"""Training runs as clients see them: created, loaded, and sent requests, each with a seq_id.

A request is in the log, synced to disk, before its id is returned. Sent again under its seq_id it is the same request;
another request under that seq_id is refused. A request that the log could not take, for lack of disk space, is refused
too and may be sent again; if a later request comes instead, it counts as failed.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlvr.core import rng
from rlvr.tinker_server.backend.quotas import OwnerQuotas
from rlvr.tinker_server.backend.request_futures import FutureRegistry
from rlvr.tinker_server.backend.runs.adapter_cache import QueuedRequest, RunQueue, load_run_queue, training_request_id
from rlvr.tinker_server.backend.runs.engine_thread import EngineThread
from rlvr.tinker_server.backend.runs.run_operations import (
    CreateRun,
    LoadWeights,
    RejectedOperation,
    RunOperation,
    encode,
    memory_bytes,
)
from rlvr.tinker_server.backend.storage.checkpoints import Checkpoints
from rlvr.tinker_server.backend.storage.client_sessions import ClientSessions
from rlvr.tinker_server.backend.storage.disk_usage import DiskAccounts
from rlvr.tinker_server.backend.storage.server_store import KEPT, LogEntry, ServerStore
from rlvr.tinker_server.protocol.errors import Busy, NotFound, UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits

log = logging.getLogger(__name__)
ALPHA = 32.0  # the protocol has no field for it: the default of `rlvr.engine.engine_options.LoraConfig`


@dataclass(eq=False)
class TrainingRuns:
    _store: ServerStore
    _sessions: ClientSessions
    _futures: FutureRegistry
    _quotas: OwnerQuotas
    _checkpoints: Checkpoints
    _disk: DiskAccounts
    _engine_threads: Mapping[str, EngineThread]
    _limits: ServerLimits
    _clock: Callable[[], float]
    _lanes: dict[str, RunQueue] = field(default_factory=dict[str, RunQueue])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def resume(self) -> None:
        """After a restart: schedule the requests in every run's log."""
        for row in self._store.fetch_all("SELECT * FROM models WHERE id IN (SELECT DISTINCT model FROM log)"):
            if row["base_model"] in self._engine_threads:
                run = self._lanes[row["id"]] = load_run_queue(row, self._store, self._futures)
                log.info("%s: %d requests to replay", run.model, len(run.queue))
                self._engine_threads[run.base_model].schedule(run)

    def create_model(
        self,
        owner: str,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora: dict[str, Any] | None,
        user_metadata: dict[str, Any] | None = None,
        model_role: str | None = None,
    ) -> str:
        """A training run with fresh adapter weights; its id is `{session_id}:train:{model_seq_id}`."""
        if lora is None:
            raise UserError("lora_config is missing: this server trains LoRA adapters only")
        rank = lora.get("rank", 32)
        if type(rank) is not int or not 1 <= rank <= self._limits.max_rank:
            raise UserError(f"lora_config: rank {rank!r}, expected 1 to {self._limits.max_rank}")
        model = f"{session_id}:train:{model_seq_id}"
        seed = lora.get("seed")
        seed = rng.key("weights of a run", model) if seed is None else int(seed)
        attn, mlp, unembed = (bool(lora.get(f"train_{part}", True)) for part in ("attn", "mlp", "unembed"))
        create = CreateRun(rank, ALPHA, seed, attn, mlp, unembed, critic=is_critic(model_role, user_metadata))
        return self._create(owner, session_id, model, base_model, create, user_metadata)

    def load_weights(
        self,
        owner: str,
        *,
        path: str,
        optimizer: bool,
        model_id: str | None = None,
        seq_id: int | None = None,
        session_id: str | None = None,
        model_seq_id: int | None = None,
        base_model: str | None = None,
        user_metadata: dict[str, Any] | None = None,
        model_role: str | None = None,
    ) -> str:
        """Load weights into a run (`model_id`, `seq_id`) or into a new run (`session_id`, `model_seq_id`)."""
        if model_id is not None and seq_id is not None and session_id is None:
            return self.submit(owner, model_id, seq_id, LoadWeights(path, optimizer))
        if session_id is None or model_seq_id is None or model_id is not None:
            raise UserError("load_weights: expected model_id and seq_id, or session_id and model_seq_id")
        _, row = self._checkpoints.find(owner, path)
        if base_model not in (None, row["base_model"]):
            raise UserError(f"{path} belongs to {row['base_model']}, not to base_model {base_model!r}")
        choice = json.loads(row["lora"])
        choice["critic"] = choice.get("critic", False) or is_critic(model_role, user_metadata)
        create = CreateRun(row["rank"], seed=0, path=path, optimizer=optimizer, **choice)
        model = f"{session_id}:train:{model_seq_id}"
        return self._create(owner, session_id, model, row["base_model"], create, user_metadata)

    def _create(
        self,
        owner: str,
        session_id: str,
        model: str,
        base_model: str,
        create: CreateRun,
        metadata: dict[str, Any] | None,
    ) -> str:
        self._sessions.find(owner, session_id)
        if base_model not in self._engine_threads:
            raise UserError(f"base_model {base_model!r} is not served here; served: {', '.join(self._engine_threads)}")
        self._disk.measure_owner(owner)  # here first: it may take long, and every request needs the lock
        with self._lock:
            choice = {"alpha": create.alpha, "attn": create.attn, "mlp": create.mlp, "unembed": create.unembed}
            choice |= {"critic": True} if create.critic else {}
            setup = (base_model, create.rank, json.dumps(choice))
            existing = self._store.fetch_one("SELECT base_model, rank, lora FROM models WHERE id = ?", model)
            if existing is not None and tuple(existing.values()) != setup:
                raise UserError(f"model_seq_id names the training run {model} already; give the next number")
            if existing is None:
                self._disk.check_new_run(owner)
                now = self._clock()
                row = {
                    "id": model, "session": session_id, "owner": owner, "base_model": base_model, "rank": create.rank,
                    "lora": setup[2], "metadata": json.dumps(metadata) if metadata else None,
                    "created": now, "last_request": now, "snapshot_seq": -1,
                }  # fmt: skip
                self._store.insert("models", row)
        return self._submit(self._find_run(owner, model), 0, create)

    def delete(self, owner: str, model_id: str) -> None:
        """Delete a run with its state, log, results and unnamed weights. Its named checkpoints stay."""
        run = self._find_run(owner, model_id)
        with run.lock:
            if run.queue:
                raise UserError(f"{len(run.queue)} requests of {model_id} wait or run; delete it when they are done")
            self._store.insert("deleted_runs", {"id": model_id}, replace=True)
            run.is_deleted = True
        self._engine_threads[run.base_model].delete(run)

    def count_queued(self) -> Counter[str]:
        """The requests that wait or run, by base model."""
        with self._lock:
            runs = list(self._lanes.values())
        queued = Counter[str]()
        for run in runs:
            queued[run.base_model] += len(run.queue)
        return queued

    def submit(self, owner: str, model_id: str, seq_id: int, operation: RunOperation) -> str:
        """Log a request of a training run, to be executed in its turn; returns the id of its result."""
        if type(seq_id) is not int or seq_id < 1:
            raise UserError(f"seq_id {seq_id!r}: expected a whole number, at least 1")
        return self._submit(self._find_run(owner, model_id), seq_id, operation)

    def _submit(self, run: RunQueue, seq: int, operation: RunOperation) -> str:
        entry, request_id = encode(run.model, seq, operation), training_request_id(run.model, seq)
        with run.lock:
            if run.is_deleted:
                raise NotFound(f"training run {run.model} was deleted")
            if (existing := self._find_digest(run, seq)) is not None:
                if existing not in ("", entry.digest):
                    raise UserError(f"seq_id {seq} of {run.model} was used for another request; give the next seq_id")
                return request_id
            if run.next_seq == 0 and (
                copied := self._store.fetch_one("SELECT source FROM copied_runs WHERE id = ?", run.model)
            ):
                raise UserError(
                    f"{run.model} is a copy of {copied['source']} and cannot be trained; make a run from the copy "
                    "(create_training_client_from_state)"
                )
            if failed := run.failures.get(0):
                raise UserError(f"this training run could not be made: {failed.error}")
            awaited, size = seq == run.next_seq, memory_bytes(operation)  # others wait for it: never refused
            if not awaited and max(len(run.queue), seq - run.next_seq) >= self._limits.lane_requests:
                raise Busy(
                    f"{len(run.queue)} requests of this training run are waiting (the next one is {run.next_seq})"
                )
            held = self._quotas.acquire(run.owner, size, awaited=awaited)
            refused = {n: RejectedOperation(reason, "server") for n, reason in run.unlogged.items() if n != seq}
            refused_entries = [encode(run.model, n, operation) for n, operation in refused.items()]
            try:
                with self._store.transaction():
                    for one in (*refused_entries, entry):
                        self._store.append(one)
                    self._store.execute("UPDATE models SET last_request = ? WHERE id = ?", self._clock(), run.model)
            except BaseException as error:
                self._quotas.release(run.owner, size)
                run.unlogged[seq] = str(error)
                raise
            run.unlogged.clear()
            for one in refused_entries:
                self._queue(run, one, 0, refused[one.seq])
            parsed = operation if awaited or held <= self._limits.parsed_bytes else None
            self._queue(run, entry, len(entry.body), parsed, partial(self._quotas.release, run.owner, size))
        self._engine_threads[run.base_model].schedule(run)
        return request_id

    def _queue(
        self,
        run: RunQueue,
        entry: LogEntry,
        size: int,
        operation: RunOperation | None,
        release_quota: Callable[[], None] | None = None,
    ) -> None:
        future = self._futures.create(training_request_id(run.model, entry.seq), run.owner, pinned=True)
        assert future is not None
        run.queue[entry.seq] = QueuedRequest(entry.digest, future, size, time.monotonic(), operation, release_quota)

    def _find_digest(self, run: RunQueue, seq: int) -> str | None:
        """The digest of a request that was sent before ('' if that was deleted), None for a new one."""
        if seq in run.queue:
            return run.queue[seq].digest
        if seq in run.done:
            return run.done[seq].request.digest
        if seq < run.next_seq or seq in run.failures:
            encode_outcome = self._store.find_result(run.model, seq)
            return encode_outcome[0] if encode_outcome else ""
        return None

    def _find_run(self, owner: str, model_id: str) -> RunQueue:
        with self._lock:
            run = self._lanes.get(model_id)
            if run is None:
                row = self._store.fetch_one(
                    f"SELECT * FROM models WHERE id = ? AND owner = ? AND {KEPT}", model_id, owner
                )
                if row is not None and row["base_model"] not in self._engine_threads:
                    raise NotFound(f"{model_id} is on {row['base_model']}, which is not served at the moment")
                if row is not None:
                    run = self._lanes[model_id] = load_run_queue(row, self._store, self._futures)
            if run is None or run.owner != owner or run.is_deleted:
                raise NotFound(f"training run {model_id[:200]!r} is unknown")
            return run


def is_critic(model_role: str | None, user_metadata: dict[str, Any] | None) -> bool:
    """Whether a new run is to be a critic: by `model_role`, or in the metadata where the SDK has no such field."""
    role = model_role or (user_metadata or {}).get("model_role") or "policy"
    if role not in ("policy", "critic"):
        raise UserError(f"model_role {str(role)[:80]!r}: expected policy or critic")
    return role == "critic"
