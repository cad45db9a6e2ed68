"""The curves over all sessions: pass rate, reward and signal, per completion, with evaluations apart from training.

A session solved by the best of 16 samples and one solved by its only sample are not comparable, and their mix changes
over time. A completion is always one sample of the policy. First answers and those after feedback are apart as well:
only tasks whose first answer failed have later ones. The database counts in stretches of answers, over all of them, and
stretches are joined until each point has `FEWEST` completions or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rlvr.service.dashboard.dashboard_data import Chart, Curve
from rlvr.store import ExperienceStore
from rlvr.store.tables import experiences

FEWEST = 20  # completions (or sessions, of their signal) in a point: fewer would be noise
STEADY = 100  # as many as this (a pass rate +-10 points) where that leaves eight points
POINTS = 40  # of a curve, at most
STRETCHES = 400  # that the database counts in
KINDS = {"train": "training", "evaluate": "evaluation"}

_e = experiences.c


@dataclass(frozen=True)
class Stretch:
    """Consecutive answers: the number of the last one, how many count, and their total."""

    last: int
    count: int
    total: float


def overall_charts(store: ExperienceStore) -> list[Chart]:
    """The charts of the overview; those without a point are left out."""
    first, last = _bounds(store)
    if not last:
        return []
    rows = _count_completions(store, first, last)
    passes = {key: [Stretch(row["last"], row["judged"], row["passed"]) for row in rows[key]] for key in rows}
    rewards = {key: [Stretch(row["last"], row["rewarded"], row["reward"] or 0.0) for row in rows[key]] for key in rows}
    at_least = f"a point is {FEWEST} or more"
    charts = [
        Chart("Pass rate", _by_kind(passes, later=0), True, "answer", f"of first answers, {at_least}",
              "% of judged answers"),
        Chart("Pass rate after feedback", _by_kind(passes, later=1), True, "answer",
              f"of later answers, to tasks whose first one failed, {at_least}",
              "% of judged answers"),
        Chart("Reward", _by_kind(rewards, later=0), False, "answer", f"of first answers, {at_least}",
              "mean reward of an answer"),
        Chart("Sessions with signal", _curves({"training": _count_signal(store, first, last)}), True, "answer",
              f"their rewards differ, {at_least}", "% of sessions"),
    ]  # fmt: skip
    return [chart for chart in charts if chart.lines]


def join_stretches(stretches: Sequence[Stretch]) -> list[tuple[float, float]]:
    """(the last answer, the mean) of joined stretches with `FEWEST` or more each; what is left joins the last point."""
    whole = sum(one.count for one in stretches)
    size = max(FEWEST, min(STEADY, whole / 8), whole / POINTS)
    joined: list[Stretch] = []
    count, total = 0, 0.0
    for one in stretches:
        count, total = count + one.count, total + one.total
        if count >= size:
            joined.append(Stretch(one.last, count, total))
            count, total = 0, 0.0
    if count and joined:
        point = joined.pop()
        joined.append(Stretch(stretches[-1].last, point.count + count, point.total + total))
    return [(float(one.last), one.total / one.count) for one in joined]


def _by_kind(stretches: dict[tuple[str, int], list[Stretch]], later: int) -> list[Curve]:
    return _curves({name: stretches.get((kind, later), []) for kind, name in KINDS.items()})


def _curves(named: dict[str, list[Stretch]]) -> list[Curve]:
    curves = [Curve(name, join_stretches(stretches)) for name, stretches in named.items()]
    return [curve for curve in curves if curve.points]


def _bounds(store: ExperienceStore) -> tuple[int, int]:
    """The first and the last answer of sessions; 0 without one."""
    with store.read() as connection:
        found = sa.select(sa.func.min(_e.id), sa.func.max(_e.id)).where(_e.step.is_(None))
        first, last = connection.execute(found).one()
    return first or 0, last or 0


def _count_completions(store: ExperienceStore, first: int, last: int) -> dict[tuple[str, int], list[Any]]:
    """By kind, and whether an answer is a later one: counts by stretch, in order."""
    later, stretch = sa.case((_e.iteration > 1, 1), else_=0), _stretch_of(_e.id, first, last)
    counted = sa.select(
        _e.kind,
        later.label("later"),
        sa.func.max(_e.id).label("last"),
        _sum(_e.outcome.in_(("passed", "failed"))).label("judged"),
        _sum(_e.outcome == "passed").label("passed"),
        sa.func.count(_e.reward).label("rewarded"),
        sa.func.sum(_e.reward).label("reward"),
    )
    counted = counted.where(_e.kind.in_(KINDS)).group_by(_e.kind, later, stretch)
    rows: dict[tuple[str, int], list[Any]] = {}
    with store.read() as connection:
        for row in connection.execute(counted.order_by(sa.func.max(_e.id))).mappings():
            rows.setdefault((row["kind"], row["later"]), []).append(row)
    return rows


def _count_signal(store: ExperienceStore, first: int, last: int) -> list[Stretch]:
    """Training sessions with two rewarded answers or more, and how many of them have rewards that differ."""
    sessions = (
        sa.select(
            sa.func.max(_e.id).label("last"),
            sa.case((sa.func.max(_e.reward) > sa.func.min(_e.reward), 1), else_=0).label("differ"),
        )
        .where(_e.kind == "train", _e.reward.is_not(None))
        .group_by(_e.session_id)
        .having(sa.func.count() > 1)
        .subquery()
    )
    s = sessions.c
    counted = sa.select(sa.func.max(s.last), sa.func.count(), sa.func.sum(s.differ))
    counted = counted.group_by(_stretch_of(s.last, first, last))
    with store.read() as connection:
        return [Stretch(*row) for row in connection.execute(counted.order_by(sa.func.max(s.last)))]


def _stretch_of(id: sa.ColumnElement[int], first: int, last: int) -> sa.ColumnElement[int]:
    return (id - first) * STRETCHES // (last - first + 1)


def _sum(event: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
    return sa.func.sum(sa.case((event, 1), else_=0))
