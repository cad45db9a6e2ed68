"""Read queries: models, training runs, checkpoints, sessions, in the form that the SDK reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr.tinker_server.backend.request_futures import RequestFailure
from rlvr.tinker_server.backend.storage.checkpoints import Checkpoints
from rlvr.tinker_server.backend.storage.paths import CheckpointPath
from rlvr.tinker_server.backend.storage.server_store import KEPT, Row, ServerStore
from rlvr.tinker_server.protocol.errors import NotFound, UserError

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine

TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
PAGE = 1_000  # rows at most
SESSIONS_OF_PROJECT = "SELECT id FROM sessions WHERE owner = ? AND json_extract(info, '$.project_id') = ?"
Listing = dict[str, Any]


def iso_time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


class ServerQueries:
    def __init__(
        self, store: ServerStore, checkpoints: Checkpoints, engines: Mapping[str, Engine], tokenizers: Mapping[str, str]
    ) -> None:
        self._store, self._checkpoints, self._engines, self._tokenizers = store, checkpoints, engines, tokenizers

    def capabilities(self) -> list[Listing]:
        return [
            {"model_name": name, "max_context_length": engine.model.context, "trainable": True, "sampleable": True}
            for name, engine in self._engines.items()
        ]

    def model_info(self, owner: str, model_id: str) -> Listing:
        """A training run, as `get_info` returns it."""
        row = self._run(owner, model_id)
        model = {"model_name": row["base_model"], "arch": "unknown"}
        if engine := self._engines.get(row["base_model"]):
            tokenizer = self._tokenizers.get(row["base_model"], row["base_model"])
            model |= {"arch": str(engine.model.module.config.model_type), "tokenizer_id": tokenizer}
        return {
            "type": "get_info", "model_id": model_id, "model_data": model, "model_name": row["base_model"],
            "is_lora": True, "lora_rank": row["rank"],
        }  # fmt: skip

    # Training runs

    def training_runs(self, owner: str, limit: int = 20, offset: int = 0, project: str | None = None) -> Listing:
        """All of them or those of a project, newest first, with the total number."""
        limit, offset = check_page(limit, offset)
        where, values = f"owner = ? AND {KEPT}", (owner,)
        if project is not None:
            where, values = f"{where} AND session IN ({SESSIONS_OF_PROJECT})", (owner, owner, project)
        rows = self._store.fetch_all(
            f"SELECT * FROM models WHERE {where} ORDER BY created DESC, id LIMIT ? OFFSET ?", *values, limit, offset
        )
        total = self._store.fetch_all(f"SELECT count(*) AS n FROM models WHERE {where}", *values)[0]["n"]
        return {
            "training_runs": [self._describe_run(row) for row in rows],
            "cursor": {"offset": offset, "limit": limit, "total_count": total},
        }

    def training_run(self, owner: str, run: str) -> Listing:
        return self._describe_run(self._run(owner, run))

    def _run(self, owner: str, run: str) -> Row:
        row = self._store.fetch_one(f"SELECT * FROM models WHERE id = ? AND owner = ? AND {KEPT}", run, owner)
        if row is None:
            raise NotFound(f"training run {run[:200]!r} is unknown")
        return row

    def _describe_run(self, row: Row) -> Listing:
        made = self._store.find_result(row["id"], 0)
        last = {kind: self._last_checkpoint(row["id"], kind) for kind in ("weights", "sampler_weights")}
        return {
            "training_run_id": row["id"], "base_model": row["base_model"], "model_owner": row["owner"],
            "is_lora": True, "lora_rank": row["rank"],
            "corrupted": made is not None and isinstance(made.outcome, RequestFailure),
            "last_request_time": iso_time(row["last_request"]), "last_checkpoint": last["weights"],
            "last_sampler_checkpoint": last["sampler_weights"],
            "user_metadata": metadata_texts(row["metadata"]),
        }  # fmt: skip

    # Checkpoints

    def checkpoints(
        self, owner: str, run: str | None = None, limit: int = 100, offset: int = 0, project: str | None = None
    ) -> Listing:
        """The checkpoints of one run, or all of an owner's, or those in a project; newest first."""
        limit, offset = check_page(limit, offset)
        if run is not None:
            self._run(owner, run)
        where = ("owner = ?", owner) if run is None else ("run = ?", run)
        if project is not None:
            runs = f"SELECT id FROM models WHERE session IN ({SESSIONS_OF_PROJECT})"
            where = (f"{where[0]} AND run IN ({runs})", where[1], owner, project)
        found = self._checkpoints.list_alive(*where, limit=limit, offset=offset)
        return {
            "checkpoints": [describe_checkpoint(row) for row in found],
            "cursor": {"offset": offset, "limit": limit, "total_count": self._checkpoints.count_alive(*where)},
        }

    def _last_checkpoint(self, run: str, kind: str) -> Listing | None:
        found = self._checkpoints.list_alive("run = ? AND kind = ?", run, kind, limit=1)
        return describe_checkpoint(found[0]) if found else None

    def adapters(self, owner: str) -> list[tuple[str, str]]:
        """(path, base model) of what an owner can sample from, newest first."""
        rows = self._store.fetch_all(
            "SELECT c.*, m.base_model FROM checkpoints c JOIN models m ON m.id = c.run "
            "WHERE c.owner = ? AND c.kind != 'external_weights' ORDER BY c.created DESC, c.name LIMIT ?",
            owner,
            PAGE,
        )
        alive = [row for row in rows if self._checkpoints.is_alive(row)]
        return [(str(CheckpointPath(row["run"], row["kind"], row["name"])), row["base_model"]) for row in alive]

    def weights_info(self, owner: str, tinker_path: str) -> Listing:
        _, row = self._checkpoints.find(owner, tinker_path)
        choice = json.loads(row["lora"])
        return {
            "base_model": row["base_model"], "is_lora": True, "lora_rank": row["rank"],
            "train_attn": choice["attn"], "train_mlp": choice["mlp"], "train_unembed": choice["unembed"],
        }  # fmt: skip

    def external_files(self, owner: str, run: str, name: str) -> dict[str, Path]:
        """The files of external weights, by name."""
        path, row = self._checkpoints.find(owner, f"tinker://{run}/external_weights/{name}", own=True)
        folder = self._checkpoints.folder(path, row["seq"])
        files = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*")) if file.is_file()}
        files.pop("checksums.json", None)  # the server's own, never encrypted
        return files

    # Sessions

    def sessions(self, owner: str, limit: int = 20, offset: int = 0) -> list[str]:
        limit, offset = check_page(limit, offset)
        rows = self._store.fetch_all(
            "SELECT id FROM sessions WHERE owner = ? ORDER BY created DESC, id LIMIT ? OFFSET ?", owner, limit, offset
        )
        return [row["id"] for row in rows]

    def session(self, owner: str, session_id: str) -> Listing:
        row = self._store.fetch_one("SELECT * FROM sessions WHERE id = ? AND owner = ?", session_id, owner)
        if row is None:
            raise NotFound(f"session {session_id[:200]!r} is unknown")
        info = json.loads(row["info"])
        runs = self._store.fetch_all("SELECT id FROM models WHERE session = ? ORDER BY created", session_id)
        samplers = self._store.fetch_all("SELECT id FROM samplers WHERE session = ? ORDER BY created", session_id)
        return {
            "training_run_ids": [run["id"] for run in runs], "sampler_ids": [s["id"] for s in samplers],
            "user_metadata": info["user_metadata"], "display_name": info["display_name"],
            "session_id": session_id, "owner": owner, "created_at": iso_time(row["created"]),
            "project_id": info["project_id"] or "", "finished": row["finished"],
        }  # fmt: skip


def describe_checkpoint(row: Row) -> Listing:
    path = CheckpointPath(row["run"], row["kind"], row["name"])
    return {
        "checkpoint_id": f"{path.kind}/{path.name}", "checkpoint_type": TYPES[path.kind], "tinker_path": str(path),
        "time": iso_time(row["created"]), "size_bytes": row["size"], "public": bool(row["public"]),
        "expires_at": iso_time(row["expires"]), "user_metadata": metadata_texts(row["metadata"]),
    }  # fmt: skip


def metadata_texts(encode_outcome: str | None) -> dict[str, str] | None:
    """The SDK reads metadata as texts."""
    return {key: str(value) for key, value in json.loads(encode_outcome).items()} if encode_outcome else None


def check_page(limit: int, offset: int) -> tuple[int, int]:
    """Limit and offset of a page; UserError for negative ones. A page has at most `PAGE` rows; its cursor says so."""
    if limit < 1 or offset < 0:
        raise UserError(f"limit={limit}, offset={offset}: expected a limit of at least 1 and an offset of at least 0")
    return min(limit, PAGE), min(offset, 2**62)  # what SQLite can count
