"""Experiences in the store: written once even if repeated, read by task, session, outcome or step, rated by people.

The replay buffer holds the newest answers of the service's sessions, of which those with a `gain` can be learned from.
Training runs learn on policy: their answers are no part of it. Statistics are in `rlvr.store.analysis`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import ReturningInsert

from rlvr.store.connections import Database
from rlvr.store.records import Experience, Status
from rlvr.store.session_queries import update_row
from rlvr.store.tables import error_types, experiences, ratings

REWARD_SPAN = 2.0  # a session's reward is in [0, 2]: what a rating of 1 is worth
CODE = 200  # characters of an error type by which it is counted: PostgreSQL's indexes take no long ones
_WITHOUT_TOKENS = [c for c in experiences.c if c.name not in ("tokens", "logprobs")]
Key = tuple[str, int, int]
_KEY = (experiences.c.session_id, experiences.c.sample, experiences.c.iteration)
_TEXTS = ("prompt", "generated_output", "feedback", "scores", "tokens", "logprobs")
_COLUMNS = [column for column in experiences.c if column.name not in _TEXTS]


class ExperienceQueries(Database):
    """The part of an `ExperienceStore` that keeps experiences and what people think of them."""

    def add_experiences(self, new: Sequence[Experience]) -> list[int]:
        """Write them, all or none; their ids, in the order given.

        (session_id, sample, iteration) identifies an experience; an existing one is not changed. ValueError if one of
        the sessions does not exist.
        """
        if not new:
            return []
        with self.write() as connection:
            return self._insert(connection, new)

    def record_answers(
        self,
        session_id: str,
        new: Sequence[Experience],
        progress: Mapping[str, Any],
        expect: Status | Collection[Status],
        **ending: Any,
    ) -> tuple[list[int], bool]:
        """Write a session's answers and its row, both or neither; the answers' ids, and whether the session was as
        expected. If it was not, `progress` is still set, because it describes the answers, and `ending` is not."""
        with self.write() as connection:
            ids = self._insert(connection, new) if new else []
            was_expected = update_row(connection, session_id, expect, {**ending, **progress})
            if new and not was_expected:
                update_row(connection, session_id, None, progress)
            return ids, was_expected

    @cached_property
    def _insert_once(self) -> ReturningInsert[Any, Any, Any, Any]:
        insert = (sqlite if self.is_sqlite else postgresql).insert(experiences)
        once = insert.on_conflict_do_nothing(index_elements=["session_id", "sample", "iteration"])
        return once.returning(experiences.c.id, *_KEY)

    def _insert(self, connection: sa.Connection, new: Sequence[Experience]) -> list[int]:
        rows = {_key(e): _row(e) for e in new}
        try:
            written = connection.execute(self._insert_once, list(rows.values()))
        except exc.IntegrityError as error:
            known = ", ".join(sorted({session for session, _, _ in rows}))[:200]
            raise ValueError(f"experiences: one of the sessions {known} does not exist; add it first") from error
        ids: dict[Key, int] = {(session, sample, iteration): id for id, session, sample, iteration in written}
        codes = [
            {"experience_id": ids[_key(e)], "code": code, "task_id": e.task_id, "verifier": named.get(code, "")}
            for e in {_key(e): e for e in new if _key(e) in ids}.values()
            for named in [_verifiers_by_code(e.scores)]
            for code in dict.fromkeys(str(code)[:CODE] for code in e.feedback.get("error_types") or ())
        ]
        if codes:
            connection.execute(sa.insert(error_types), codes)
        missing = [key for key in rows if key not in ids]
        for session, sample, iteration in missing:
            same = zip(_KEY, (session, sample, iteration), strict=True)
            found = sa.select(experiences.c.id).where(*(column == value for column, value in same))
            ids[session, sample, iteration] = connection.scalars(found).one()
        return [ids[_key(e)] for e in new]

    def experience(self, id: int) -> Experience | None:
        with self.read() as connection:
            return _one(connection, id)

    def experiences(
        self,
        *,
        task_id: str | None = None,
        session_id: str | None = None,
        outcome: str | None = None,
        step: int | None = None,
        after: int | None = None,
        offset: int = 0,
        limit: int = 100,
        newest_first: bool = False,
        tokens: bool = True,
    ) -> list[Experience]:
        """A page, in the order they were written or the other way round; `after` is the last id of the page before.

        `tokens=False` leaves out token ids and log-probs, for a list that shows none.
        """
        id = experiences.c.id
        rules = _where(task_id, session_id, outcome, step)
        if after is not None:
            rules.append(id < after if newest_first else id > after)
        found = sa.select(experiences) if tokens else sa.select(*_WITHOUT_TOKENS)
        found = found.where(*rules).order_by(id.desc() if newest_first else id).limit(limit).offset(offset)
        with self.read() as connection:
            return [Experience(**row) for row in connection.execute(found).mappings()]

    def count(
        self,
        *,
        task_id: str | None = None,
        session_id: str | None = None,
        outcome: str | None = None,
        step: int | None = None,
    ) -> int:
        counted = sa.select(sa.func.count()).select_from(experiences)
        with self.read() as connection:
            return connection.scalar(counted.where(*_where(task_id, session_id, outcome, step))) or 0

    def rate(self, id: int, owner: str, rating: float, comment: str = "", weight: float = 0.2) -> Experience | None:
        """A person's rating of an answer, 0 to 1; a second one of the same owner replaces the first.

        The mean of all ratings becomes `rating`, and `weight` of the reward: (1 - weight) x the verifiers' + weight x
        2 x the mean (a session's reward is in [0, 2]). Where verifiers gave no reward, and in training runs, whose
        rewards have other scales, it stays what it was. None where there is no such experience.
        """
        if not (math.isfinite(rating) and 0 <= rating <= 1):
            raise ValueError(f"rating={rating}; expected a number from 0 (bad) to 1 (good)")
        assert 0 <= weight <= 1, weight
        e = experiences.c
        with self.write() as connection:
            # The lock keeps two people who rate at once from each missing the other's.
            if connection.scalar(sa.select(e.id).where(e.id == id).with_for_update()) is None:
                return None
            insert = (sqlite if self.is_sqlite else postgresql).insert(ratings)
            given = {"rating": rating, "comment": comment, "created": time.time()}
            insert = insert.values(experience_id=id, owner=owner, **given)
            connection.execute(insert.on_conflict_do_update(index_elements=["experience_id", "owner"], set_=given))
            known = sa.select(sa.func.avg(ratings.c.rating), sa.func.count()).where(ratings.c.experience_id == id)
            mean, number = connection.execute(known).one()
            # NULL if the verifiers gave no reward: it stays NULL.
            blended = e.verified_reward * (1 - weight) + weight * REWARD_SPAN * mean
            changes = {
                "rating": mean,
                "ratings": number,
                "reward": sa.case((e.step.is_(None), blended), else_=e.reward),
            }
            connection.execute(sa.update(experiences).where(e.id == id).values(changes))
            return _one(connection, id)

    def set_advantages(self, values: Mapping[int, float]) -> None:
        self._set("advantage", values)

    def set_gains(self, values: Mapping[int, float]) -> None:
        self._set("gain", values)

    def _set(self, name: str, values: Mapping[int, float]) -> None:
        """A field of many experiences. Ids that do not exist (pruned meanwhile) are skipped."""
        if not values:
            return
        # In order of their ids, so that two instances setting the same rows cannot deadlock.
        rows = [{"row": id, "new": values[id]} for id in sorted(values)]
        new = {name: sa.bindparam("new", type_=experiences.c[name].type)}
        update = sa.update(experiences).where(experiences.c.id == sa.bindparam("row")).values(new)
        with self.write() as connection:
            connection.execute(update, rows)


def _one(connection: sa.Connection, id: int) -> Experience | None:
    row = connection.execute(sa.select(experiences).where(experiences.c.id == id)).mappings().first()
    return Experience(**row) if row else None


def _verifiers_by_code(scores: dict[str, Any]) -> dict[str, str]:
    """The verifier that named each error type of an answer; the first of several."""
    return {
        code[:CODE]: verifier
        for verifier, score in reversed(scores.items())
        if score.get("outcome") != "passed"
        for code in (score.get("reason") or score.get("outcome") or "").split("+")
    }


def _key(e: Experience) -> Key:
    return e.session_id, e.sample, e.iteration


def _row(e: Experience) -> dict[str, Any]:
    row = {**vars(e), "created": e.created or time.time()}
    if e.verified_reward is None:
        row["verified_reward"] = e.reward
    del row["id"]
    return row


def _where(
    task_id: str | None, session_id: str | None, outcome: str | None, step: int | None
) -> list[sa.ColumnElement[bool]]:
    named = {"task_id": task_id, "session_id": session_id, "outcome": outcome, "step": step}
    return [experiences.c[name] == value for name, value in named.items() if value is not None]


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
