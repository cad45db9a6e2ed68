"""Copies of checkpoints: the same files under a training run of the caller's that cannot be trained.

Files are linked, so a copy takes no space of its own and outlives its source; both count in the quota of their owner.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from rlvr.core.files import CHECKSUMS, new_folder
from rlvr.tinker_server.backend.storage.checkpoints import PUBLISHABLE, Checkpoints, validate_ttl
from rlvr.tinker_server.backend.storage.client_sessions import ClientSessions
from rlvr.tinker_server.backend.storage.disk_usage import DiskAccounts
from rlvr.tinker_server.backend.storage.paths import CheckpointPath
from rlvr.tinker_server.backend.storage.server_store import ServerStore
from rlvr.tinker_server.protocol.errors import NotFound, UserError


class WeightCopies:
    def __init__(
        self,
        store: ServerStore,
        checkpoints: Checkpoints,
        sessions: ClientSessions,
        disk: DiskAccounts,
        clock: Callable[[], float],
    ) -> None:
        self._store, self._checkpoints, self._sessions = store, checkpoints, sessions
        self._disk, self._clock = disk, clock
        self._lock = threading.Lock()

    def copy(
        self,
        owner: str,
        source_path: str,
        *,
        session_id: str | None = None,
        model_seq_id: int | None = None,
        destination_project_id: str | None = None,
        ttl_seconds: int | None = None,
        request_key: str | None = None,
    ) -> str:
        """Copy weights into a new run of the session, or of a new session of the project; returns their path.

        A request that is sent again, with the same `request_key`, copies once.
        """
        validate_ttl(ttl_seconds)
        if (session_id is None) == (destination_project_id is None) or (session_id is None) != (model_seq_id is None):
            raise UserError("copy_weights: give either destination_project_id, or session_id and model_seq_id")
        source, row = self._checkpoints.find(owner, source_path)
        if source.kind not in PUBLISHABLE:
            raise UserError(f"{source_path}: only {' and '.join(PUBLISHABLE)} can be copied; download these files")
        if session_id is not None:
            self._sessions.find(owner, session_id)
        session = session_id or hashlib.sha256(f"{owner}\n{request_key or uuid.uuid4().hex}".encode()).hexdigest()[:32]
        run = f"{session}:train:{model_seq_id or 0}"
        target = CheckpointPath(run, source.kind, source.name)
        with self._lock:
            if (existing := self._store.fetch_one("SELECT owner FROM models WHERE id = ?", run)) is not None:
                copied = self._store.fetch_one("SELECT source FROM copied_runs WHERE id = ?", run)
                if existing["owner"] != owner or copied is None or copied["source"] != source_path:
                    raise UserError(f"model_seq_id names the training run {run} already; give the next number")
                if self._checkpoints.find_row(target) is not None:
                    return str(target)
            else:
                self._disk.check_new_run(owner)
            self._disk.check_quota(owner, str(target), row["size"])
            with new_folder(self._checkpoints.folder(target, 0)) as folder:
                _link_files(self._checkpoints.folder(source, row["seq"]), folder, source_path)
            if existing is None:
                self._insert_run(owner, run, row, source_path, destination_project_id if session_id is None else None)
            metadata = json.loads(row["metadata"]) if row["metadata"] else None
            self._checkpoints.register(target, owner, 0, ttl_seconds, metadata)
        return str(target)

    def _insert_run(self, owner: str, run: str, row: dict[str, object], source: str, project: str | None) -> None:
        now, session = self._clock(), run.rsplit(":train:", 1)[0]
        with self._store.transaction():
            if project is not None:
                self._sessions.insert(owner, session, project_id=project)
                self._store.execute("UPDATE sessions SET finished = 'success' WHERE id = ?", session)
            self._store.insert(
                "models",
                {
                    "id": run, "session": session, "owner": owner, "base_model": row["base_model"],
                    "rank": row["rank"], "lora": row["lora"], "metadata": None, "created": now, "last_request": now,
                    "snapshot_seq": -1,
                },
            )  # fmt: skip
            self._store.insert("copied_runs", {"id": run, "source": source})


def _link_files(source: Path, target: Path, path: str) -> None:
    try:
        for file in sorted(file for file in source.rglob("*") if file.is_file() and file.name != CHECKSUMS):
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(file, place)
            except FileNotFoundError:
                raise
            except OSError:  # a file system without links
                shutil.copyfile(file, place)
    except FileNotFoundError:
        raise NotFound(f"{path} was deleted or replaced while it was copied; copy it again") from None
