"""Sampling sessions: which weights each samples from, on disk and in memory.

A session samples from a base model, from a checkpoint as it was when the session was opened, or from the weights of a
run at one moment (`ephemeral`: the newest few are kept; `inflight`: the newest that the run published). Sessions
survive a restart. Weights are loaded on the engine thread, by the first request that needs them.
"""

from __future__ import annotations

import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlvr.tinker_server.backend.storage.checkpoints import Checkpoints
from rlvr.tinker_server.backend.storage.disk_usage import folder_size
from rlvr.tinker_server.backend.storage.server_store import Row, ServerStore
from rlvr.tinker_server.protocol.errors import NotFound, UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine
    from rlvr.engine.policy import Snapshot

KINDS = ("snapshot", "inflight")


class SamplerWeights(NamedTuple):
    folder: Path | None  # None for the base model
    key: str  # unique to these weights


class SamplingSessions:
    def __init__(
        self, store: ServerStore, checkpoints: Checkpoints, limits: ServerLimits, clock: Callable[[], float]
    ) -> None:
        self._store, self._checkpoints, self._limits, self._clock = store, checkpoints, limits, clock
        self._loaded: OrderedDict[str, Snapshot] = OrderedDict()  # by name, least recently used first
        self._lock = threading.Lock()

    def find(self, sampler: str) -> Row | None:
        return self._store.fetch_one("SELECT * FROM samplers WHERE id = ?", sampler)

    def create(self, sampler: str, session: str, owner: str, base_model: str, path: str | None, number: int) -> None:
        """Open a session on a base model, or on the weights that request `number` of a run saved at `path`."""
        row = {
            "id": sampler, "session": session, "owner": owner, "base_model": base_model, "model": None, "path": path,
            "folder": None, "kind": "snapshot", "created": self._clock(), "number": number,
        }  # fmt: skip
        self._store.insert("samplers", row)

    def create_from_run(self, sampler: str, model: str, seq: int, folder: Path, kind: str, snapshot: Snapshot) -> None:
        """Open a session on the weights of the run `model` after request `seq`; its oldest sessions lose theirs."""
        [run] = self._store.fetch_all("SELECT owner, base_model FROM models WHERE id = ?", model)
        self._store.insert(
            "samplers",
            {
                "id": sampler, "session": sampler.rsplit(":sample:", 1)[0], "owner": run["owner"],
                "base_model": run["base_model"], "model": model, "path": None, "folder": str(folder), "kind": kind,
                "created": self._clock(), "number": seq,
            },
        )  # fmt: skip
        with self._lock:
            self._loaded[str(folder)] = snapshot
        for row in self._list_oldest(model, self._limits.ephemeral_samplers):
            self._store.execute("UPDATE samplers SET folder = '' WHERE id = ?", row["id"])
            with self._lock:
                self._loaded.pop(row["folder"], None)
            shutil.rmtree(row["folder"], ignore_errors=True)

    def _list_oldest(self, model: str, count: int) -> list[Row]:
        """A run's sessions with weights of their own, less the newest `count`."""
        query = (
            "SELECT id, folder FROM samplers WHERE model = ? AND folder != '' ORDER BY number DESC LIMIT -1 OFFSET ?"
        )
        return self._store.fetch_all(query, model, count)

    def measure_replaced(self, model: str) -> int:
        """The bytes that the next session of a run frees."""
        return sum(
            folder_size(Path(row["folder"])) for row in self._list_oldest(model, self._limits.ephemeral_samplers - 1)
        )

    @property
    def weights_in_memory(self) -> int:
        """How many weights are in memory."""
        return len(self._loaded)

    def locate_weights(self, row: Row) -> SamplerWeights:
        """Find a session's weights; NotFound if they are gone."""
        if row["kind"] == "inflight":
            row = (
                self._store.fetch_one(
                    "SELECT * FROM samplers WHERE model = ? AND kind = 'inflight' ORDER BY number DESC LIMIT 1",
                    row["model"],
                )
                or row
            )
        if row["path"] is not None:
            path, _ = self._checkpoints.find(row["owner"], row["path"])
            folder = self._checkpoints.folder(path, row["number"])
            if not folder.is_dir():
                raise NotFound(
                    f"{row['id']}: its weights are gone: {path} was deleted, or saved more than "
                    f"{self._limits.replaced_samplers} times since. Open another sampling session on it"
                )
            return SamplerWeights(folder, str(folder))
        if row["folder"] == "":
            raise NotFound(
                f"{row['id']}: its weights are gone; unnamed sampler weights are kept for the newest "
                f"{self._limits.ephemeral_samplers} saves of a training run. Save by name to keep them for longer"
            )
        if row["folder"] is None:
            return SamplerWeights(None, f"base:{row['base_model']}")
        return SamplerWeights(Path(row["folder"]), row["folder"])

    def load(self, row: Row, engine: Engine) -> Snapshot:
        """The session's weights, in memory. A served run's come with the row."""
        if "snapshot" in row:
            return row["snapshot"]
        return self.read(self.locate_weights(row), row["path"] or row["id"], engine)

    def read(self, weights: SamplerWeights, name: str, engine: Engine) -> Snapshot:
        """Located weights, in memory; errors call them by `name`."""
        folder, key = weights
        with self._lock:
            snapshot = self._loaded.pop(key, None)
        if snapshot is None:
            try:
                snapshot = engine.load_snapshot(folder) if folder else engine.base_snapshot()
            except ValueError as error:
                raise UserError(str(error).replace(str(folder), name)) from error
        with self._lock:
            self._loaded[key] = snapshot
            while len(self._loaded) > self._limits.loaded_samplers:
                self._loaded.popitem(last=False)
        return snapshot
