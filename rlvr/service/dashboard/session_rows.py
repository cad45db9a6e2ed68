"""The dashboard's queries on the store: rows of a table without their long texts, and a few numbers.

Texts are cut in the database: an answer may have a megabyte, and a table shows a line of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rlvr.service.dashboard.dashboard_data import HEAD, Query
from rlvr.store import Experience, ExperienceStore, Session, Status
from rlvr.store.patterns import JUDGED, SERVED
from rlvr.store.records import SUCCESS, UNVERIFIED
from rlvr.store.tables import experiences, sessions

CUT = 2 * HEAD + 1  # characters of a text in a row
MOST_TASKS = 1000  # that a filter offers
MOST_ANSWERS = 5000  # of a session in its curves
_e, _s = experiences.c, sessions.c
FILTERS = frozenset({"outcome", "task", "steps", "rewards", "status", "strategy"})
SORTS: dict[str, sa.ColumnElement[Any]] = {"reward": _e.reward, "advantage": _e.advantage, "tokens": _e.num_tokens}
_COLUMNS = (
    _e.id, _e.session_id, _e.task_id, _e.iteration, _e.outcome, _e.reward, _e.advantage, _e.num_tokens, _e.rating,
    _e.scores, _e.confidence, sa.func.substr(_e.prompt, 1, CUT).label("prompt"),
    sa.func.substr(_e.generated_output, 1, CUT).label("generated_output"), _s.status,
)  # fmt: skip


Rows = Sequence[Mapping[Any, Any]]


def _fetch(store: ExperienceStore, query: sa.Select[*tuple[Any, ...]]) -> Rows:
    with store.read() as connection:
        return connection.execute(query).mappings().all()


def list_page(store: ExperienceStore, query: Query) -> tuple[Rows, int]:
    """Answers with the status of their session, and their total."""
    joined = experiences.join(sessions, _s.id == _e.session_id)
    rules = _rules(query)
    rows = sa.select(*_COLUMNS).select_from(joined).where(*rules).order_by(*_order(query))
    counted = sa.select(sa.func.count()).select_from(joined if query.status else experiences).where(*rules)
    with store.read() as connection:
        page = connection.execute(rows.limit(query.limit).offset(query.offset)).mappings().all()
        return page, connection.scalar(counted) or 0


def _order(query: Query) -> list[sa.ColumnElement[Any]]:
    column = SORTS.get(query.sort.removeprefix("-"))
    if column is None:
        return [_e.id.desc()]
    return [(column.asc() if query.sort.startswith("-") else column.desc()).nulls_last(), _e.id.desc()]


def _rules(query: Query) -> list[sa.ColumnElement[bool]]:
    named = {_e.session_id: query.work, _e.outcome: query.outcome, _e.action: query.more.strategy}
    rules = [column == value for column, value in named.items() if value]
    if query.task:
        rules.append(_e.task_id.contains(query.task, autoescape=True))
    steps = query.more.steps if query.step is None else (query.step, query.step)
    for column, (low, high) in ((_e.iteration, steps), (_e.reward, query.more.rewards)):
        rules += ([] if low is None else [column >= low]) + ([] if high is None else [column <= high])
    if query.status:
        is_status = query.status in {status.value for status in Status}
        rules.append(_s.status == Status(query.status) if is_status else sa.false())
    return rules


def list_siblings(store: ExperienceStore, e: Experience, of_run: bool, limit: int) -> Rows:
    """The other answers of a session, in order; of a run, those to the same task at the same step."""
    joined = experiences.join(sessions, _s.id == _e.session_id)
    rules = [_e.session_id == e.session_id, _e.id != e.id]
    if of_run:
        rules += [_e.iteration == e.iteration, _e.task_id == e.task_id]
    query = sa.select(*_COLUMNS).select_from(joined).where(*rules)
    return _fetch(store, query.order_by(_e.sample, _e.iteration).limit(limit))


def session_answers(store: ExperienceStore, session: str) -> Rows:
    """Confidence and reward of the answers of one session, at most `MOST_ANSWERS`."""
    query = sa.select(_e.sample, _e.iteration, _e.reward, _e.confidence).where(_e.session_id == session)
    return _fetch(store, query.order_by(_e.iteration, _e.sample).limit(MOST_ANSWERS))


def run_steps(store: ExperienceStore, run: str) -> Rows:
    """A training run by step: means over its answers, and the share of groups with signal (rewards that differ)."""
    groups = (
        sa.select(
            _e.iteration,
            sa.func.sum(_e.reward).label("reward"),
            sa.func.count(_e.reward).label("rewarded"),
            sa.func.sum(_e.confidence).label("passed"),
            sa.func.count(_e.confidence).label("judged"),
            sa.case((sa.func.max(_e.reward) > sa.func.min(_e.reward), 1.0), else_=0.0).label("differ"),
        )
        .where(_e.session_id == run)
        .group_by(_e.iteration, _e.task_id)
        .subquery()
    )
    g = groups.c
    query = sa.select(
        g.iteration,
        (sa.func.sum(g.reward) / sa.func.nullif(sa.func.sum(g.rewarded), 0)).label("reward"),
        (sa.func.sum(g.passed) / sa.func.nullif(sa.func.sum(g.judged), 0)).label("passed"),
        sa.func.avg(g.differ).label("signal"),
    )
    return _fetch(store, query.group_by(g.iteration).order_by(g.iteration))


def iteration_means(store: ExperienceStore, session: str, iteration: int) -> Mapping[Any, Any]:
    """The means over all answers of one iteration; None for a number that none has."""
    names = ("reward", "confidence", "correctness", "quality", "gain", "advantage", "num_tokens", "seconds")
    query = sa.select(*(sa.func.avg(_e[name]).label(name) for name in names))
    return _fetch(store, query.where(_e.session_id == session, _e.iteration == iteration))[0]


def filter_choices(store: ExperienceStore, session: str) -> tuple[list[str], int | None]:
    """The tasks (at most `MOST_TASKS`) and the last iteration."""
    mine = [_s.id == session] if session else []
    tasks = sa.select(_s.task_id).where(_s.task_id != "", *mine).group_by(_s.task_id).limit(MOST_TASKS)
    last = sa.select(sa.func.max(_e.iteration)).where(*([_e.session_id == session] if session else []))
    with store.read() as connection:
        return sorted(connection.scalars(tasks)), connection.scalar(last)


def count_by_strategy(store: ExperienceStore) -> dict[str, tuple[int, int]]:
    """How many answers of each strategy passed, and how many were judged."""
    passed, judged = (sa.func.sum(sa.case((_e.outcome.in_(names), 1), else_=0)) for names in (JUDGED[:1], JUDGED))
    query = sa.select(_e.action, passed, judged).where(_e.action != "", _e.kind.in_(SERVED)).group_by(_e.action)
    with store.read() as connection:
        return {name: (int(good), int(count)) for name, good, count in connection.execute(query)}


def newest_change(store: ExperienceStore) -> object:
    """A value that changes with every new answer or status: the last answer and the newest sessions."""
    recent = sa.select(_s.id, _s.status, _s.iterations).order_by(_s.created.desc(), _s.id.desc()).limit(50)
    with store.read() as connection:
        last = connection.scalar(sa.select(sa.func.max(_e.id)))
        return last, tuple(tuple(row) for row in connection.execute(recent))


@dataclass(frozen=True)
class InstanceLoad:
    """The open sessions of one process: when it was heard from last, and since when the first one waits."""

    instance: str
    running: int
    queued: int
    heartbeat: float
    oldest: float | None


def load(store: ExperienceStore) -> tuple[list[InstanceLoad], float]:
    """The instances with open sessions, and the database's time."""
    waits = _s.status == Status.QUEUED
    found = sa.select(
        _s.instance,
        sa.func.sum(sa.case((waits, 0), else_=1)),
        sa.func.sum(sa.case((waits, 1), else_=0)),
        sa.func.max(_s.heartbeat),
        sa.func.min(sa.case((waits, _s.created))),
    )
    found = found.where(_s.status.in_([Status.RUNNING, Status.QUEUED])).group_by(_s.instance).order_by(_s.instance)
    with store.read() as connection:
        return [InstanceLoad(*row) for row in connection.execute(found)], store.now(connection)


# Whether a session that is done has solved its task (`Session.is_solved`), as the database says it.
_passed = sa.or_(sa.and_(_s.outcome == "passed", _s.final_confidence > 0),
                 sa.and_(_s.outcome == "", _s.final_confidence > SUCCESS))  # fmt: skip
RESULTS: dict[str, sa.ColumnElement[bool]] = {
    "solved": sa.and_(_s.status == Status.DONE, _passed),
    "not solved": sa.and_(_s.status == Status.DONE, _s.final_confidence.is_not(None), sa.not_(_passed)),
    UNVERIFIED: sa.and_(_s.status == Status.DONE, _s.final_confidence.is_(None)),
    **{status.value: _s.status == status for status in Status},
}
SESSION_SORTS: dict[str, sa.ColumnElement[Any]] = {
    "created": _s.created, "iterations": _s.iterations, "confidence": _s.final_confidence,
    "seconds": _s.finished - _s.started, "waited": _s.started - _s.created,
}  # fmt: skip
_LISTED = [column for column in _s if column.name not in ("prompt", "request", "final_solution")]


def sessions_page(
    store: ExperienceStore, result: str, task: str, sort: str, offset: int, limit: int
) -> tuple[list[Session], int]:
    """Sessions of a result whose task contains a text, in an order of `SESSION_SORTS`, and their total."""
    rules = [RESULTS.get(result, sa.false())] if result else []
    rules += [_s.task_id.contains(task, autoescape=True)] if task else []
    column = SESSION_SORTS.get(sort.removeprefix("-"), _s.created)
    order = (column.asc() if sort.startswith("-") else column.desc()).nulls_last()
    listed = sa.select(*_LISTED, sa.func.substr(_s.prompt, 1, CUT).label("prompt")).where(*rules)
    with store.read() as connection:
        rows = connection.execute(listed.order_by(order, _s.id.desc()).limit(limit).offset(offset)).mappings()
        total = connection.scalar(sa.select(sa.func.count()).select_from(sessions).where(*rules))
        return [Session(**row) for row in rows], total or 0


def steps_of(store: ExperienceStore, ids: Sequence[str]) -> dict[str, Rows]:
    """What the answers of some sessions were asked with and what was counted of them, by session."""
    query = sa.select(_e.session_id, _e.iteration, _e.action, _e.outcome, _e.advantage, _e.num_tokens)
    query = query.where(_e.session_id.in_(ids)).order_by(_e.session_id, _e.sample, _e.iteration).limit(MOST_ANSWERS)
    found: dict[str, list[Mapping[Any, Any]]] = {}
    for row in _fetch(store, query):
        found.setdefault(row["session_id"], []).append(row)
    return {**found}


def find_neighbours(store: ExperienceStore, query: Query, key: int) -> tuple[int | None, int | None, int, int] | None:
    """The answers before and after one in the order of a query, its place from 1, and their number."""
    joined = experiences.join(sessions, _s.id == _e.session_id)
    order = _order(query)
    numbered = sa.select(
        _e.id,
        sa.func.lag(_e.id).over(order_by=order).label("before"),
        sa.func.lead(_e.id).over(order_by=order).label("after"),
        sa.func.row_number().over(order_by=order).label("place"),
    )
    all_rows = numbered.select_from(joined if query.status else experiences).where(*_rules(query)).subquery()
    n = all_rows.c
    total = sa.select(sa.func.count()).select_from(all_rows).scalar_subquery()
    rows = _fetch(store, sa.select(n.before, n.after, n.place, total.label("total")).where(n.id == key))
    return (rows[0]["before"], rows[0]["after"], rows[0]["place"], rows[0]["total"]) if rows else None
