"""Training runs as clients see them: made, loaded, and sent requests, each with a seq_id.

A request is in the log, synced to disk, before its id is given out; sent again under its seq_id it is the same
request, and another request under that seq_id is refused. One that the log could not take, for want of space, is
refused too, and may be sent again; when a later one comes instead it uses up its seq_id, as one that failed. Exercised
by tests/test_tinker_core.py and tests/test_tinker_core_restart.py.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlvr import draws
from rlvr.service.tinker_api.checkpoints import Checkpoints
from rlvr.service.tinker_api.errors import Busy, Gone, NotFound, UserError
from rlvr.service.tinker_api.limits import ServerLimits
from rlvr.service.tinker_api.operations import Broken, Create, LoadWeights, Operation, digest, encode, weight
from rlvr.service.tinker_api.policies import Lane, Waiting, lane_of, training_request
from rlvr.service.tinker_api.promises import Promises
from rlvr.service.tinker_api.store import Entry, Row, Store
from rlvr.service.tinker_api.tenants import Quota
from rlvr.service.tinker_api.worker import Worker

log = logging.getLogger(__name__)
ALPHA = 32.0  # the protocol has no word for it: the default of `rlvr.engine.options.LoraConfig`


class Runs:
    def __init__(
        self,
        store: Store,
        promises: Promises,
        quota: Quota,
        checkpoints: Checkpoints,
        workers: Mapping[str, Worker],
        limits: ServerLimits,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._promises, self._quota, self._checkpoints = store, promises, quota, checkpoints
        self._workers, self._limits, self._clock = workers, limits, clock
        self._lanes: dict[str, Lane] = {}
        self._lock = threading.Lock()

    def resume(self) -> None:
        """After a restart: every run with requests in its log takes them up again."""
        for row in self._store.all("SELECT * FROM models WHERE id IN (SELECT DISTINCT model FROM log)"):
            if row["base_model"] in self._workers:
                lane = self._lanes[row["id"]] = lane_of(row, self._store, self._promises)
                log.info("%s: %d requests to run again", lane.model, len(lane.queue))
                self._workers[lane.base_model].ready(lane)

    def session(self, owner: str, session_id: str) -> Row:
        row = self._store.one("SELECT * FROM sessions WHERE id = ? AND owner = ?", session_id, owner)
        if row is None:
            raise Gone(f"session {session_id[:200]!r} is unknown here; make a new ServiceClient")
        return row

    def create_model(
        self,
        owner: str,
        session_id: str,
        model_seq_id: int,
        base_model: str,
        lora: dict[str, Any] | None,
        user_metadata: dict[str, Any] | None = None,
    ) -> str:
        """A training run with fresh adapter weights; its id is `{session_id}:train:{model_seq_id}`."""
        if lora is None:
            raise UserError("lora_config is missing: this server trains LoRA adapters only")
        rank = lora.get("rank", 32)
        if type(rank) is not int or not 1 <= rank <= self._limits.max_rank:
            raise UserError(f"lora_config: rank {rank!r}, expected 1 to {self._limits.max_rank}")
        model = f"{session_id}:train:{model_seq_id}"
        seed = lora.get("seed")
        seed = draws.key("weights of a run", model) if seed is None else int(seed)
        attn, mlp, unembed = (bool(lora.get(f"train_{part}", True)) for part in ("attn", "mlp", "unembed"))
        create = Create(rank, ALPHA, seed, attn, mlp, unembed)
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
    ) -> str:
        """Into a run (`model_id`, `seq_id`), or as a new run of its own (`session_id`, `model_seq_id`)."""
        if model_id is not None and seq_id is not None and session_id is None:
            return self.submit(owner, model_id, seq_id, LoadWeights(path, optimizer))
        if session_id is None or model_seq_id is None or model_id is not None:
            raise UserError("load_weights: expected model_id and seq_id, or session_id and model_seq_id")
        _, row = self._checkpoints.find(owner, path)
        if base_model not in (None, row["base_model"]):
            raise UserError(f"{path} was trained on {row['base_model']}, and base_model {base_model!r} is asked for")
        create = Create(row["rank"], seed=0, path=path, optimizer=optimizer, **json.loads(row["lora"]))
        model = f"{session_id}:train:{model_seq_id}"
        return self._create(owner, session_id, model, row["base_model"], create, user_metadata)

    def _create(
        self, owner: str, session_id: str, model: str, base_model: str, create: Create, metadata: dict[str, Any] | None
    ) -> str:
        self.session(owner, session_id)
        if base_model not in self._workers:
            raise UserError(f"base_model {base_model!r} is not served here; served: {', '.join(self._workers)}")
        with self._lock:
            choice = {"alpha": create.alpha, "attn": create.attn, "mlp": create.mlp, "unembed": create.unembed}
            wanted = (base_model, create.rank, json.dumps(choice))
            known = self._store.one("SELECT base_model, rank, lora FROM models WHERE id = ?", model)
            if known is not None and tuple(known.values()) != wanted:
                raise UserError(f"model_seq_id of {model} was another training run; one is used once")
            if known is None:
                now = self._clock()
                row = {
                    "id": model, "session": session_id, "owner": owner, "base_model": base_model, "rank": create.rank,
                    "lora": wanted[2], "metadata": json.dumps(metadata) if metadata else None,
                    "created": now, "last_request": now, "snapshot_seq": -1,
                }  # fmt: skip
                self._store.insert("models", row)
        return self._submit(self._lane(owner, model), 0, create)

    def submit(self, owner: str, model_id: str, seq_id: int, operation: Operation) -> str:
        """Log a request of a training run, to be run in its turn; the id to ask for its result by."""
        if type(seq_id) is not int or seq_id < 1:
            raise UserError(f"seq_id {seq_id!r}: expected a whole number, at least 1")
        return self._submit(self._lane(owner, model_id), seq_id, operation)

    def _submit(self, lane: Lane, seq: int, operation: Operation) -> str:
        asked, request_id = digest(operation), training_request(lane.model, seq)
        kind, body, encoding = encode(operation)
        with lane.lock:
            if (known := self._known(lane, seq)) is not None:
                if known not in ("", asked):
                    raise UserError(f"seq_id {seq} of {lane.model} was another request; a seq_id is used once")
                return request_id
            if failed := lane.failures.get(0):
                raise UserError(f"this training run could not be made: {failed.error}")
            awaited, size = seq == lane.next_seq, weight(operation)  # what others wait for always gets in
            if not awaited and max(len(lane.queue), seq - lane.next_seq) >= self._limits.lane_requests:
                raise Busy(
                    f"{len(lane.queue)} requests of this training run are waiting (the next one is {lane.next_seq})"
                )
            held = self._quota.take(lane.owner, size, awaited=awaited)
            refused = {n: Broken(reason, "server") for n, reason in lane.unlogged.items() if n != seq}
            try:
                with self._store.transaction():
                    for n, broken in refused.items():
                        self._store.log(Entry(lane.model, n, encode(broken)[0], digest(broken), encode(broken)[1]))
                    self._store.log(Entry(lane.model, seq, kind, asked, body, encoding))
                    self._store.run("UPDATE models SET last_request = ? WHERE id = ?", self._clock(), lane.model)
            except BaseException as error:
                self._quota.give(lane.owner, size)
                lane.unlogged[seq] = str(error)
                raise
            lane.unlogged.clear()
            for n, broken in refused.items():
                self._queue(lane, n, digest(broken), 0, broken)
            kept = operation if awaited or held <= self._limits.parsed_bytes else None
            self._queue(lane, seq, asked, len(body), kept, partial(self._quota.give, lane.owner, size))
        self._workers[lane.base_model].ready(lane)
        return request_id

    def _queue(
        self,
        lane: Lane,
        seq: int,
        asked: str,
        size: int,
        operation: Operation | None,
        over: Callable[[], None] | None = None,
    ) -> None:
        promise = self._promises.open(training_request(lane.model, seq), lane.owner, pinned=True)
        assert promise is not None
        lane.queue[seq] = Waiting(asked, promise, size, time.monotonic(), operation, over)

    def _known(self, lane: Lane, seq: int) -> str | None:
        """The digest of a request that was sent before ('' where that is forgotten), None for a new one."""
        if seq in lane.queue:
            return lane.queue[seq].digest
        if seq in lane.done:
            return lane.done[seq][0].digest
        if seq < lane.next_seq or seq in lane.failures:
            stored = self._store.result(lane.model, seq)
            return stored[0] if stored else ""
        return None

    def _lane(self, owner: str, model_id: str) -> Lane:
        with self._lock:
            lane = self._lanes.get(model_id)
            if lane is None:
                row = self._store.one("SELECT * FROM models WHERE id = ? AND owner = ?", model_id, owner)
                if row is not None and row["base_model"] not in self._workers:
                    raise NotFound(f"{model_id} is on {row['base_model']}, which is not served at the moment")
                if row is not None:
                    lane = self._lanes[model_id] = lane_of(row, self._store, self._promises)
            if lane is None or lane.owner != owner:
                raise NotFound(f"training run {model_id[:200]!r} is unknown")
            return lane
