"""The replay buffer: the newest answers of the service's sessions, of which those with a `gain` can be learned from.

Training runs learn on policy: their answers are no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sqlalchemy as sa

from rlvr.store.connections import Database
from rlvr.store.records import Experience
from rlvr.store.tables import experiences

_TEXTS = ("prompt", "generated_output", "feedback", "scores", "tokens", "logprobs")
_COLUMNS = [column for column in experiences.c if column.name not in _TEXTS]


@dataclass(frozen=True)
class ReplayBuffer:
    """How full the replay buffer is: `ready` of its `size` experiences have a gain."""

    size: int
    capacity: int
    ready: int

    @property
    def utilization(self) -> float:
        return self.size / self.capacity


class ReplayQueries(Database):
    """The part of an `ExperienceStore` that reads the replay buffer."""

    buffer_size: int

    def read_buffer(self) -> list[Experience]:
        """The experiences of the buffer that have a gain, the oldest first, without texts, tokens and verdicts."""
        window = self._window().subquery().c
        found = sa.select(*_COLUMNS).where(experiences.c.id.in_(sa.select(window.id).where(window.gain.is_not(None))))
        with self.read() as connection:
            rows = connection.execute(found.order_by(experiences.c.id)).mappings()
            return [Experience(prompt="", generated_output="", **row) for row in rows]

    def buffer(self) -> ReplayBuffer:
        with self.read() as connection:
            size, ready = connection.execute(self._size_query).one()
        return ReplayBuffer(size, self.buffer_size, ready)

    def _window(self) -> sa.Select[*tuple[Any, ...]]:
        """The newest `buffer_size` answers of sessions."""
        e = experiences.c
        newest = sa.select(e.id, e.gain).where(e.step.is_(None))
        return newest.order_by(e.id.desc()).limit(self.buffer_size)

    @cached_property
    def _size_query(self) -> sa.Select[*tuple[Any, ...]]:
        window = self._window().subquery()
        return sa.select(sa.func.count(), sa.func.count(window.c.gain)).select_from(window)
