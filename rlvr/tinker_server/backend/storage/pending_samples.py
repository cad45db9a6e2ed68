"""The ids of unanswered samples, kept over a restart, so that their clients learn that the samples are lost.

A client that waits for many samples with one poll names none of them, so it would wait forever for samples that a
killed server had accepted. Only ids are kept, by SQLite without a sync: they survive a kill of the process, and a
power cut loses at most the last seconds. Sampling goes on if the disk is full.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

from rlvr.tinker_server.backend.request_futures import FutureRegistry, LostRequest, ResultFuture

log = logging.getLogger(__name__)


class PendingSamples:
    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._db, self._leftovers = open_samples(path)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _do(self, query: str, *values: Any) -> None:
        try:
            with self._lock:
                self._db.execute(query, values)
        except sqlite3.Error as error:
            log.warning("the id of a sample could not be stored (%s)", error)

    def add(self, future: ResultFuture) -> None:
        values = (future.request_id, future.owner, future.group, future.session)
        self._do("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", *values)

    def remove(self, future: ResultFuture) -> None:
        """Forget a sample: its client has the result, or never asked for it."""
        self._do("DELETE FROM samples WHERE id = ?", future.request_id)

    def resolve_leftovers(self, futures: FutureRegistry) -> None:
        """Make the samples that the previous server left read as lost."""
        for request_id, owner, group, session in self._leftovers:
            if future := futures.create(request_id, owner, group=group, session=session):
                futures.resolve(future, LostRequest())
        self._leftovers = []


def open_samples(path: Path) -> tuple[sqlite3.Connection, list[Any]]:
    """Open the database and read its rows. One that a power cut damaged is replaced by an empty one."""
    try:
        return _open(path)
    except sqlite3.DatabaseError as error:
        log.warning(
            "%s cannot be read (%s) and is made anew; clients that wait for earlier samples get no result", path, error
        )
        for part in ("", "-wal", "-shm"):
            path.with_name(path.name + part).unlink(missing_ok=True)
        return _open(path)


def _open(path: Path) -> tuple[sqlite3.Connection, list[Any]]:
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("CREATE TABLE IF NOT EXISTS samples (id TEXT PRIMARY KEY, owner TEXT, client TEXT, session TEXT)")
        return db, db.execute("SELECT * FROM samples ORDER BY rowid").fetchall()
    except sqlite3.Error:
        db.close()
        raise
