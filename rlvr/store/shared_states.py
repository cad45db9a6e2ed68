"""What replicas of the service share: the policy that they train together, and small named states.

Of a policy: which replica learns, what it has published, which groups wait.

    token = store.lead_policy("tinker:Qwen/Qwen3-8B", "replica-a", 0, 15.0)     # 0: another replica learns
    store.add_groups("tinker:Qwen/Qwen3-8B", [WaitingGroup("session", 4, trajectories)])
    store.publish_policy("tinker:Qwen/Qwen3-8B", token, state, {"session": 5})  # False: the lease was lost

The right to learn is a lease with a fencing token, which counts from 1 and grows whenever a replica takes the lease.
The learner publishes a state and marks the sessions that it has learned from in one transaction, which only the newest
token can make: a learner that was replaced while it computed changes nothing. PostgreSQL ends a transaction of a
replica that stands still in it (frozen, or cut off): its locks would keep the others from the lease.

A named state, such as the strategy policy, has a version. Of two writers the first wins:

    value, version = store.state("strategies") or ({}, 0)
    if not store.save_state("strategies", changed(value), version): ...   # another writer was faster: read it again
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from rlvr.store.connections import Database
from rlvr.store.tables import groups, policies, sessions, states

NOT_LEARNED = 0  # the step of a group that no step learned from: equal rewards, too old, or refused
_LOCK = 0x726C7670  # "rlvp": the advisory lock under which PostgreSQL's leases change hands
STILL_S = 5  # PostgreSQL ends a transaction on a lease that does nothing for so long
MOST_DROPPED = 10_000  # sessions of one publication
MOST_BYTES = 32 << 20  # of the groups that are read at once, as JSON: about a million tokens


@dataclass(frozen=True)
class SharedPolicy:
    """A policy that replicas share. `state` is what the learner published last, None before that; `holder` the replica
    that learns, '' if the lease has ended."""

    name: str
    holder: str
    token: int
    state: dict[str, Any] | None


@dataclass(frozen=True)
class WaitingGroup:
    """The episodes of one session, as JSON. `version` is the step of the weights that sampled them."""

    session_id: str
    version: int
    trajectories: list[dict[str, Any]]


class PolicyQueries(Database):
    """The part of an `ExperienceStore` through which replicas share a policy."""

    def policy(self, name: str) -> SharedPolicy | None:
        with self.read() as connection:
            now = self.now(connection)
            row = connection.execute(sa.select(policies).where(policies.c.name == name)).first()
            return None if row is None else _policy(row, now)

    def led_policies(self) -> dict[str, str]:
        """The policies that a replica learns now, with the name of that replica."""
        with self.read() as connection:
            live = sa.select(policies.c.name, policies.c.holder).where(policies.c.expires > self.now(connection))
            return {row.name: row.holder for row in connection.execute(live)}

    def lead_policy(self, name: str, holder: str, token: int, seconds: float) -> int:
        """Renew the lease of `token` for some seconds, or take one that has ended; the token, 0 if another replica
        holds it. A policy is led only while no replica learns another one in this database."""
        p = policies.c
        if token:
            with self._write_lease() as connection:
                now = self.now(connection)
                mine = sa.update(policies).where(p.name == name, p.token == token, p.expires > now)
                if connection.execute(mine.values(expires=now + seconds)).rowcount:
                    return token
        with self.read() as connection:  # most calls of a replica that does not learn end here
            if connection.scalar(sa.select(p.name).where(p.expires > self.now(connection))):
                return 0
        with self._write_lease() as connection:
            if not self.is_sqlite:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            now = self.now(connection)
            if connection.scalar(sa.select(p.name).where(p.expires > now)):
                return 0
            new = {"holder": holder, "expires": now + seconds}
            before = connection.scalar(sa.select(p.token).where(p.name == name))
            if before is None:
                connection.execute(sa.insert(policies).values(name=name, token=1, **new))
                return 1
            after = token if token == before else before + 1  # its own lease, which no other replica took
            # Its holder may have renewed it since it was read.
            ended = sa.update(policies).where(p.name == name, p.token == before, p.expires <= now)
            return after if connection.execute(ended.values(token=after, **new)).rowcount else 0

    def leave_policy(self, name: str, token: int) -> None:
        """End a lease, so that another replica can take it at once."""
        p = policies.c
        with self._write_lease() as connection:
            connection.execute(sa.update(policies).where(p.name == name, p.token == token).values(expires=0.0))

    @contextmanager
    def _write_lease(self) -> Iterator[sa.Connection]:
        """A transaction that locks the row of a policy."""
        with self.write() as connection:
            if not self.is_sqlite:
                connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = '{STILL_S}s'")
            yield connection

    def add_groups(self, name: str, new: Sequence[WaitingGroup]) -> None:
        """Write the groups of sessions that ended, for the learner. A session's second group changes nothing, nor does
        one of a session that was deleted meanwhile."""
        with self.write() as connection:
            bare = sa.select(sessions.c.id).outerjoin(groups, groups.c.session_id == sessions.c.id)
            bare = bare.where(sessions.c.id.in_([group.session_id for group in new]), groups.c.session_id.is_(None))
            missing = set(connection.scalars(bare))
            now = self.now(connection)
            rows = [
                {
                    "session_id": group.session_id,
                    "policy": name,
                    "version": group.version,
                    "value": group.trajectories,
                    "created": now,
                }
                for group in new
                if group.session_id in missing
            ]
            if rows:
                connection.execute(sa.insert(groups), rows)

    def waiting_groups(
        self, name: str, limit: int, without: Collection[str] = (), most_bytes: int = MOST_BYTES
    ) -> list[WaitingGroup]:
        """The newest groups that wait for the learner, without those of some sessions, in the order in which they were
        written: `limit` of them, or fewer that have `most_bytes` together, and one at least."""
        g = groups.c
        count_bytes = sa.func.length if self.is_sqlite else sa.func.octet_length
        newest = sa.select(g.session_id, count_bytes(g.value)).where(
            *_waiting(name), g.session_id.not_in(list(without))
        )
        with self.read() as connection:
            sizes = connection.execute(newest.order_by(g.created.desc(), g.session_id.desc()).limit(limit)).all()
            totals = accumulate(size for _, size in sizes)
            ids = [id for (id, size), total in zip(sizes, totals, strict=True) if total <= max(most_bytes, size)]
            rows = sa.select(g.session_id, g.version, g.value).where(g.session_id.in_(ids))
            found = connection.execute(rows.order_by(g.created, g.session_id))
            return [WaitingGroup(row.session_id, row.version, row.value) for row in found]

    def waiting_below(self, name: str, version: int) -> list[str]:
        """The sessions of the groups that wait and were sampled by weights before those of a step."""
        old = sa.select(groups.c.session_id).where(*_waiting(name), groups.c.version < version)
        with self.read() as connection:
            return list(connection.scalars(old.limit(MOST_DROPPED)))

    def count_waiting(self, name: str) -> int:
        with self.read() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(groups).where(*_waiting(name))) or 0

    def publish_policy(self, name: str, token: int, state: Mapping[str, Any], steps: Mapping[str, int]) -> bool:
        """Publish a state and set the step that learned from each session's group, both or neither; their trajectories
        are deleted. False, and nothing is changed, if the lease of `token` has gone to another replica."""
        g = groups.c
        with self._write_lease() as connection:
            mine = sa.update(policies).where(policies.c.name == name, policies.c.token == token)
            if not connection.execute(mine.values(state=dict(state))).rowcount:
                return False
            for step in sorted(set(steps.values())):
                of_step = [session_id for session_id, number in steps.items() if number == step]
                learned = sa.update(groups).where(*_waiting(name), g.session_id.in_(of_step))
                connection.execute(learned.values(step=step, value=None))
            return True


def _waiting(name: str) -> tuple[sa.ColumnElement[bool], ...]:
    return groups.c.policy == name, groups.c.step.is_(None)


def _policy(row: Any, now: float) -> SharedPolicy:
    return SharedPolicy(row.name, row.holder if row.expires > now else "", row.token, row.state)


class StateQueries(Database):
    """The part of an `ExperienceStore` that keeps shared states."""

    def state(self, name: str) -> tuple[dict[str, Any], int] | None:
        """The value of a state and its version, which counts from 1; None if there is no such state."""
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
