"""Statistics of the experiences: of one task, by task, and of all. The database computes them.

A completion without a verdict (confidence or reward None) counts in the totals and is in no mean, share or trend. A
statistic over no rows is None, never 0. Success is the outcome `passed`; a row without an outcome succeeds by a
confidence above 0.7.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from rlvr.store.connections import Database
from rlvr.store.records import SUCCESS, Status
from rlvr.store.tables import error_types, experiences, sessions

BINS = (("very_low", 0.2), ("low", 0.4), ("medium", 0.6), ("high", 0.8))  # up to, not including; then "very_high"

_e, _s = experiences.c, sessions.c


def _success_rate(outcome: sa.ColumnElement[str], confidence: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """The share of rows that succeeded, over those with a confidence (`Session.is_solved`)."""
    passed = sa.or_(sa.and_(outcome == "passed", confidence > 0), sa.and_(outcome == "", confidence > SUCCESS))
    return sa.func.avg(sa.case((confidence.is_(None), None), (passed, 1.0), else_=0.0))


def _how_many(event: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.func.coalesce(sa.func.sum(sa.case((event, 1), else_=0)), 0)


class AnalysisQueries(Database):
    """The part of an `ExperienceStore` that computes statistics."""

    def task_analysis(self, task_id: str) -> dict[str, Any] | None:
        """The `analysis` of a task; None where it has no experiences.

        `reward_variance` is the population's. `improvement_trend` is the mean reward of the newer half of its judged
        answers less that of the older half (an odd one counts with the older): what became of the task, in units of
        reward. Training runs' answers count where sessions gave none: their rewards have other scales.
        """
        with self.read() as connection:
            here, served = _e.task_id == task_id, sa.and_(_e.task_id == task_id, _e.step.is_(None))
            # Checked first: telling the two apart reads every row, while this reads the index alone.
            runs = connection.scalar(sa.select(sa.exists().where(_s.kind == "run")))
            if runs and connection.scalar(sa.select(sa.exists().where(served))):
                return _analyse(connection, served, error_types.c.experience_id.in_(sa.select(_e.id).where(served)))
            return _analyse(connection, here, error_types.c.task_id == task_id)

    def aggregates(self, limit: int | None = None) -> dict[str, dict[str, Any]]:
        """By task, the results of the service's training sessions: the `task_aggregates` of its metrics.

        `average_iterations` is over sessions that ended; `average_confidence` and `success_rate` over those whose
        final answer was judged, the best of which (the first of equals) is `best_session_id`. `limit` keeps the tasks
        with the most sessions.
        """
        place = sa.func.row_number().over(
            partition_by=_s.task_id, order_by=(_s.final_confidence.desc().nulls_last(), _s.created, _s.id)
        )
        # One pass: to join the tasks with their best sessions takes time with the square of their number.
        row = (
            sa.select(
                *(_s.task_id, _s.id, _s.final_confidence, _s.iterations, _s.status, _s.outcome), place.label("place")
            )
            .where(_s.kind == "train")
            .subquery()
            .c
        )
        ended = row.status.in_([status for status in Status if status.final])
        is_best = sa.and_(row.place == 1, row.final_confidence.is_not(None))
        total = sa.func.count().label("total")
        grouped = sa.select(
            row.task_id,
            total,
            sa.func.avg(row.final_confidence),
            sa.func.avg(sa.case((ended, row.iterations * 1.0))),
            _success_rate(row.outcome, row.final_confidence),
            sa.func.max(sa.case((is_best, row.id))),
            sa.func.max(sa.case((is_best, row.final_confidence))),
        ).group_by(row.task_id)
        with self.read() as connection:
            rows = connection.execute(grouped.order_by(total.desc(), row.task_id).limit(limit)).all()
        return {
            task: {
                "task_id": task,
                "total_sessions": sessions,
                "average_confidence": confidence,
                "average_iterations": None if iterations is None else float(iterations),
                "success_rate": success,
                "best_session_id": best_id,
                "best_confidence": best_confidence,
            }
            for task, sessions, confidence, iterations, success, best_id, best_confidence in rows
        }

    def global_stats(self) -> Mapping[str, Any]:
        """The `global_stats` of the service, over the answers of its sessions and without those of training runs.

        Their rewards have other scales. `success_rate` leaves evaluations out. `last_updated` is when the newest was
        written, in seconds since the epoch.
        The variance is E[x^2] - E[x]^2, which needs one pass and is exact enough for rewards between 0 and 2.
        """
        stats = sa.select(
            sa.func.count(),
            sa.func.avg(_e.reward),
            sa.func.avg(_e.reward * _e.reward),
            _success_rate(_e.outcome, sa.case((_e.kind == "train", _e.confidence))),
            sa.func.max(_e.created),
        ).where(_e.step.is_(None))
        with self.read() as connection:
            total, mean, square, success, updated = connection.execute(stats).one()
        return {
            "total_experiences": total,
            "average_reward": mean,
            "reward_variance": None if mean is None else max(0.0, square - mean * mean),
            "success_rate": success,
            "last_updated": updated,
        }


def _analyse(
    connection: sa.Connection, here: sa.ColumnElement[bool], coded: sa.ColumnElement[bool]
) -> dict[str, Any] | None:
    """Over the experiences `here`, and those of their error types that are `coded`."""
    judged = sa.and_(here, _e.reward.is_not(None))
    mean = sa.select(sa.func.avg(_e.reward)).where(judged).scalar_subquery()
    edges = [0.0, *(edge for _, edge in BINS)]
    within = [
        sa.and_(_e.confidence < high, _e.confidence >= low) if low else _e.confidence < high
        for low, high in pairwise(edges)
    ]
    overall = sa.select(
        sa.func.count(),
        sa.func.avg(_e.reward),
        sa.func.avg((_e.reward - mean) * (_e.reward - mean)),
        _success_rate(_e.outcome, _e.confidence),
        *(_how_many(bin) for bin in within),
        _how_many(_e.confidence >= edges[-1]),
    ).where(here)
    ranked = (
        sa.select(
            _e.reward,
            sa.func.row_number().over(order_by=_e.reward).label("rank"),
            sa.func.count().over().label("n"),
            sa.func.ntile(2).over(order_by=_e.id).label("half"),
        )
        .where(judged)
        .subquery()
    )
    r = ranked.c
    middle = sa.or_(r.rank == (r.n + 1) // 2, r.rank == (r.n + 2) // 2)
    spread = sa.select(
        sa.func.avg(sa.case((middle, r.reward))),
        sa.func.avg(sa.case((r.half == 2, r.reward))) - sa.func.avg(sa.case((r.half == 1, r.reward))),
    )
    errors = sa.select(error_types.c.code, sa.func.count()).where(coded)
    errors = errors.group_by(error_types.c.code).order_by(sa.func.count().desc(), error_types.c.code)
    total, average, variance, success, *bins = tuple(connection.execute(overall).one())
    if not total:
        return None
    median, trend = connection.execute(spread).one()
    common = {code: n for code, n in connection.execute(errors)}
    return {
        "total_experiences": total,
        "average_reward": average,
        "median_reward": median,
        "reward_variance": variance,
        "success_rate": success,
        "improvement_trend": trend,
        "common_errors": common,
        "confidence_distribution": dict(zip([*(name for name, _ in BINS), "very_high"], bins, strict=True)),
    }
