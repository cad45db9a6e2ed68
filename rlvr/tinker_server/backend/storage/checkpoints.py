"""Saved weights by their `tinker://` paths: folders in peft's format, and rows with their owners.

    runs/<run>/weights|sampler_weights|external_weights/<name>/<seq>/   named, until deleted or past their time
    runs/<run>/ephemeral/<seq>/                                         of a sampling session, the newest few
    runs/<run>/live/<seq>/                                              the snapshot to restart from (adapter_cache.py)

`seq` is the request that saved them: weights are never overwritten. Earlier weights of a name stay for the sampling
sessions that were opened on them, the newest few of these, and are deleted when those are finished.

Another owner's checkpoints read as not found unless they are published. A deleted one keeps its row, so that replaying
the log does not restore it. Files to download are encrypted to the age keys (age-encryption.org) that a client gives,
by `pyrage` of the extra [serve].
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlvr.core.files import remove_leftovers
from rlvr.tinker_server.backend.storage.disk_usage import DiskAccounts, folder_size
from rlvr.tinker_server.backend.storage.paths import KINDS, CheckpointPath, run_folder
from rlvr.tinker_server.backend.storage.server_store import Row, ServerStore
from rlvr.tinker_server.protocol.errors import NotFound, UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits

PUBLISHABLE = ("weights", "sampler_weights")
ALIVE = "deleted = 0 AND (expires IS NULL OR expires > ?)"  # as `Checkpoints.is_alive`
MIN_TTL, MAX_TTL = 3_600, 10 * 365 * 86_400  # seconds, as the hosted service has it
SUFFIX = ".age"  # of an encrypted file
MAX_RECIPIENTS = 10  # of an encrypted file, as in the SDK


class Checkpoints:
    def __init__(
        self, store: ServerStore, root: Path, limits: ServerLimits, disk: DiskAccounts, clock: Callable[[], float]
    ) -> None:
        self._store, self._root, self._limits, self._disk, self._clock = store, root, limits, disk, clock

    def _folder_of_name(self, path: CheckpointPath) -> Path:
        return run_folder(self._root, path.run) / path.kind / path.name

    def folder(self, path: CheckpointPath, seq: int) -> Path:
        """The folder that request `seq` of the run saved under that name."""
        return self._folder_of_name(path) / str(seq)

    def find_row(self, path: CheckpointPath) -> Row | None:
        """The row of a checkpoint, even of a deleted one."""
        return self._store.fetch_one(
            "SELECT c.*, m.base_model, m.rank, m.lora FROM checkpoints c JOIN models m ON m.id = c.run "
            "WHERE c.run = ? AND c.kind = ? AND c.name = ?",
            path.run,
            path.kind,
            path.name,
        )

    def is_alive(self, row: Row) -> bool:
        return not row["deleted"] and (row["expires"] is None or row["expires"] > self._clock())

    def list_alive(self, where: str, *values: Any, limit: int, offset: int = 0) -> list[Row]:
        """A page of those that are there, the newest first. Their metadata may be long, so no others are read."""
        query = f"SELECT * FROM checkpoints WHERE {where} AND {ALIVE} ORDER BY created DESC, name LIMIT ? OFFSET ?"
        return self._store.fetch_all(query, *values, self._clock(), limit, offset)

    def count_alive(self, where: str, *values: Any) -> int:
        query = f"SELECT count(*) AS n FROM checkpoints WHERE {where} AND {ALIVE}"
        return self._store.fetch_all(query, *values, self._clock())[0]["n"]

    def find(self, owner: str, text: str, *, own: bool = False) -> tuple[CheckpointPath, Row]:
        """Find a checkpoint that `owner` may read (with `own`: change)."""
        try:
            path = CheckpointPath.parse(text)
        except ValueError as error:
            raise UserError(str(error)) from error
        row = self.find_row(path)
        if row is None or not self.is_alive(row) or (row["owner"] != owner and (own or not row["public"])):
            raise NotFound(f"there is no checkpoint {text[:300]} here (or it was deleted, or it expired)")
        return path, row

    def register(self, path: CheckpointPath, owner: str, seq: int, ttl: float | None, metadata: Any) -> int:
        """List a saved folder as a checkpoint of its owner, whose `tinker://` path is found from now on; its bytes."""
        now, size = self._clock(), folder_size(self.folder(path, seq))
        row = {
            "run": path.run, "kind": path.kind, "name": path.name, "owner": owner, "seq": seq, "created": now,
            "expires": None if ttl is None else now + ttl, "public": 0, "size": size,
            "metadata": json.dumps(metadata) if metadata else None, "deleted": 0,
        }  # fmt: skip
        self._store.insert("checkpoints", row, replace=True)
        self._drop_replaced(path, seq)
        self._disk.refresh(path.run)
        return size

    def _drop_replaced(self, path: CheckpointPath, seq: int) -> None:
        """Delete what a name held before `seq`, except the weights that open sampling sessions use."""
        bound = self._store.fetch_all(
            "SELECT DISTINCT s.number FROM samplers s JOIN sessions e ON e.id = s.session "
            "WHERE s.path = ? AND s.number != ? AND e.finished IS NULL ORDER BY s.number DESC LIMIT ?",
            str(path),
            seq,
            self._limits.replaced_samplers,
        )
        kept = {str(seq), *(str(row["number"]) for row in bound)}
        for folder in self._folder_of_name(path).glob("[0-9]*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def delete(self, owner: str, text: str) -> None:
        path, row = self.find(owner, text, own=True)
        self._remove(path, row["seq"])

    def _remove(self, path: CheckpointPath, seq: int) -> None:
        """Delete what request `seq` and earlier ones saved there, but not what is being saved now."""
        same = "run = ? AND kind = ? AND name = ? AND seq = ?"
        self._store.execute(f"UPDATE checkpoints SET deleted = 1 WHERE {same}", path.run, path.kind, path.name, seq)
        for folder in self._folder_of_name(path).glob("[0-9]*"):
            if int(folder.name) <= seq:
                shutil.rmtree(folder, ignore_errors=True)
        self._disk.refresh(path.run)

    def publish(self, owner: str, text: str, public: bool) -> None:
        path, _ = self.find(owner, text, own=True)
        if path.kind not in PUBLISHABLE:
            raise UserError(f"{text}: only {' and '.join(PUBLISHABLE)} can be published")
        self._change(path, "public", int(public))

    def set_ttl(self, owner: str, text: str, ttl: float | None) -> None:
        """Set the time to live, from now; None keeps the checkpoint forever."""
        path, _ = self.find(owner, text, own=True)
        self._change(path, "expires", None if validate_ttl(ttl) is None else self._clock() + (ttl or 0))

    def _change(self, path: CheckpointPath, column: str, value: Any) -> None:
        self._store.execute(
            f"UPDATE checkpoints SET {column} = ? WHERE run = ? AND kind = ? AND name = ?",
            value,
            path.run,
            path.kind,
            path.name,
        )

    def sweep(self) -> None:
        """Delete expired checkpoints."""
        query = "SELECT run, kind, name, seq FROM checkpoints WHERE deleted = 0 AND expires <= ?"
        for row in self._store.fetch_all(query, self._clock()):
            self._remove(CheckpointPath(row["run"], row["kind"], row["name"]), row["seq"])

    def remove_run_state(self, run: str) -> None:
        """Delete what a deleted run leaves but its named checkpoints."""
        self._store.delete_run(run)
        for kind in ("live", "ephemeral"):
            shutil.rmtree(run_folder(self._root, run) / kind, ignore_errors=True)
        self._disk.refresh(run)

    def clean_up(self) -> None:
        """After a kill: delete what is half written or half deleted."""
        for row in self._store.fetch_all("SELECT id FROM deleted_runs"):
            self.remove_run_state(row["id"])
        for run in (self._root / "runs").glob("*"):
            for kind in run.iterdir():
                remove_leftovers(kind)
                if kind.name in KINDS:
                    for name in kind.iterdir():
                        remove_leftovers(name)
        for row in self._store.fetch_all("SELECT run, kind, name, seq, deleted FROM checkpoints"):
            path = CheckpointPath(row["run"], row["kind"], row["name"])
            if row["deleted"]:
                shutil.rmtree(self._folder_of_name(path), ignore_errors=True)
            else:
                self._drop_replaced(path, row["seq"])
        for row in self._store.fetch_all("SELECT id, snapshot_seq FROM models"):
            for folder in (run_folder(self._root, row["id"]) / "live").glob("*"):
                if folder.name != str(row["snapshot_seq"]):
                    shutil.rmtree(folder, ignore_errors=True)


def validate_ttl(ttl: float | None) -> float | None:
    if ttl is not None and not MIN_TTL <= ttl <= MAX_TTL:
        raise UserError(
            f"ttl_seconds {ttl!r}: expected {MIN_TTL} (1 hour) to {MAX_TTL} (10 years), or none to keep it forever"
        )
    return ttl


def parse_recipients(texts: list[str]) -> list[Any]:
    """Parse the keys to encrypt to: native ones (age1...) and SSH public keys (ssh-ed25519, ssh-rsa)."""
    if not texts:
        return []
    if len(texts) > MAX_RECIPIENTS:
        raise UserError(f"age_encryption_recipients: {len(texts)} are given, expected at most {MAX_RECIPIENTS}")
    try:
        import pyrage
    except ModuleNotFoundError:
        raise UserError(
            "age_encryption_recipients: this server cannot encrypt because pyrage is not installed on it (pip install "
            "pyrage, or the extra rlvr[serve]). Leave them out to save the files unencrypted"
        ) from None
    modules: Any = pyrage
    found: list[Any] = []
    for text in texts:
        kind = modules.ssh if text.startswith("ssh-") else modules.x25519
        try:
            found.append(kind.Recipient.from_str(text.strip()))
        except modules.RecipientError as error:
            raise UserError(
                f"age_encryption_recipients: {text[:80]!r} is not a key to encrypt to ({error}); expected age1... (see "
                "age-keygen -y) or an SSH public key"
            ) from None
    return found


def encrypt_files(folder: Path, recipients: list[Any]) -> None:
    """Each file of a folder becomes `<name>.age`."""
    if not recipients:
        return
    import pyrage

    modules: Any = pyrage
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        modules.encrypt_file(str(file), f"{file}{SUFFIX}", recipients)
        file.unlink()
