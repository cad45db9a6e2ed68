"""Sessions in the store: which instance works on them, heartbeats, and the end of sessions whose instance is gone.

A session belongs to the `instance` that works on it, which calls `heartbeat(instance)` every few seconds.
`interrupt_lost` ends the sessions of instances without heartbeats; of several concurrent callers one gets each session.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import sqlalchemy as sa

from rlvr.store.connections import Database
from rlvr.store.records import Session, Status
from rlvr.store.tables import sessions

OPEN = [status for status in Status if not status.final]
RUN_SILENCE_S = 3600.0  # a training run sends one heartbeat per step, and a step may be slow
_FIELDS = {f.name for f in fields(Session)}
PROBE_BYTES = 16 << 10  # of a session that is written to see whether one can be
ROOM = 4 << 20  # bytes that sessions may need at once
SHOWN = 2_000  # characters of a prompt in a list
# Built once: building one takes as long as running it. The columns to set are those of the parameters.
_INSERT, _SELECT_ID = sa.insert(sessions), sa.select(sessions.c.id).where(sessions.c.id == sa.bindparam("row"))
_UPDATE = sa.update(sessions).where(sessions.c.id == sa.bindparam("row"))
_UPDATE_EXPECTED = _UPDATE.where(sessions.c.status.in_(sa.bindparam("expected", expanding=True)))
_LIGHT = [
    sa.func.substr(column, 1, SHOWN).label("prompt") if column.name == "prompt" else column
    for column in sessions.c
    if column.name not in ("request", "final_solution")
]


class SessionQueries(Database):
    """The part of an `ExperienceStore` that keeps sessions."""

    def add_session(self, session: Session) -> bool:
        """Write a new session; False, changing nothing, where its id is there already. 0 for a time means now."""
        with self.write() as connection:
            now = self.now(connection)
            row = {**vars(session), "created": session.created or now, "heartbeat": session.heartbeat or now}
            if connection.scalar(_SELECT_ID, {"row": session.id}):
                return False
            connection.execute(_INSERT, row)
            return True

    def check_writable(self) -> None:
        """StoreDown unless a session could be written now: writes one and deletes it, in one transaction."""
        probe = Session(f"probe-{uuid.uuid4()}", "", "", final_solution=secrets.token_hex(PROBE_BYTES // 2))
        with self.write() as connection:
            connection.execute(sa.insert(sessions).values(vars(probe)))
            connection.execute(sa.delete(sessions).where(sessions.c.id == probe.id))
        self.check_room(ROOM)

    def session(self, id: str) -> Session | None:
        with self.read() as connection:
            row = connection.execute(sa.select(sessions).where(sessions.c.id == id)).mappings().first()
            return Session(**row) if row else None

    def sessions(
        self,
        *,
        status: Status | Collection[Status] | None = None,
        task_id: str | None = None,
        kind: str | None = None,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        texts: bool = True,
    ) -> list[Session]:
        """The newest first. `texts=False`, for a list: the prompt is cut in the database, and the request and the
        solution stay there. Each of them may have megabytes, and a list has hundreds of rows."""
        found = sa.select(sessions) if texts else sa.select(*_LIGHT)
        found = found.where(*_where(status, task_id, kind, owner))
        found = found.order_by(sessions.c.created.desc(), sessions.c.id.desc()).limit(limit).offset(offset)
        with self.read() as connection:
            return [Session(**row) for row in connection.execute(found).mappings()]

    def newest_metrics(self, limit: int) -> list[dict[str, Any]]:
        """The `metrics`, and no other column, of the newest sessions of the service with status done; newest first."""
        found = sa.select(sessions.c.metrics).where(*_where(Status.DONE), sessions.c.kind != "run")
        with self.read() as connection:
            return [row for row in connection.scalars(found.order_by(sessions.c.created.desc()).limit(limit)) if row]

    def count_sessions(
        self, *, task_id: str | None = None, kind: str | None = None, owner: str | None = None
    ) -> dict[Status, int]:
        """The number of sessions of each status."""
        counted = sa.select(sessions.c.status, sa.func.count()).where(*_where(None, task_id, kind, owner))
        with self.read() as connection:
            found = {status: n for status, n in connection.execute(counted.group_by(sessions.c.status))}
        return {status: found.get(status, 0) for status in Status}

    def update_session(self, id: str, *, expect: Status | Collection[Status] | None = None, **changes: Any) -> bool:
        """Set fields of a session; False if no session has that id, or if its status is not in `expect`."""
        with self.write() as connection:
            return update_row(connection, id, expect, changes)

    def claim(self, id: str, instance: str) -> bool:
        """Take a queued session to work on it: RUNNING from now on. False where another instance was first."""
        with self.write() as connection:
            now = self.now(connection)
            given = {"row": id, "expected": [Status.QUEUED]}
            taken = {"status": Status.RUNNING, "instance": instance, "started": now, "heartbeat": now}
            return connection.execute(_UPDATE_EXPECTED, given | taken).rowcount == 1

    def heartbeat(self, instance: str) -> int:
        """Record that this instance is alive; return the number of its open sessions."""
        with self.write() as connection:
            mine = sa.update(sessions).where(sessions.c.instance == instance, sessions.c.status.in_(OPEN))
            return connection.execute(mine.values(heartbeat=self.now(connection))).rowcount

    def interrupt_lost(self, instance: str, older_than_s: float) -> list[str]:
        """End, as INTERRUPTED, open sessions whose instance is gone; return the ids that this call ended.

        These are sessions without a heartbeat for `older_than_s` seconds (training runs: at least an hour), and those
        of an earlier process of this instance: without a heartbeat since this store was opened.
        """
        with self.write() as connection:
            now = self.now(connection)
            silent = now - older_than_s
            run_silent = now - max(older_than_s, RUN_SILENCE_S)
            is_run, beat = sessions.c.kind == "run", sessions.c.heartbeat
            lost = sa.or_(
                sa.and_(~is_run, beat <= silent),
                sa.and_(is_run, beat <= run_silent),
                sa.and_(~is_run, sessions.c.instance == instance, beat < self.opened_at),
            )
            why = {"code": "interrupted", "message": "the process that worked on this session is gone"}
            ended = sa.update(sessions).where(sessions.c.status.in_(OPEN), lost).returning(sessions.c.id)
            return sorted(connection.scalars(ended.values(status=Status.INTERRUPTED, finished=now, error=why)))


def update_row(
    connection: sa.Connection, id: str, expect: Status | Collection[Status] | None, changes: Mapping[str, Any]
) -> bool:
    """`SessionQueries.update_session` within a transaction."""
    unknown = changes.keys() - (_FIELDS - {"id"})
    assert not unknown and changes, f"update_session: {sorted(unknown) or 'nothing'} to set"
    given: dict[str, Any] = {**changes, "row": id}
    if expect is None:
        return connection.execute(_UPDATE, given).rowcount == 1
    given["expected"] = [expect] if isinstance(expect, Status) else list(expect)
    return connection.execute(_UPDATE_EXPECTED, given).rowcount == 1


def _where(
    status: Status | Collection[Status] | None,
    task_id: str | None = None,
    kind: str | None = None,
    owner: str | None = None,
) -> list[sa.ColumnElement[bool]]:
    wanted = [status] if isinstance(status, Status) else status
    rules = [] if wanted is None else [sessions.c.status.in_(list(wanted))]
    named = {"task_id": task_id, "kind": kind, "owner": owner}
    return rules + [sessions.c[name] == value for name, value in named.items() if value is not None]
