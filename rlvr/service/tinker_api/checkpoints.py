"""Saved weights by their `tinker://` paths: folders in peft's format, and rows that say whose they are.

    runs/<run>/weights|sampler_weights|external_weights/<name>/<seq>/   named, until deleted or past their time
    runs/<run>/ephemeral/<seq>/                                         of a sampling session, the newest few
    runs/<run>/live/<seq>/                                              the snapshot a restart begins from (policies.py)

`seq` is the request that saved them: weights are never written over. What a name was given for before stays for the
sampling sessions that were opened on it, the newest few of them, and goes when these are finished.

Another key's checkpoints read as not found unless they are published. A deleted one keeps its row, so that running the
log again does not bring it back. Exercised by tests/test_tinker_core_tenants.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlvr.files import remove_leftovers
from rlvr.service.tinker_api.errors import NotFound, UserError
from rlvr.service.tinker_api.limits import ServerLimits
from rlvr.service.tinker_api.paths import KINDS, CheckpointPath
from rlvr.service.tinker_api.store import Row, Store

SHARED = ("weights", "sampler_weights")  # what may be published
LONGEST = 10 * 365 * 86_400  # seconds


def run_folder(root: Path, run: str) -> Path:
    """A run's id holds colons, which some file systems do not take."""
    return root / "runs" / run.replace(":", ".")


def folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Checkpoints:
    def __init__(self, store: Store, root: Path, limits: ServerLimits, clock: Callable[[], float]) -> None:
        self._store, self._root, self._limits, self._clock = store, root, limits, clock

    def _named(self, path: CheckpointPath) -> Path:
        return run_folder(self._root, path.run) / path.kind / path.name

    def folder(self, path: CheckpointPath, seq: int) -> Path:
        """What request `seq` of the run saved under that name."""
        return self._named(path) / str(seq)

    def row(self, path: CheckpointPath) -> Row | None:
        """Its row, a deleted one's too."""
        return self._store.one(
            "SELECT c.*, m.base_model, m.rank, m.lora FROM checkpoints c JOIN models m ON m.id = c.run "
            "WHERE c.run = ? AND c.kind = ? AND c.name = ?",
            path.run,
            path.kind,
            path.name,
        )

    def alive(self, row: Row) -> bool:
        return not row["deleted"] and (row["expires"] is None or row["expires"] > self._clock())

    def find(self, owner: str, text: str, *, own: bool = False) -> tuple[CheckpointPath, Row]:
        """A checkpoint that `owner` may read (with `own`: change)."""
        try:
            path = CheckpointPath.parse(text)
        except ValueError as error:
            raise UserError(str(error)) from error
        row = self.row(path)
        if row is None or not self.alive(row) or (row["owner"] != owner and (own or not row["public"])):
            raise NotFound(f"there is no checkpoint {text[:300]} here (or it was deleted, or its time was up)")
        return path, row

    def saved(self, path: CheckpointPath, owner: str, seq: int, ttl: float | None, metadata: Any) -> None:
        """Its folder is in its place: now it may be found."""
        now = self._clock()
        row = {
            "run": path.run, "kind": path.kind, "name": path.name, "owner": owner, "seq": seq, "created": now,
            "expires": None if ttl is None else now + ttl, "public": 0, "size": folder_size(self.folder(path, seq)),
            "metadata": json.dumps(metadata) if metadata else None, "deleted": 0,
        }  # fmt: skip
        self._store.insert("checkpoints", row, replace=True)
        self._drop_replaced(path, seq)

    def _drop_replaced(self, path: CheckpointPath, seq: int) -> None:
        """What was saved under a name before `seq` goes, but for what open sampling sessions sample from."""
        bound = self._store.all(
            "SELECT DISTINCT s.number FROM samplers s JOIN sessions e ON e.id = s.session "
            "WHERE s.path = ? AND s.number != ? AND e.finished IS NULL ORDER BY s.number DESC LIMIT ?",
            str(path),
            seq,
            self._limits.replaced_samplers,
        )
        kept = {str(seq), *(str(row["number"]) for row in bound)}
        for folder in self._named(path).glob("[0-9]*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def delete(self, owner: str, text: str) -> None:
        path, row = self.find(owner, text, own=True)
        self._remove(path, row["seq"])

    def _remove(self, path: CheckpointPath, seq: int) -> None:
        """What request `seq` saved there, and others before it; not what is saved there at this moment."""
        same = "run = ? AND kind = ? AND name = ? AND seq = ?"
        self._store.run(f"UPDATE checkpoints SET deleted = 1 WHERE {same}", path.run, path.kind, path.name, seq)
        for folder in self._named(path).glob("[0-9]*"):
            if int(folder.name) <= seq:
                shutil.rmtree(folder, ignore_errors=True)

    def publish(self, owner: str, text: str, public: bool) -> None:
        path, _ = self.find(owner, text, own=True)
        if path.kind not in SHARED:
            raise UserError(f"{text}: only {' and '.join(SHARED)} can be published")
        self._change(path, "public", int(public))

    def set_ttl(self, owner: str, text: str, ttl: float | None) -> None:
        """From now on; None keeps it for good."""
        path, _ = self.find(owner, text, own=True)
        self._change(path, "expires", None if checked_ttl(ttl) is None else self._clock() + (ttl or 0))

    def _change(self, path: CheckpointPath, column: str, value: Any) -> None:
        self._store.run(
            f"UPDATE checkpoints SET {column} = ? WHERE run = ? AND kind = ? AND name = ?",
            value,
            path.run,
            path.kind,
            path.name,
        )

    def sweep(self) -> None:
        """Remove those whose time is up."""
        query = "SELECT run, kind, name, seq FROM checkpoints WHERE deleted = 0 AND expires <= ?"
        for row in self._store.all(query, self._clock()):
            self._remove(CheckpointPath(row["run"], row["kind"], row["name"]), row["seq"])

    def tidy(self) -> None:
        """After a kill: what was half written or half deleted goes."""
        for run in (self._root / "runs").glob("*"):
            for kind in run.iterdir():
                remove_leftovers(kind)
                if kind.name in KINDS:
                    for name in kind.iterdir():
                        remove_leftovers(name)
        for row in self._store.all("SELECT run, kind, name, seq, deleted FROM checkpoints"):
            path = CheckpointPath(row["run"], row["kind"], row["name"])
            if row["deleted"]:
                shutil.rmtree(self._named(path), ignore_errors=True)
            else:
                self._drop_replaced(path, row["seq"])
        for row in self._store.all("SELECT id, snapshot_seq FROM models"):
            for folder in (run_folder(self._root, row["id"]) / "live").glob("*"):
                if folder.name != str(row["snapshot_seq"]):
                    shutil.rmtree(folder, ignore_errors=True)


def checked_ttl(ttl: float | None) -> float | None:
    if ttl is not None and not 0 < ttl <= LONGEST:
        raise UserError(f"ttl_seconds {ttl!r}: expected more than 0 and at most {LONGEST} (10 years), or none")
    return ttl
