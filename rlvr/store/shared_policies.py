"""A policy that replicas of the service train together: which one learns, what it has published, which groups wait.

    token = store.lead_policy("tinker:Qwen/Qwen3-8B", "replica-a", 0, 15.0)     # 0: another replica learns
    store.add_groups("tinker:Qwen/Qwen3-8B", [WaitingGroup("session", 4, trajectories)])
    store.publish_policy("tinker:Qwen/Qwen3-8B", token, state, {"session": 5})  # False: the lease was lost

The right to learn is a lease with a fencing token, which counts from 1 and grows whenever a replica takes the lease.
The learner publishes a state and marks the sessions that it has learned from in one transaction, which only the newest
token can make: a learner that was replaced while it computed changes nothing.
Exercised by tests/test_store_policies.py.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rlvr.store.connections import Database
from rlvr.store.tables import groups, policies, sessions

NOT_LEARNED = 0  # the step of a group that no step learned from: equal rewards, too old, or refused
_LOCK = 0x726C7670  # "rlvp": the advisory lock under which PostgreSQL's leases change hands


@dataclass(frozen=True)
class SharedPolicy:
    """`state` is what the learner published last, None before that; `holder` the replica that learns, '' if the lease
    has ended."""

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
        holds it. A policy is taken only while no replica learns another one in this database."""
        p = policies.c
        with self.write() as connection:
            until = self.now(connection) + seconds
            if token:
                mine = sa.update(policies).where(p.name == name, p.token == token)
                if connection.execute(mine.values(expires=until)).rowcount:
                    return token
        with self.read() as connection:  # most calls of a replica that does not learn end here
            if connection.scalar(sa.select(p.name).where(p.expires > self.now(connection))):
                return 0
        with self.write() as connection:
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
            # Its holder may have renewed it since it was read.
            ended = sa.update(policies).where(p.name == name, p.token == before, p.expires <= now)
            return before + 1 if connection.execute(ended.values(token=before + 1, **new)).rowcount else 0

    def leave_policy(self, name: str, token: int) -> None:
        """End a lease, so that another replica can take it at once."""
        p = policies.c
        with self.write() as connection:
            connection.execute(sa.update(policies).where(p.name == name, p.token == token).values(expires=0.0))

    def add_groups(self, name: str, new: Sequence[WaitingGroup]) -> None:
        """Write the groups of sessions that ended, for the learner. A session's second group changes nothing, nor does
        one of a session that was deleted meanwhile."""
        with self.write() as connection:
            bare = sa.select(sessions.c.id).outerjoin(groups, groups.c.session_id == sessions.c.id)
            bare = bare.where(sessions.c.id.in_([group.session_id for group in new]), groups.c.session_id.is_(None))
            missing = set(connection.scalars(bare))
            rows = [
                {
                    "session_id": group.session_id,
                    "policy": name,
                    "version": group.version,
                    "value": group.trajectories,
                    "created": time.time(),
                }
                for group in new
                if group.session_id in missing
            ]
            if rows:
                connection.execute(sa.insert(groups), rows)

    def waiting_groups(self, name: str, limit: int, without: Collection[str] = ()) -> list[WaitingGroup]:
        """The oldest groups that wait for the learner, without those of some sessions."""
        g = groups.c
        oldest = sa.select(g.session_id, g.version, g.value).where(*_waiting(name), g.session_id.not_in(list(without)))
        with self.read() as connection:
            rows = connection.execute(oldest.order_by(g.created, g.session_id).limit(limit))
            return [WaitingGroup(row.session_id, row.version, row.value) for row in rows]

    def count_waiting(self, name: str) -> int:
        with self.read() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(groups).where(*_waiting(name))) or 0

    def publish_policy(self, name: str, token: int, state: Mapping[str, Any], steps: Mapping[str, int]) -> bool:
        """Publish a state and set the step that learned from each session's group, both or neither; their trajectories
        are deleted. False, and nothing is changed, if the lease of `token` has gone to another replica."""
        g = groups.c
        with self.write() as connection:
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
