"""The store: its parts over one database, opened by URL.

Exercised by tests/test_store*.py on SQLite and on a real PostgreSQL.
"""

from __future__ import annotations

import os

from rlvr.store.analysis import Analysis
from rlvr.store.experiences import ExperienceRows
from rlvr.store.migrate import prepare
from rlvr.store.replay import Replay
from rlvr.store.retention import Pruning
from rlvr.store.sessions import SessionRows
from rlvr.store.states import States

BUFFER_SIZE = 1000


class Store(SessionRows, ExperienceRows, Replay, Analysis, Pruning, States):
    """Everything there is to ask of the database. Safe to use from any thread; each call is one transaction."""

    def __init__(self, url: str | os.PathLike[str], buffer_size: int = BUFFER_SIZE) -> None:
        if buffer_size < 1:
            raise ValueError(f"store: a replay buffer of {buffer_size}; expected at least 1")
        super().__init__(url)
        self.buffer_size = buffer_size
        try:
            prepare(self)
            with self.reading() as connection:
                self.opened = self.now(connection)
        except BaseException:
            self.close()
            raise


def open_store(url: str | os.PathLike[str], buffer_size: int = BUFFER_SIZE) -> Store:
    """The store at `sqlite:///path`, a plain path (a SQLite file) or `postgresql://user@host/database`.

    Its tables are made or migrated first. ValueError for a place that cannot hold one, StoreDown where the database is
    away. `buffer_size`: how many of the newest experiences are drawn from for replay.
    """
    return Store(url, buffer_size)
