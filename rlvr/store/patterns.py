"""Patterns over all tasks: what goes wrong, by verifier and reason, and how each strategy fares. The database counts.

Answers of the service's sessions only: the rewards of training runs have other scales, and `rlvr doctor` is for them.
An answer counts as judged where it passed or failed.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from rlvr.store.connections import Database
from rlvr.store.tables import error_types, experiences

SERVED = ("train", "evaluate")
JUDGED = ("passed", "failed")
NO_ERROR = "no_error"  # `after` of an answer whose predecessor named no error

_e, _t = experiences.c, error_types.c


@dataclass(frozen=True)
class GroupCounts:
    """The answers to the tasks that the same verifiers decide."""

    verified_by: str
    tasks: int
    answers: int
    judged: int
    passed: int


@dataclass(frozen=True)
class ErrorCounts:
    """Answers with an error of the type `reason`, named by `verifier`, and the tasks that they are of."""

    verified_by: str
    verifier: str
    reason: str
    answers: int
    tasks: int


@dataclass(frozen=True)
class StrategyCounts:
    """A strategy in one situation: first answers (`after` None), or answers after an error of that type.

    `expected` is the number of passes if each task's answers in this situation passed equally often with every
    strategy, `variance` its variance (hypergeometric, summed over tasks), `least` and `most` the numbers that are
    possible at all. `weight` is sum n (N - n) / N over tasks, with n of the task's N answers by this strategy.
    """

    verified_by: str
    after: str | None
    strategy: str
    tasks: int
    answers: int
    passed: int
    expected: float
    variance: float
    least: int
    most: int
    weight: float


class PatternQueries(Database):
    """The part of an `ExperienceStore` that compares tasks."""

    def count_groups(self, limit: int) -> list[GroupCounts]:
        answers = sa.func.count()
        judged = sa.func.sum(sa.case((_e.outcome.in_(JUDGED), 1), else_=0))
        passed = sa.func.sum(sa.case((_e.outcome == "passed", 1), else_=0))
        found = sa.select(_e.verified_by, sa.func.count(_e.task_id.distinct()), answers, judged, passed)
        found = found.where(_e.kind.in_(SERVED)).group_by(_e.verified_by)
        with self.read() as connection:
            rows = connection.execute(found.order_by(answers.desc(), _e.verified_by).limit(limit))
            return [GroupCounts(*row) for row in rows]

    def count_errors(self, limit: int) -> list[ErrorCounts]:
        answers, key = sa.func.count(), (_e.verified_by, _t.verifier, _t.code)
        found = sa.select(*key, answers, sa.func.count(_e.task_id.distinct()))
        found = found.select_from(error_types.join(experiences, _e.id == _t.experience_id))
        found = found.where(_e.kind.in_(SERVED)).group_by(*key).order_by(answers.desc(), *key).limit(limit)
        with self.read() as connection:
            return [ErrorCounts(*row) for row in connection.execute(found)]

    def count_strategies(self, limit: int) -> list[StrategyCounts]:
        """By situation and strategy. An answer after two errors counts in both situations."""
        c = _by_task().c
        n, N, K = (sa.cast(column, sa.Double) for column in (c.answers, c.all_answers, c.all_passed))
        surplus = c.answers + c.all_passed - c.all_answers
        variance = n * (N - n) * K * (N - K) / (N * N * sa.func.nullif(N - 1, 0.0))
        answers, key = sa.func.sum(c.answers), (c.verified_by, c.after, c.action)
        found = sa.select(
            *key,
            sa.func.count(),
            _whole_sum(c.answers),
            _whole_sum(c.passed),
            sa.func.sum(n * K / N),
            sa.func.coalesce(sa.func.sum(variance), 0.0),
            _whole_sum(sa.case((surplus > 0, surplus), else_=0)),
            _whole_sum(sa.case((c.answers < c.all_passed, c.answers), else_=c.all_passed)),
            sa.func.sum(n * (N - n) / N),
        )
        found = found.group_by(*key).order_by(answers.desc(), *key).limit(limit)
        with self.read() as connection:
            return [StrategyCounts(*row) for row in connection.execute(found)]


def _whole_sum(column: sa.ColumnElement[int]) -> sa.ColumnElement[int]:
    """A sum as an integer: PostgreSQL has decimals for sums of counts."""
    return sa.cast(sa.func.sum(column), sa.BigInteger)


def _by_task() -> sa.Subquery:
    """The numbers of answers and of passes by situation, strategy and task, and the totals over all strategies."""
    before, error = experiences.alias("before"), error_types.alias("error")
    same = sa.and_(
        before.c.session_id == _e.session_id, before.c.sample == _e.sample, before.c.iteration == _e.iteration - 1
    )
    joined = experiences.outerjoin(before, same).outerjoin(error, error.c.experience_id == before.c.id)
    after = sa.case((_e.iteration > 1, sa.func.coalesce(error.c.code, NO_ERROR)))
    cells = (
        sa.select(
            _e.verified_by,
            after.label("after"),
            _e.action,
            _e.task_id,
            sa.func.count().label("answers"),
            sa.func.sum(sa.case((_e.outcome == "passed", 1), else_=0)).label("passed"),
        )
        .select_from(joined)
        .where(_e.kind.in_(SERVED), _e.action != "", _e.outcome.in_(JUDGED))
        .group_by(_e.verified_by, after, _e.action, _e.task_id)
        .subquery()
    )
    c = cells.c
    situation = (c.verified_by, c.after, c.task_id)
    return sa.select(
        *c,
        sa.func.sum(c.answers).over(partition_by=situation).label("all_answers"),
        sa.func.sum(c.passed).over(partition_by=situation).label("all_passed"),
    ).subquery()
