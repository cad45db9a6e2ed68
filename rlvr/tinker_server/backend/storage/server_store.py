"""The SQLite store of what survives a kill: sessions, runs, the request log, results, samplers, checkpoints.

A training request is in the log, synced to disk, before its request id is returned. A snapshot (a folder, see
`adapter_cache.py`) replaces the log up to some seq_id: `truncate_log` records in one transaction that it exists, stores
the results of the requests that leave the log, and deletes those. Results of later requests need no record:
replaying the log gives the same bits. Failures that are not a function of the request (a full disk, memory) are
recorded at once, so that a replay fails them too.

One connection and one lock: statements are short, and SQLite writes one at a time anyway.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlvr.tinker_server.backend.request_futures import JsonResult, Outcome, ProtoResult, RequestFailure
from rlvr.tinker_server.protocol.errors import ServerError

RECORDS = "records.db"  # the file in a server's state folder
VERSION = 1
TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, owner TEXT, created REAL, heartbeat REAL, finished TEXT, info TEXT);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, base_model TEXT, rank INT, lora TEXT, metadata TEXT,
    created REAL, last_request REAL, snapshot_seq INT);
CREATE TABLE IF NOT EXISTS log (
    model TEXT, seq INT, kind TEXT, digest TEXT, body BLOB, encoding TEXT, PRIMARY KEY (model, seq));
CREATE TABLE IF NOT EXISTS results (
    model TEXT, seq INT, digest TEXT, form TEXT, body BLOB, created REAL, PRIMARY KEY (model, seq));
CREATE TABLE IF NOT EXISTS samplers (
    id TEXT PRIMARY KEY, session TEXT, owner TEXT, base_model TEXT, model TEXT, path TEXT, folder TEXT, kind TEXT,
    created REAL, number INTEGER);
CREATE TABLE IF NOT EXISTS checkpoints (
    run TEXT, kind TEXT, name TEXT, owner TEXT, seq INT, created REAL, expires REAL, public INT, size INT,
    metadata TEXT, deleted INT, PRIMARY KEY (run, kind, name));
CREATE TABLE IF NOT EXISTS deleted_runs (id TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS custom_losses (id TEXT PRIMARY KEY, session TEXT, owner TEXT, body TEXT, created REAL);
CREATE TABLE IF NOT EXISTS copied_runs (id TEXT PRIMARY KEY, source TEXT);
CREATE INDEX IF NOT EXISTS sessions_by_owner ON sessions (owner, created, id);
CREATE INDEX IF NOT EXISTS models_by_session ON models (session);
CREATE INDEX IF NOT EXISTS samplers_by_session ON samplers (session);
CREATE INDEX IF NOT EXISTS samplers_by_model ON samplers (model, number);
CREATE INDEX IF NOT EXISTS results_by_time ON results (created);
CREATE INDEX IF NOT EXISTS samplers_by_path ON samplers (path, number);
"""
KEPT = "id NOT IN (SELECT id FROM deleted_runs)"  # of a model

Row = dict[str, Any]


@dataclass(frozen=True)
class LogEntry:
    """One request of the log: `body` as received, with its `encoding`, e.g. zstd."""

    model: str
    seq: int
    kind: str
    digest: str
    body: bytes
    encoding: str = ""


class StoredResult(NamedTuple):
    digest: str  # of the request
    outcome: Outcome


class ServerStore:
    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._path, self._file = path, os.stat(path)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ValueError(f"{path} is not a readable database ({error}); use another folder, or a backup") from error
        self._db.execute("PRAGMA synchronous = FULL")
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION):
            raise ValueError(
                f"{path} has the database version {found}, this server needs {VERSION}; use another folder"
            )
        self._db.executescript(TABLES)
        self._db.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def is_in_place(self) -> bool:
        """Whether the file that was opened still has its name: elsewhere a restart would not find what is written."""
        try:
            return os.path.samestat(os.stat(self._path), self._file)
        except OSError:
            return False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, on disk when the block ends; ServerError if that fails."""
        with self._lock:
            if not self.is_in_place():
                raise ServerError("the server cannot write its records: the database file was moved away or replaced")
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise ServerError(f"the server cannot write its records ({error}); is its disk full?") from error

    def fetch_all(self, query: str, *values: Any) -> list[Row]:
        with self._lock:
            return [dict(row) for row in self._db.execute(query, values)]

    def scan(self, query: str) -> list[Row]:
        """Read committed rows with a connection of its own, so no other call waits for a query over a whole table."""
        try:
            with closing(sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True)) as db:
                db.row_factory = sqlite3.Row
                return [dict(row) for row in db.execute(query)]
        except sqlite3.Error as error:
            raise ServerError(f"the server cannot read its records ({error})") from error

    def fetch_one(self, query: str, *values: Any) -> Row | None:
        rows = self.fetch_all(query, *values)
        return rows[0] if rows else None

    def execute(self, query: str, *values: Any) -> None:
        """Execute a statement that writes, alone or within a `transaction`."""
        with self._lock:
            if self._db.in_transaction:
                self._db.execute(query, values)
                return
            with self.transaction():
                self._db.execute(query, values)

    def insert(self, table: str, row: Row, *, replace: bool = False) -> None:
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        self.execute(f"{verb} INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", *row.values())

    # The log

    def append(self, entry: LogEntry) -> None:
        self.insert("log", vars(entry))

    def log_entry(self, model: str, seq: int) -> LogEntry | None:
        row = self.fetch_one("SELECT * FROM log WHERE model = ? AND seq = ?", model, seq)
        return LogEntry(**row) if row else None

    def log_index(self, model: str) -> list[Row]:
        """seq, kind, digest and size of the entries of a run's log, in order."""
        return self.fetch_all(
            "SELECT seq, kind, digest, length(body) AS size FROM log WHERE model = ? ORDER BY seq", model
        )

    def truncate_log(self, model: str, seq: int, results: Mapping[int, StoredResult]) -> None:
        """A snapshot after `seq` is on disk: replace the log up to there by its results."""
        with self.transaction():
            for number, result in results.items():
                self.record_result(model, number, result.digest, result.outcome)
            self.execute("UPDATE models SET snapshot_seq = ? WHERE id = ?", seq, model)
            self.execute("DELETE FROM log WHERE model = ? AND seq <= ?", model, seq)

    def delete_run(self, model: str) -> None:
        """Delete the log and the results of a run that is marked as deleted, and the weights of its sessions."""
        with self.transaction():
            for table in ("log", "results"):
                self.execute(f"DELETE FROM {table} WHERE model = ?", model)
            self.execute("UPDATE samplers SET folder = '' WHERE model = ? AND folder IS NOT NULL", model)

    # Results

    def record_result(self, model: str, seq: int, digest: str, outcome: Outcome) -> None:
        form, body = encode_outcome(outcome)
        row = {"model": model, "seq": seq, "digest": digest, "form": form, "body": body, "created": time.time()}
        self.insert("results", row, replace=True)

    def record_failure(self, model: str, seq: int, digest: str, failed: RequestFailure) -> None:
        """Record a failure. The request is not replayed, so its body is dropped."""
        with self.transaction():
            self.record_result(model, seq, digest, failed)
            self.execute("UPDATE log SET body = x'', encoding = '' WHERE model = ? AND seq = ?", model, seq)

    def find_result(self, model: str, seq: int) -> StoredResult | None:
        row = self.fetch_one("SELECT * FROM results WHERE model = ? AND seq = ?", model, seq)
        return StoredResult(row["digest"], decode_outcome(row["form"], row["body"])) if row else None

    def recorded_failures(self, model: str) -> dict[int, RequestFailure]:
        """Recorded failures of requests in the log: a replay must not succeed there."""
        rows = self.fetch_all(
            "SELECT r.seq, r.form, r.body FROM results r JOIN log l ON l.model = r.model AND l.seq = r.seq "
            "WHERE r.model = ? AND r.form = 'failed'",
            model,
        )
        return {
            row["seq"]: failure
            for row in rows
            if isinstance(failure := decode_outcome(row["form"], row["body"]), RequestFailure)
        }

    def delete_results(self, before: float) -> None:
        """Delete old results of requests that have left the log."""
        old = "created < ? AND NOT EXISTS (SELECT 1 FROM log l WHERE l.model = results.model AND l.seq = results.seq)"
        if self.fetch_one(f"SELECT 1 FROM results WHERE {old} LIMIT 1", before):
            self.execute(f"DELETE FROM results WHERE {old}", before)


def encode_outcome(outcome: Outcome) -> tuple[str, bytes]:
    if isinstance(outcome, ProtoResult):
        return "proto", outcome.body
    if isinstance(outcome, JsonResult):
        return "json", json.dumps(outcome.value).encode()
    return "failed", json.dumps([outcome.error, outcome.category]).encode()


def decode_outcome(form: str, body: bytes) -> Outcome:
    if form == "proto":
        return ProtoResult(body)
    value: Any = json.loads(body)
    return JsonResult(value) if form == "json" else RequestFailure(*value)
