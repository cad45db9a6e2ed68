"""Connections to a database, SQLite or PostgreSQL by URL: read and write transactions, and one error if it is down.

    with database.write() as connection: ...   # commits at the end, or rolls back
    with database.read() as connection: ...   # one snapshot of the data

SQLite: a write-ahead log, so that readers never wait for the writer; a transaction that writes says so when it begins
(one that reads first and writes later cannot be made to wait, it fails). `synchronous=NORMAL`: a killed process loses
nothing, a power cut at most the last moments. PostgreSQL: connections are tried before use, so a server that was away
and came back is simply used again; and it ends the transaction of a process that is frozen or cut off in the middle of
one, whose locks the others would wait for. Every call has a deadline (`rlvr.store.postgres_deadline`). A SQLite file
that was moved away or replaced is noticed: transactions would go on in a file that nothing else sees.
"""

from __future__ import annotations

import gc
import os
import re
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc

from rlvr.core.error_text import first_line

BUSY_S = 10.0  # how long a SQLite transaction waits for another process's, unless the URL has `?timeout=`
CACHE_KB = 512  # of SQLite's pages, by each of a dozen connections: the system caches the file as well
IDLE_S = 30  # PostgreSQL ends a transaction that does nothing for so long, unless it is configured to end it sooner
_AWAY = (exc.OperationalError, exc.InterfaceError)
_READ_ONLY = "25006"  # PostgreSQL's code of a write to a server that takes none: a standby, or one under maintenance
NOT_REACHABLE = "not reachable"
MOVED = "the database file was moved away or replaced"
_REASONS = {  # by what SQLite, PostgreSQL and the system say
    "is full": "full",
    "no space left": "full",
    "file too large": "full",
    "quota exceeded": "full",
    "disk i/o error": "full, or its disk fails",
    "locked": "locked by another process",
    "readonly": "read-only",
    "read-only": "read-only",
    "not a database": "damaged",
    "malformed": "damaged",
    MOVED: "not the file that was opened: it was moved away or replaced; restart the service",
    "no answer within": "not answering",
    "the server hangs": "not answering",
    "statement timeout": "too slow: a statement reached its time limit",
    "no connection became free": "busy: every connection is in use",
    "too many clients": "busy: every connection is in use",
}
_ALIVE = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,  # milliseconds; keepalives are not sent while something waits to be acknowledged
}


class StoreDown(Exception):
    """The database cannot be reached, is locked or full. Nothing of the call was written; it can be retried.

    The message is for the log: it names the database. `reason` does not, and is for clients.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.reason = next((words for mark, words in _REASONS.items() if mark in message.lower()), NOT_REACHABLE)


class Database:
    """A SQLAlchemy engine with read and write transactions."""

    opened_at = 0.0  # by the database's clock

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = parse_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.where = self.url.render_as_string(hide_password=True)
        self._writer = threading.Lock()
        self._patience_s = float(str(self.url.query.get("timeout", BUSY_S)))
        self._engine = self._open_sqlite() if self.is_sqlite else self._open_postgresql()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        with self._translate_errors(), self._connect() as connection:
            if not self.is_sqlite:  # whose readers see one snapshot anyway
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        turn = self._writers_turn() if self.is_sqlite else nullcontext()
        with self._translate_errors(), turn, self._connect() as connection:
            connection = connection.execution_options(rlvr_writes=True)
            with connection.begin():
                yield connection

    def now(self, connection: sa.Connection) -> float:
        """Seconds since the epoch by the database's clock: instances on several machines compare heartbeats by it."""
        if self.is_sqlite:
            return time.time()
        return float(connection.scalar(sa.select(sa.func.extract("epoch", sa.func.clock_timestamp()))) or 0.0)

    def ping(self) -> None:
        """StoreDown unless the database answers."""
        with self.read() as connection:
            connection.execute(sa.text("SELECT 1"))

    def check_room(self, size: int) -> None:
        """StoreDown unless `size` more bytes can be stored. SQLite only: PostgreSQL's disk is not ours to see."""
        if not self.is_sqlite:
            return
        try:
            with tempfile.TemporaryFile(dir=Path(self.url.database or "").parent) as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise StoreDown(f"{self.where}: {error.strerror}") from error

    def close(self) -> None:
        self._engine.dispose()

    def _connect(self) -> sa.Connection:
        if self.is_sqlite and self._find_file() != self._file:
            raise StoreDown(f"{self.where}: {MOVED}")
        return self._engine.connect()

    def _find_file(self) -> tuple[int, int] | None:
        """The identity of SQLite's file in the file system, whatever its name; None if there is no file."""
        try:
            found = os.stat(self.url.database or "")
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @contextmanager
    def _writers_turn(self) -> Iterator[None]:
        """SQLite has one writer: our threads queue here instead of polling for its lock. Where each of them waits for
        another process in vain, those behind it are told in time too."""
        if not self._writer.acquire(timeout=self._patience_s):
            raise StoreDown(f"{self.where}: locked: could not begin to write within {self._patience_s:g} s")
        try:
            yield
        finally:
            self._writer.release()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            # SQLite raises the bare DatabaseError for a damaged or foreign file.
            is_away = isinstance(error, _AWAY) or error.connection_invalidated
            is_read_only = _is_read_only(error.orig)
            if is_read_only and self.is_sqlite:
                # One connection that was opened in this time makes all new ones of this process read-only, also when
                # the file takes writes again.
                self._engine.dispose()
                gc.collect()  # the pool that was in use until now, with its connections, is a cycle
            if is_away or is_read_only or type(error) is exc.DatabaseError:
                raise StoreDown(f"{self.where}: {first_line(error.orig)}") from error
            raise
        except exc.TimeoutError as error:  # of the pool: every connection is in use
            raise StoreDown(f"{self.where}: no connection became free ({first_line(error)})") from error

    def _open_sqlite(self) -> sa.Engine:
        path = Path(self.url.database or "")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # prompts and answers are their owner's alone
        except OSError as error:
            raise ValueError(f"database {path} cannot be opened ({error.strerror}); give another place") from error
        self._file = self._find_file()
        patience = {} if "timeout" in self.url.query else {"timeout": BUSY_S}
        engine = sa.create_engine(self.url, connect_args={"check_same_thread": False, **patience}, pool_size=8)

        @event.listens_for(engine, "connect")
        def prepare(connection: Any, record: Any) -> None:
            connection.isolation_level = None  # transactions are begun below, not guessed by the driver
            for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"cache_size=-{CACHE_KB}"):
                connection.execute(f"PRAGMA {pragma}").close()

        @event.listens_for(engine, "begin")
        def begin(connection: sa.Connection) -> None:
            writes = connection.get_execution_options().get("rlvr_writes")
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

        return engine

    def _open_postgresql(self) -> sa.Engine:
        given = {key: value for key, value in _ALIVE.items() if key not in self.url.query}
        try:
            engine = sa.create_engine(self.url, connect_args=given, pool_size=8, pool_timeout=10, pool_pre_ping=True)
        except ModuleNotFoundError as error:
            raise ValueError(f"{self.where} needs {error.name}: pip install 'rlvr[postgres]'") from error

        from rlvr.store.postgres_deadline import DeadlineConnection

        @event.listens_for(engine, "do_connect")
        def connect(dialect: Any, record: Any, arguments: Any, options: Any) -> Any:
            return DeadlineConnection.connect(*arguments, **options)

        @event.listens_for(engine, "connect")
        def prepare(connection: Any, record: Any) -> None:
            connection.limit_statements()
            name = "idle_in_transaction_session_timeout"
            unset = f"SELECT set_config('{name}', '{IDLE_S}s', false) WHERE current_setting('{name}') = '0'"
            connection.execute(unset).close()
            connection.commit()

        @event.listens_for(engine, "handle_error")
        def leave_read_only(context: Any) -> None:
            # Connections of a read-only time stay read-only: each is closed when it is next asked for, as after a loss.
            context.is_disconnect = context.is_disconnect or _is_read_only(context.original_exception)

        return engine


def _is_read_only(error: BaseException | None) -> bool:
    primary_code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return getattr(error, "sqlstate", None) == _READ_ONLY or primary_code == sqlite3.SQLITE_READONLY


def parse_url(given: str | os.PathLike[str]) -> sa.URL:
    """A database's URL; a plain path is a SQLite file. ValueError for what is neither SQLite nor PostgreSQL."""
    text = os.fspath(given)
    if not text:
        raise ValueError("database: nothing given; expected sqlite:///path or postgresql://user@host/name")
    if "://" not in text:
        url = sa.URL.create("sqlite", database=str(Path(text).expanduser()))
    else:
        try:
            url = sa.make_url(re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", text))
        except (exc.ArgumentError, ValueError):  # its text may hold the password
            raise ValueError(
                "database: not a valid URL; expected sqlite:///path or postgresql://user@host/name"
            ) from None
    if url.drivername not in ("sqlite", "postgresql+psycopg"):
        raise ValueError(
            f"database: {url.drivername}:// is not known; expected sqlite:///path or postgresql://user@host/name"
        )
    if url.drivername == "sqlite" and url.database in (None, "", ":memory:"):
        raise ValueError(
            "database: a SQLite database in memory is seen by one thread only; give a file, sqlite:///path"
        )
    return url
