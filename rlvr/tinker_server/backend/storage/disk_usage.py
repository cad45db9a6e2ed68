"""How much disk space each owner uses, and the quota that a save is checked against.

The folders of a run are measured when they are asked about and changed since, so the figures are those of the disk.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from rlvr.tinker_server.backend.storage.paths import KINDS, CheckpointPath, run_folder
from rlvr.tinker_server.backend.storage.server_store import KEPT, Row, ServerStore
from rlvr.tinker_server.protocol.errors import UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits

SHORT_SECONDS, REST = 0.05, 20.0  # a longer look at the tables is followed by so many times as long without one
NAMED = 3  # checkpoints in a message, the largest first


class DiskUsage(NamedTuple):
    """Bytes: of named `checkpoints`, of `unnamed` sampler weights, of the state, logs and results of `runs`."""

    checkpoints: int = 0
    unnamed: int = 0
    runs: int = 0

    @property
    def total(self) -> int:
        return sum(self)


class DiskAccounts:
    def __init__(self, store: ServerStore, root: Path, limits: ServerLimits) -> None:
        self._store, self._root, self._max_runs = store, root, limits.owner_runs
        self.limit = limits.owner_disk_bytes or int(limits.owner_disk_share * shutil.disk_usage(root).total)
        self._lock, self._stored_lock = threading.Lock(), threading.Lock()
        self._stored, self._measure_at = Counter[str](), 0.0
        self._measured: dict[str, DiskUsage] = {}  # by run; what is missing is measured when it is needed

    def refresh(self, run: str) -> None:
        """Note that the folders of a run changed."""
        with self._lock:
            self._measured.pop(run, None)

    def measure_owner(self, owner: str) -> DiskUsage:
        return self.measure_owners(owner).get(owner, DiskUsage())

    def measure_owners(self, owner: str | None = None) -> dict[str, DiskUsage]:
        """The usage of every owner, or of one."""
        where, values = ("WHERE m.owner = ?", (owner,)) if owner is not None else ("", ())
        stored = self._measure_stored()
        found: dict[str, DiskUsage] = {}
        for row in self._store.fetch_all(f"SELECT m.id, m.owner FROM models m {where}", *values):
            one, so_far = self._measure_run(row["id"]), found.get(row["owner"], DiskUsage())
            state = one.runs + stored[row["id"]]
            found[row["owner"]] = DiskUsage(
                so_far.checkpoints + one.checkpoints, so_far.unnamed + one.unnamed, so_far.runs + state
            )
        return found

    def _measure_stored(self) -> Counter[str]:
        """The bytes of every run's log and results. With hundreds of thousands of rows that takes a second: it is then
        done again after `REST` times as long, and meanwhile by one thread for all."""
        with self._stored_lock:
            if time.monotonic() < self._measure_at:
                return self._stored
            begun, self._stored = time.monotonic(), Counter[str]()
            for table in ("log", "results"):
                rows = self._store.scan(f"SELECT model, sum(length(body)) AS size FROM {table} GROUP BY model")
                self._stored.update({row["model"]: row["size"] or 0 for row in rows})
            if (took := time.monotonic() - begun) > SHORT_SECONDS:
                self._measure_at = begun + took + REST * took
            return self._stored

    def _measure_run(self, run: str) -> DiskUsage:
        with self._lock:
            if run not in self._measured:
                folder = run_folder(self._root, run)
                named = sum(folder_size(folder / kind) for kind in KINDS)
                self._measured[run] = DiskUsage(named, folder_size(folder / "ephemeral"), folder_size(folder / "live"))
            return self._measured[run]

    def check_quota(self, owner: str, what: str, size: int, freed: int = 0) -> None:
        """UserError if `size` more bytes, less those that the save frees, are over the owner's quota."""
        if size <= freed:
            return
        self._check(
            owner,
            size - freed,
            f"{what} takes {format_bytes(size)} and was not saved. What was saved before is there, and the run goes on",
        )

    def check_new_run(self, owner: str) -> None:
        """UserError for an owner who has used up a quota; a run of one who has not may come above that of the disk."""
        [row] = self._store.fetch_all(f"SELECT count(*) AS runs FROM models WHERE owner = ? AND {KEPT}", owner)
        if row["runs"] >= self._max_runs:
            raise UserError(
                f"this key has {row['runs']:,} training runs, and {self._max_runs:,} are allowed. Delete some that are "
                "over (DELETE /api/v1/training_runs/ID; their named checkpoints stay), or ask the operator for more "
                "(limits.owner_runs)"
            )
        self._check(owner, 1, "a new training run was not made")

    def _check(self, owner: str, more: int, refusal: str) -> None:
        used = self.measure_owner(owner)
        if used.total + more <= self.limit:
            return
        largest = self._largest_checkpoints(owner)
        named = ", ".join(f"{_path(row)} ({format_bytes(row['size'])})" for row in largest)
        remedy = f"checkpoints, the largest first: {named}, or " if largest else ""
        raise UserError(
            f"the disk quota of this key is {format_bytes(self.limit)} and {format_bytes(used.total)} are used "
            f"({format_bytes(used.checkpoints)} by checkpoints, {format_bytes(used.unnamed)} by unnamed sampler "
            f"weights, {format_bytes(used.runs)} by the state of training runs); {refusal}. To make room, "
            f"delete {remedy}training runs that are over (DELETE /api/v1/training_runs/ID); or ask the operator for "
            "more (limits.owner_disk_bytes, or limits.owner_disk_share of the disk)"
        )

    def _largest_checkpoints(self, owner: str) -> list[Row]:
        return self._store.fetch_all(
            "SELECT * FROM checkpoints WHERE owner = ? AND deleted = 0 ORDER BY size DESC, created LIMIT ?",
            owner,
            NAMED,
        )

    def describe(self, owner: str) -> dict[str, Any]:
        """The usage and the limit, for the owner."""
        used = self.measure_owner(owner)
        return {
            "used_bytes": used.total, "limit_bytes": self.limit, **{f"{k}_bytes": v for k, v in used._asdict().items()},
            "largest_checkpoints": [
                {"tinker_path": _path(row), "size_bytes": row["size"]} for row in self._largest_checkpoints(owner)
            ],
        }  # fmt: skip


def _path(row: Row) -> str:
    return str(CheckpointPath(row["run"], row["kind"], row["name"]))


def folder_size(folder: Path) -> int:
    """The bytes of all files in a folder, less inner folders that are being written (`rlvr.core.files.new_folder`)."""
    size = 0
    for place, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        size += sum(_file_size(os.path.join(place, name)) for name in files)
    return size


def _file_size(file: str) -> int:
    """0 for a file that vanished meanwhile."""
    try:
        return os.stat(file).st_size
    except OSError:
        return 0


def format_bytes(size: int) -> str:
    """`12.3 MB`, in powers of 1000."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
