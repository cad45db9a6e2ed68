"""The store: all queries over one database, opened by URL."""

from __future__ import annotations

import os

from rlvr.store.analysis import AnalysisQueries
from rlvr.store.experience_queries import ExperienceQueries, ReplayQueries
from rlvr.store.migrate import prepare
from rlvr.store.patterns import PatternQueries
from rlvr.store.retention import RetentionQueries
from rlvr.store.session_queries import SessionQueries
from rlvr.store.shared_states import PolicyQueries, StateQueries

BUFFER_SIZE = 1000


class ExperienceStore(
    SessionQueries,
    ExperienceQueries,
    ReplayQueries,
    AnalysisQueries,
    PatternQueries,
    RetentionQueries,
    StateQueries,
    PolicyQueries,
):
    """All queries of the database. Safe from any thread; each call is one transaction."""

    def __init__(self, url: str | os.PathLike[str], buffer_size: int = BUFFER_SIZE) -> None:
        if buffer_size < 1:
            raise ValueError(f"store: a replay buffer of {buffer_size}; expected at least 1")
        super().__init__(url)
        self.buffer_size = buffer_size
        try:
            prepare(self)
            with self.read() as connection:
                self.opened_at = self.now(connection)
        except BaseException:
            self.close()
            raise


def open_store(url: str | os.PathLike[str], buffer_size: int = BUFFER_SIZE) -> ExperienceStore:
    """The store at `sqlite:///path`, a plain path (a SQLite file) or `postgresql://user@host/database`.

    Its tables are made or migrated first. ValueError for a place that cannot hold one, StoreDown where the database is
    away. `buffer_size`: how many of the newest experiences are drawn from for replay.
    """
    return ExperienceStore(url, buffer_size)
