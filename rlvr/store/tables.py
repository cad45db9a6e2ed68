"""The tables, one description for SQLite and PostgreSQL, and how values travel in and out of them.

A column has the name of its field in `rlvr.store.records`. What both engines refuse or read differently is settled
where it is bound: text loses NUL and lone surrogates (PostgreSQL takes neither) to U+FFFD, a number that is not finite
is NULL (it would poison every average). JSON is text: no query looks into it.

A change here needs a migration beside it (`rlvr/store/migrations/versions`) and a new `HEAD`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from rlvr.store.records import Status

HEAD = "0005"  # the newest migration: what `metadata` describes
KNOWN_VERSIONS = ("0001", "0002", "0003", "0004", "0005")  # every schema that can be brought there

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


class TextColumn(sa.types.TypeDecorator[str]):
    """Text of any origin."""

    impl, cache_ok = sa.Text, True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else _UNSTORABLE.sub("\ufffd", value)


class FloatColumn(sa.types.TypeDecorator[float]):
    """A finite float64, or NULL."""

    impl, cache_ok = sa.Double, True

    def process_bind_param(self, value: float | None, dialect: sa.Dialect) -> float | None:
        return None if value is None or not math.isfinite(value) else float(value)


class JsonColumn(sa.types.TypeDecorator[Any]):
    """A JSON value; numbers in it that are not finite become null, and None becomes NULL."""

    impl, cache_ok = sa.Text, True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        if value is None:
            return None
        try:
            text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        except ValueError:
            text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return _UNSTORABLE.sub("\ufffd", text)

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        return None if value is None else json.loads(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return value


BigId = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite numbers rows by itself only under INTEGER
StatusText = sa.Enum(Status, native_enum=False, length=16, values_callable=lambda kinds: [kind.value for kind in kinds])

metadata = sa.MetaData()


def column(name: str, kind: Any, *rules: Any, nullable: bool = False, **how: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, *rules, nullable=nullable, **how)


sessions = sa.Table(
    "rlvr_sessions",
    metadata,
    column("id", TextColumn, primary_key=True),
    column("task_id", TextColumn),
    column("prompt", TextColumn),
    column("request", JsonColumn),
    column("kind", TextColumn),
    column("name", TextColumn),
    column("owner", TextColumn),
    column("instance", TextColumn),
    column("status", StatusText),
    column("created", FloatColumn),
    column("started", FloatColumn, nullable=True),
    column("finished", FloatColumn, nullable=True),
    column("heartbeat", FloatColumn),
    column("iterations", sa.Integer),
    column("final_solution", TextColumn, nullable=True),
    column("final_confidence", FloatColumn, nullable=True),
    column("converged", sa.Boolean),
    column("convergence_iteration", sa.Integer, nullable=True),
    column("error", JsonColumn, nullable=True),
    column("metrics", JsonColumn),
    column("outcome", TextColumn, server_default=""),
    sa.Index("rlvr_sessions_by_task", "kind", "task_id", "final_confidence"),
    sa.Index("rlvr_sessions_by_time", "created", "id"),
    sa.Index("rlvr_sessions_by_status", "status", "created"),
)

experiences = sa.Table(
    "rlvr_experiences",
    metadata,
    column("id", BigId, primary_key=True, autoincrement=True),
    column("session_id", TextColumn, sa.ForeignKey("rlvr_sessions.id", ondelete="CASCADE")),
    column("task_id", TextColumn),
    column("sample", sa.Integer),
    column("iteration", sa.Integer),
    column("prompt", TextColumn),
    column("generated_output", TextColumn),
    column("feedback", JsonColumn),
    column("scores", JsonColumn),
    column("outcome", TextColumn),
    column("confidence", FloatColumn, nullable=True),
    column("correctness", FloatColumn, nullable=True),
    column("quality", FloatColumn, nullable=True),
    column("reward", FloatColumn, nullable=True),
    column("verified_reward", FloatColumn, nullable=True),
    column("gain", FloatColumn, nullable=True),
    column("action", TextColumn),
    column("action_logprob", FloatColumn, nullable=True),
    column("advantage", FloatColumn, nullable=True),
    column("stop_reason", TextColumn),
    column("tokens", JsonColumn, nullable=True),
    column("logprobs", JsonColumn, nullable=True),
    column("num_tokens", sa.Integer),
    column("policy_version", sa.Integer),
    column("policy_fingerprint", TextColumn),
    column("step", sa.Integer, nullable=True),
    column("priority", FloatColumn),
    column("rating", FloatColumn, nullable=True),
    column("ratings", sa.Integer, server_default="0"),
    column("seconds", FloatColumn),
    column("created", FloatColumn),
    column("kind", TextColumn, server_default="train"),
    column("verified_by", TextColumn, server_default=""),
    sa.UniqueConstraint("session_id", "sample", "iteration", name="rlvr_experiences_once"),
    sa.Index("rlvr_experiences_by_task", "task_id", "id", "reward", "confidence"),
    sa.Index("rlvr_experiences_by_time", "created", "id"),
    sa.Index("rlvr_experiences_by_outcome", "outcome", "id"),
    sa.Index("rlvr_experiences_by_step", "session_id", "step", "id"),
    # Curves and patterns read these columns of every answer, without a look at the long texts beside them.
    sa.Index(
        "rlvr_experiences_by_iteration",
        *("session_id", "iteration", "sample", "kind", "verified_by", "action", "outcome", "task_id", "reward"),
        *("confidence", "id"),
    ),
    sqlite_autoincrement=True,  # a number is never given twice, even after its row was pruned: `after=` pages by it
)
# What replay draws from and the statistics are of: the service's own answers, a few numbers a row, without a look at
# the long texts beside them (a hundred times as much to read).
# SQLite reads `step` again.
REPLAY = ("id", "priority", "gain", "task_id", "reward", "confidence", "created", "step", "kind", "outcome")
sa.Index(
    "rlvr_experiences_replay",
    *(experiences.c[name] for name in REPLAY),
    sqlite_where=experiences.c.step.is_(None),
    postgresql_where=experiences.c.step.is_(None),
)

# The error types of an answer's feedback, a row each, so that counting them is a query and no walk through JSON.
error_types = sa.Table(
    "rlvr_error_types",
    metadata,
    column("experience_id", BigId, sa.ForeignKey("rlvr_experiences.id", ondelete="CASCADE"), primary_key=True),
    column("code", TextColumn, primary_key=True),
    column("task_id", TextColumn),
    column("verifier", TextColumn, server_default=""),
    sa.Index("rlvr_error_types_by_task", "task_id", "code"),
)

ratings = sa.Table(
    "rlvr_ratings",
    metadata,
    column("experience_id", BigId, sa.ForeignKey("rlvr_experiences.id", ondelete="CASCADE"), primary_key=True),
    column("owner", TextColumn, primary_key=True),
    column("rating", FloatColumn),
    column("comment", TextColumn),
    column("created", FloatColumn),
)

states = sa.Table(
    "rlvr_states",
    metadata,
    column("name", TextColumn, primary_key=True),
    column("version", sa.Integer),
    column("value", JsonColumn),
    column("saved", FloatColumn),
)

# A policy that replicas train together: the lease of the one that learns, and the state that it published last.
policies = sa.Table(
    "rlvr_policies",
    metadata,
    column("name", TextColumn, primary_key=True),
    column("holder", TextColumn),
    column("token", sa.Integer),
    column("expires", FloatColumn),
    column("state", JsonColumn, nullable=True),
)

# The episodes of a session that the learner of a policy takes: `value` until a step has learned from them.
groups = sa.Table(
    "rlvr_groups",
    metadata,
    column("session_id", TextColumn, sa.ForeignKey("rlvr_sessions.id", ondelete="CASCADE"), primary_key=True),
    column("policy", TextColumn),
    column("version", sa.Integer),
    column("step", sa.Integer, nullable=True),
    column("value", JsonColumn, nullable=True),
    column("created", FloatColumn),
    sa.Index("rlvr_groups_by_step", "policy", "step", "created"),
)
