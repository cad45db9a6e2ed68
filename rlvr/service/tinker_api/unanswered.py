"""Which samples somebody waits for, kept beyond a restart: those who wait are told then that these are lost.

A client that waits for many samples with one poll names none of them, so it would wait for ever for what a server
that was killed had promised. Only ids are kept, by SQLite without a sync: they survive a kill of the process, and what
a power cut takes is at most the last seconds. A disk that is full is no reason not to sample. Exercised by
tests/test_tinker_core_restart.py.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path
from typing import Any

from rlvr.service.tinker_api.promises import Lost, Promise, Promises

log = logging.getLogger(__name__)


class Unanswered:
    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._db, self._left = opened(path)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _do(self, query: str, *values: Any) -> None:
        try:
            with self._lock:
                self._db.execute(query, values)
        except sqlite3.Error as error:
            log.warning("samples that are waited for could not be written down (%s)", error)

    def add(self, promise: Promise) -> None:
        values = (promise.request_id, promise.owner, promise.group, promise.session)
        self._do("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?)", *values)

    def drop(self, promise: Promise) -> None:
        """Its client has the answer, or never asked for it."""
        self._do("DELETE FROM samples WHERE id = ?", promise.request_id)

    def lose(self, promises: Promises) -> None:
        """What the server before this one left: whoever waits for it is told so."""
        for request_id, owner, group, session in self._left:
            if promise := promises.open(request_id, owner, group=group, session=session):
                promises.resolve(promise, Lost())
        self._left = []


def opened(path: Path) -> tuple[sqlite3.Connection, list[Any]]:
    """The database and what is in it. One that a power cut tore is no reason not to start: it begins anew, empty."""
    try:
        return _opened(path)
    except sqlite3.DatabaseError as error:
        log.warning("%s cannot be read (%s) and is begun anew; who waited for samples then asks in vain", path, error)
        for part in ("", "-wal", "-shm"):
            path.with_name(path.name + part).unlink(missing_ok=True)
        return _opened(path)


def _opened(path: Path) -> tuple[sqlite3.Connection, list[Any]]:
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("CREATE TABLE IF NOT EXISTS samples (id TEXT PRIMARY KEY, owner TEXT, client TEXT, session TEXT)")
        return db, db.execute("SELECT * FROM samples ORDER BY rowid").fetchall()
    except sqlite3.Error:
        db.close()
        raise
