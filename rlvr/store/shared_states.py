"""Small named states that instances share, such as the strategy policy. Of two writers the first wins.

value, version = store.state("strategies") or ({}, 0)
if not store.save_state("strategies", changed(value), version): ...   # another writer was faster: read it again
"""

from __future__ import annotations

import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from rlvr.store.connections import Database
from rlvr.store.tables import states


class StateQueries(Database):
    """The part of an `ExperienceStore` that keeps shared states."""

    def state(self, name: str) -> tuple[dict[str, Any], int] | None:
        """Its value and its version, which counts from 1; None where there is none."""
        with self.read() as connection:
            row = connection.execute(sa.select(states.c.value, states.c.version).where(states.c.name == name)).first()
        return (row.value, row.version) if row else None

    def save_state(self, name: str, value: dict[str, Any], version: int) -> bool:
        """Replace the state that was read as `version` (0: there was none) by `value`, as version + 1.

        False, and nothing is changed, where it is another version by now.
        """
        with self.write() as connection:
            new = {"value": value, "version": version + 1, "saved": time.time()}
            if version == 0:
                insert = (sqlite if self.is_sqlite else postgresql).insert(states).values(name=name, **new)
                insert = insert.on_conflict_do_nothing(index_elements=["name"]).returning(states.c.name)
                return connection.scalar(insert) is not None
            same = sa.update(states).where(states.c.name == name, states.c.version == version)
            return connection.execute(same.values(new)).rowcount == 1
