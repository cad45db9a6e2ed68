"""Retention: old experiences and sessions are deleted a few at a time.

An open session's experiences are never deleted.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from rlvr.store.connections import Database
from rlvr.store.session_queries import OPEN
from rlvr.store.tables import experiences, sessions

_e, _s = experiences.c, sessions.c


@dataclass(frozen=True)
class Retention:
    """Experiences older than `keep_days`, and those beyond the newest `keep_experiences`, go; None keeps all."""

    keep_days: float | None = None
    keep_experiences: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"retention: {name}={value}; expected a positive number, or nothing to keep all")


class RetentionQueries(Database):
    """The part of an `ExperienceStore` that deletes old rows."""

    buffer_size: int

    def prune(self, retention: Retention, batch: int = 500) -> tuple[int, int]:
        """Delete what `retention` lets go, `batch` rows a transaction; the number of experiences and of sessions.

        A session goes when it is over, none of its experiences are left, and it ended before what is kept began.
        """
        keep = retention.keep_experiences
        if keep is not None and keep < self.buffer_size:
            raise ValueError(
                f"retention: keep_experiences={keep} is less than the replay buffer of {self.buffer_size}; keep at "
                "least as many, or make the buffer smaller"
            )
        since = 0.0  # before this, nothing is kept
        last = 0  # up to this id, nothing is kept
        with self.read() as connection:
            if retention.keep_days is not None:
                since = self.now(connection) - 86400 * retention.keep_days
            if keep is not None:
                nth = sa.select(_e.id, _e.created).order_by(_e.id.desc()).offset(keep).limit(1)
                if row := connection.execute(nth).first():
                    last, since = row.id, max(since, row.created)
        if not (since or last):
            return 0, 0
        is_open = sa.exists().where(_s.id == _e.session_id, _s.status.in_(OPEN))
        gone = 0
        for old, order in ((_e.created < since, _e.created), (_e.id <= last, _e.id)):  # each by its own index
            some = sa.select(_e.id).where(old, ~is_open).order_by(order).limit(batch)
            gone += self._delete(sa.delete(experiences).where(_e.id.in_(some)))
        bare = ~sa.exists().where(_e.session_id == _s.id)
        over = (_s.created < since, sa.func.coalesce(_s.finished, _s.created) < since, _s.status.not_in(OPEN))
        few = sa.select(_s.id).where(*over, bare).order_by(_s.created).limit(batch)
        return gone, self._delete(sa.delete(sessions).where(_s.id.in_(few)))

    def _delete(self, some: sa.Delete) -> int:
        gone = 0
        while True:
            with self.write() as connection:
                now = connection.execute(some).rowcount
            gone += now
            if not now:
                return gone
