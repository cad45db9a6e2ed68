"""What must survive a kill: sessions, training runs, the log of requests, results, samplers, checkpoints. SQLite.

A training request is in the log, synced to disk, before its request id is given out. A snapshot (a folder, see
`policies.py`) takes the place of the log up to some seq_id: `cut` records in one transaction that it is there, stores
the results of the requests that leave the log, and deletes those. Results of later requests need no record: running
the log again gives them again, bit for bit. Failures that are not a function of the request (a full disk, memory) are
recorded at once, so that the second run fails them too.

One connection and one lock: statements are short, and SQLite writes one at a time anyway. Exercised by
tests/test_tinker_core.py and, with kills, by tests/test_tinker_core_kill.py.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.service.tinker_api.errors import ServerError
from rlvr.service.tinker_api.promises import Failed, Json, Outcome, Proto

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
CREATE INDEX IF NOT EXISTS models_by_session ON models (session);
CREATE INDEX IF NOT EXISTS samplers_by_session ON samplers (session);
CREATE INDEX IF NOT EXISTS samplers_by_model ON samplers (model, number);
CREATE INDEX IF NOT EXISTS results_by_time ON results (created);
CREATE INDEX IF NOT EXISTS samplers_by_path ON samplers (path, number);
"""

Row = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One request of the log: `body` as it was received, with its `encoding` (zstd, say)."""

    model: str
    seq: int
    kind: str
    digest: str
    body: bytes
    encoding: str = ""


class Store:
    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ValueError(f"{path} is no readable database ({error}); use another folder, or a backup") from error
        self._db.execute("PRAGMA synchronous = FULL")
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION):
            raise ValueError(f"{path} was written by another version of this server ({found}); use another folder")
        self._db.executescript(TABLES)
        self._db.execute(f"PRAGMA user_version = {VERSION}")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, on disk when the block ends; ServerError where that cannot be done."""
        with self._lock:
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

    def all(self, query: str, *values: Any) -> list[Row]:
        with self._lock:
            return [dict(row) for row in self._db.execute(query, values)]

    def one(self, query: str, *values: Any) -> Row | None:
        rows = self.all(query, *values)
        return rows[0] if rows else None

    def run(self, query: str, *values: Any) -> None:
        """One statement that changes something, on its own or as part of a `transaction`."""
        with self._lock:
            if self._db.in_transaction:
                self._db.execute(query, values)
                return
            with self.transaction():
                self._db.execute(query, values)

    def insert(self, table: str, row: Row, *, replace: bool = False) -> None:
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        self.run(f"{verb} INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", *row.values())

    # The log

    def log(self, entry: Entry) -> None:
        self.insert("log", vars(entry))

    def entry(self, model: str, seq: int) -> Entry | None:
        row = self.one("SELECT * FROM log WHERE model = ? AND seq = ?", model, seq)
        return Entry(**row) if row else None

    def logged(self, model: str) -> list[Row]:
        """seq, kind, digest and size of what is in a model's log, in order."""
        return self.all("SELECT seq, kind, digest, length(body) AS size FROM log WHERE model = ? ORDER BY seq", model)

    def cut(self, model: str, seq: int, results: Iterable[tuple[int, str, Outcome]]) -> None:
        """A snapshot of the model after `seq` is on disk: the log up to there goes, the results of it come."""
        with self.transaction():
            for number, digest, outcome in results:
                self.record(model, number, digest, outcome)
            self.run("UPDATE models SET snapshot_seq = ? WHERE id = ?", seq, model)
            self.run("DELETE FROM log WHERE model = ? AND seq <= ?", model, seq)

    # Results

    def record(self, model: str, seq: int, digest: str, outcome: Outcome) -> None:
        form, body = stored(outcome)
        row = {"model": model, "seq": seq, "digest": digest, "form": form, "body": body, "created": time.time()}
        self.insert("results", row, replace=True)

    def fail(self, model: str, seq: int, digest: str, failed: Failed) -> None:
        """A request that is not run again: its body is not needed any more."""
        with self.transaction():
            self.record(model, seq, digest, failed)
            self.run("UPDATE log SET body = x'', encoding = '' WHERE model = ? AND seq = ?", model, seq)

    def result(self, model: str, seq: int) -> tuple[str, Outcome] | None:
        """(digest of the request, its outcome) where that is on disk."""
        row = self.one("SELECT * FROM results WHERE model = ? AND seq = ?", model, seq)
        return (row["digest"], restored(row["form"], row["body"])) if row else None

    def failures(self, model: str) -> dict[int, Failed]:
        """Recorded failures of requests that are still in the log: another run of it must not succeed there."""
        rows = self.all(
            "SELECT r.seq, r.form, r.body FROM results r JOIN log l ON l.model = r.model AND l.seq = r.seq "
            "WHERE r.model = ? AND r.form = 'failed'",
            model,
        )
        return {
            row["seq"]: failure for row in rows if isinstance(failure := restored(row["form"], row["body"]), Failed)
        }

    def forget_results(self, before: float) -> None:
        """Results of old requests that have left the log."""
        old = "created < ? AND NOT EXISTS (SELECT 1 FROM log l WHERE l.model = results.model AND l.seq = results.seq)"
        if self.one(f"SELECT 1 FROM results WHERE {old} LIMIT 1", before):
            self.run(f"DELETE FROM results WHERE {old}", before)


def stored(outcome: Outcome) -> tuple[str, bytes]:
    if isinstance(outcome, Proto):
        return "proto", outcome.body
    if isinstance(outcome, Json):
        return "json", json.dumps(outcome.value).encode()
    return "failed", json.dumps([outcome.error, outcome.category]).encode()


def restored(form: str, body: bytes) -> Outcome:
    if form == "proto":
        return Proto(body)
    value: Any = json.loads(body)
    return Json(value) if form == "json" else Failed(*value)
