"""What the dashboard asks of the store's tables: rows of a table without their long texts, and a few numbers.

Only queries; what is made of them is in `sessions`. A text is cut in the database: an answer may have a megabyte, a row
of a table shows a line of it. Exercised by tests/test_dashboard_sessions.py, on SQLite and PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rlvr.service.dashboard.data import HEAD, Query
from rlvr.store import Experience, Status, Store
from rlvr.store.tables import experiences, sessions

CUT = 2 * HEAD + 1  # characters of a text in a row
KNOWN = 1000  # tasks that a filter offers
MOST = 5000  # answers of a session that its curves are about
_e, _s = experiences.c, sessions.c
_LIGHT = (
    _e.id, _e.session_id, _e.task_id, _e.iteration, _e.outcome, _e.reward, _e.advantage, _e.num_tokens, _e.rating,
    _e.scores, _e.confidence, sa.func.substr(_e.prompt, 1, CUT).label("prompt"),
    sa.func.substr(_e.generated_output, 1, CUT).label("generated_output"), _s.status,
)  # fmt: skip


def page(store: Store, query: Query) -> tuple[Sequence[Mapping[Any, Any]], int]:
    """Answers with the status of their session, the newest first, and how many there are in all."""
    joined = experiences.join(sessions, _s.id == _e.session_id)
    rules = _rules(query)
    found = sa.select(*_LIGHT).select_from(joined).where(*rules).order_by(_e.id.desc())
    counted = sa.select(sa.func.count()).select_from(joined if query.status else experiences).where(*rules)
    with store.reading() as connection:
        rows = connection.execute(found.limit(query.limit).offset(query.offset)).mappings().all()
        return rows, connection.scalar(counted) or 0


def _rules(query: Query) -> list[sa.ColumnElement[bool]]:
    named = {_e.session_id: query.work, _e.task_id: query.task, _e.outcome: query.outcome}
    rules = [column == value for column, value in named.items() if value]
    if query.step is not None:
        rules.append(_e.iteration == query.step)
    if query.status:
        known = query.status in {status.value for status in Status}
        rules.append(_s.status == Status(query.status) if known else sa.false())
    return rules


def together(store: Store, e: Experience, of_run: bool, limit: int) -> Sequence[Mapping[Any, Any]]:
    """The answers beside one: of its session, in the order they were given; of a run to its task at its step."""
    joined = experiences.join(sessions, _s.id == _e.session_id)
    rules = [_e.session_id == e.session_id, _e.id != e.id]
    if of_run:
        rules += [_e.iteration == e.iteration, _e.task_id == e.task_id]
    found = sa.select(*_LIGHT).select_from(joined).where(*rules)
    with store.reading() as connection:
        return connection.execute(found.order_by(_e.sample, _e.iteration).limit(limit)).mappings().all()


def by_sample(store: Store, session: str) -> Sequence[Mapping[Any, Any]]:
    """Confidence and reward of the answers of one session, the first of very many."""
    found = sa.select(_e.sample, _e.iteration, _e.reward, _e.confidence).where(_e.session_id == session)
    with store.reading() as connection:
        return connection.execute(found.order_by(_e.iteration, _e.sample).limit(MOST)).mappings().all()


def by_step(store: Store, run: str) -> Sequence[Mapping[Any, Any]]:
    """A training run step by step: means over its answers, and the share of tasks whose answers' rewards differ."""
    groups = (
        sa.select(
            _e.iteration,
            sa.func.sum(_e.reward).label("reward"),
            sa.func.count(_e.reward).label("known"),
            sa.func.sum(_e.confidence).label("passed"),
            sa.func.count(_e.confidence).label("judged"),
            sa.case((sa.func.max(_e.reward) > sa.func.min(_e.reward), 1.0), else_=0.0).label("differ"),
        )
        .where(_e.session_id == run)
        .group_by(_e.iteration, _e.task_id)
        .subquery()
    )
    g = groups.c
    found = sa.select(
        g.iteration,
        (sa.func.sum(g.reward) / sa.func.nullif(sa.func.sum(g.known), 0)).label("reward"),
        (sa.func.sum(g.passed) / sa.func.nullif(sa.func.sum(g.judged), 0)).label("passed"),
        sa.func.avg(g.differ).label("teach"),
    )
    with store.reading() as connection:
        return connection.execute(found.group_by(g.iteration).order_by(g.iteration)).mappings().all()


def means(store: Store, session: str, iteration: int) -> Mapping[Any, Any]:
    """The means over all answers of one iteration; None where none of them has the number."""
    names = ("reward", "confidence", "correctness", "quality", "gain", "advantage", "num_tokens", "seconds")
    found = sa.select(*(sa.func.avg(_e[name]).label(name) for name in names))
    with store.reading() as connection:
        return connection.execute(found.where(_e.session_id == session, _e.iteration == iteration)).mappings().one()


def spreads(store: Store, ids: Sequence[str]) -> dict[str, tuple[float, float]]:
    """By session the lowest and the highest reward of its answers, where it has two or more with one."""
    found = sa.select(_e.session_id, sa.func.min(_e.reward), sa.func.max(_e.reward))
    found = found.where(_e.session_id.in_(ids), _e.reward.is_not(None))
    with store.reading() as connection:
        rows = connection.execute(found.group_by(_e.session_id).having(sa.func.count() > 1)).all()
    return {session: (low, high) for session, low, high in rows}


def choices(store: Store, session: str) -> tuple[list[str], int | None]:
    """The tasks there are (of those with many, some), and the last iteration."""
    mine = [_s.id == session] if session else []
    tasks = sa.select(_s.task_id).where(_s.task_id != "", *mine).group_by(_s.task_id).limit(KNOWN)
    last = sa.select(sa.func.max(_e.iteration)).where(*([_e.session_id == session] if session else []))
    with store.reading() as connection:
        return sorted(connection.scalars(tasks)), connection.scalar(last)


def newest(store: Store) -> object:
    """What changes when anything is new: the last answer, and where the newest sessions stand."""
    recent = sa.select(_s.id, _s.status, _s.iterations).order_by(_s.created.desc(), _s.id.desc()).limit(50)
    with store.reading() as connection:
        last = connection.scalar(sa.select(sa.func.max(_e.id)))
        return last, tuple(tuple(row) for row in connection.execute(recent))
