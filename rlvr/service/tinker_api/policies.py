"""Training runs as they live in the engine, and their way to disk and back.

A `Lane` is one run: its requests in order of seq_id, and its adapter while that is in memory. A snapshot is a folder
`live/<seq>` with weights, optimizer and accumulated gradients after request `seq`; from there, running the log again
gives the same bits, since a run's gradients depend on nothing but its own requests. A restart, an adapter that was put
aside while its client was idle, and one that broke half way through an update all come back on this road.

Only the worker's thread calls these. Exercised by tests/test_tinker_core_kill.py.
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
from typing import TYPE_CHECKING, Any

from rlvr.files import new_folder
from rlvr.service.tinker_api.checkpoints import run_folder
from rlvr.service.tinker_api.errors import UserError
from rlvr.service.tinker_api.limits import ServerLimits
from rlvr.service.tinker_api.operations import Operation, decode
from rlvr.service.tinker_api.promises import Failed, Outcome, Promise, Promises
from rlvr.service.tinker_api.store import Row, Store

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine
    from rlvr.engine.policy import Policy

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Waiting:
    """A logged request. `operation` is None after a restart: it is read from the log when its turn comes."""

    digest: str
    promise: Promise
    size: int
    since: float
    operation: Operation | None = None
    over: Callable[[], None] | None = None  # gives back what it holds of its owner's quota


@dataclass(eq=False)
class Lane:
    """One training run. Requests below `next_seq` are executed; those up to `snapshot_seq` have left the log."""

    model: str
    owner: str
    base_model: str
    snapshot_seq: int
    next_seq: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    queue: dict[int, Waiting] = field(default_factory=dict[int, Waiting])
    done: dict[int, tuple[Waiting, Outcome]] = field(default_factory=dict[int, tuple[Waiting, Outcome]])
    failures: dict[int, Failed] = field(default_factory=dict[int, Failed])
    unlogged: dict[int, str] = field(default_factory=dict[int, str])  # refused, and why: the log could not take them
    policy: Policy | None = None
    steps: int = 0  # optimizer steps since the snapshot
    bytes: int = 0  # of log and results since then
    busy: float = 0.0  # seconds computed since then: what running the log again would take
    cost: float = 0.0  # seconds the snapshot took
    used: float = 0.0

    def skip_failures(self) -> None:
        while self.next_seq in self.failures:
            self.next_seq += 1

    @property
    def ready(self) -> bool:
        return self.next_seq in self.queue


def lane_of(row: Row, store: Store, promises: Promises) -> Lane:
    """A run as its records have it: what is in the log waits to be run (again)."""
    now = time.monotonic()
    lane = Lane(row["id"], row["owner"], row["base_model"], row["snapshot_seq"], row["snapshot_seq"] + 1, used=now)
    lane.failures = store.failures(lane.model)
    for entry in store.logged(lane.model):
        seq, request_id = entry["seq"], training_request(lane.model, entry["seq"])
        promise = promises.open(request_id, lane.owner, pinned=True) or promises.find(request_id)
        assert promise is not None
        waiting = Waiting(entry["digest"], promise, entry["size"], now)
        if seq in lane.failures:
            lane.done[seq] = (waiting, lane.failures[seq])
            promises.resolve(promise, lane.failures[seq])
        else:
            lane.queue[seq] = waiting
    lane.skip_failures()
    return lane


def training_request(model: str, seq: int) -> str:
    """The id of a run's request: asked again, it is the same one."""
    return f"{model}:{seq}"


class Policies:
    def __init__(self, engine: Engine, store: Store, promises: Promises, root: Path, limits: ServerLimits) -> None:
        self._engine, self._store, self._promises, self._root, self._limits = engine, store, promises, root, limits
        self._live: OrderedDict[str, Lane] = OrderedDict()  # least recently used first
        # How one operation changes a policy, without its result: `training.py` puts it here.
        self.redo: Callable[[Lane, Operation], None] | None = None

    def folder(self, lane: Lane, seq: int) -> Path:
        return run_folder(self._root, lane.model) / "live" / str(seq)

    def get(self, lane: Lane) -> Policy:
        """The run's adapter, brought back if it is not in memory; UserError where it was never made."""
        if lane.policy is None:
            self._restore(lane)
        assert lane.policy is not None
        self._live[lane.model] = lane
        self._live.move_to_end(lane.model)
        lane.used = time.monotonic()
        return lane.policy

    def make(self, lane: Lane, config: Any, seed: int) -> Policy:
        """A fresh adapter; room for it is made first."""
        while len(self._live) >= self._limits.live_policies:
            self.put_aside(next(iter(self._live.values())))
        lane.policy = self._engine.create_policy(lane.model, lora=config, seed=seed)
        self._live[lane.model] = lane
        return lane.policy

    def _restore(self, lane: Lane) -> None:
        from rlvr.engine.checkpoint import load_policy

        if isinstance(failed := lane.failures.get(0), Failed):
            raise UserError(f"this training run was never made: {failed.error}")
        begun = time.monotonic()
        try:
            if lane.snapshot_seq >= 0:
                row = self._store.one("SELECT lora, rank FROM models WHERE id = ?", lane.model)
                assert row is not None
                policy = self.make(lane, lora_config(self._engine, row["rank"], json.loads(row["lora"])), seed=0)
                folder = self.folder(lane, lane.snapshot_seq)
                load_policy(folder, policy, self._engine.model, optimizer=True, gradients=True)
            for seq in range(lane.snapshot_seq + 1, lane.next_seq):
                if seq not in lane.failures:
                    entry = self._store.entry(lane.model, seq)
                    assert entry is not None and self.redo is not None
                    self.redo(lane, decode(entry.kind, entry.body, entry.encoding))
        except BaseException:
            self.drop(lane)
            raise
        if lane.policy is None:
            raise UserError("this training run was never made: send create_model first")
        log.info("%s: brought back at seq_id %d in %.2f s", lane.model, lane.next_seq - 1, time.monotonic() - begun)

    def drop(self, lane: Lane) -> None:
        """Forget the adapter in memory; the next request brings it back from disk."""
        if lane.policy is not None:
            self._engine.drop_policy(lane.model)
        lane.policy = None
        self._live.pop(lane.model, None)

    def put_aside(self, lane: Lane) -> None:
        """From memory to disk. Where the disk does not take it, the older snapshot and the log are there."""
        self.snapshot(lane)
        self.drop(lane)

    def due(self, lane: Lane) -> bool:
        """Whether the log is long enough for a snapshot, and the time for one is in proportion."""
        enough = lane.steps >= self._limits.snapshot_steps and lane.busy * self._limits.snapshot_share >= lane.cost
        return enough or lane.bytes >= self._limits.snapshot_bytes

    def snapshot(self, lane: Lane) -> None:
        """Write the run as it is now, then cut its log. Where that fails the log stays, and nobody is the worse."""
        from rlvr.engine.checkpoint import save_policy

        seq, begun = lane.next_seq - 1, time.monotonic()
        if lane.policy is None or seq <= lane.snapshot_seq:
            return
        try:
            with new_folder(self.folder(lane, seq)) as folder:
                model = self._engine.model
                save_policy(folder, lane.policy, model, optimizer=True, gradients=True, tokenizer=False)
            with lane.lock:
                over = [n for n in lane.done if n <= seq]
                self._store.cut(lane.model, seq, [(n, lane.done[n][0].digest, lane.done[n][1]) for n in over])
                for n in over:
                    self._promises.unpin(lane.done.pop(n)[0].promise)
        except Exception as error:
            log.warning("%s: no snapshot at seq_id %d: %s; the log is kept", lane.model, seq, error)
            lane.steps, lane.bytes, lane.busy = 0, 0, 0.0  # try again after as many more
            shutil.rmtree(self.folder(lane, seq), ignore_errors=True)
            return
        old, lane.snapshot_seq, lane.steps, lane.bytes, lane.busy = lane.snapshot_seq, seq, 0, 0, 0.0
        lane.cost = time.monotonic() - begun
        lane.failures = {n: failed for n, failed in lane.failures.items() if n > seq}
        shutil.rmtree(self.folder(lane, old), ignore_errors=True)

    def tidy(self, idle_since: float) -> None:
        """Put aside what nobody used since then (monotonic seconds)."""
        for lane in list(self._live.values()):
            if lane.used < idle_since and not lane.queue:
                self.put_aside(lane)

    def close(self) -> None:
        for lane in list(self._live.values()):
            self.put_aside(lane)


def lora_config(engine: Engine, rank: int, choice: dict[str, Any]) -> Any:
    """The adapter a client described by the parts of the model it trains."""
    from rlvr.engine.lora import lora_targets
    from rlvr.engine.options import LoraConfig

    names = lora_targets(engine.model, attn=choice["attn"], mlp=choice["mlp"], unembed=choice["unembed"])
    return LoraConfig(rank=rank, alpha=choice["alpha"], targets=tuple(names))
