"""The first tables: sessions, their experiences, what errors were found in them, and states by name.

Written out and never changed again: the tables of today are in `rlvr.store.tables`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_big = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "rlvr_sessions",
        sa.Column("id", sa.Text, primary_key=True, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("task_id", "prompt", "request", "kind", "name")),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("owner", "instance")),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("started", sa.Double),
        sa.Column("finished", sa.Double),
        sa.Column("heartbeat", sa.Double, nullable=False),
        sa.Column("iterations", sa.Integer, nullable=False),
        sa.Column("final_solution", sa.Text),
        sa.Column("final_confidence", sa.Double),
        sa.Column("converged", sa.Boolean, nullable=False),
        sa.Column("convergence_iteration", sa.Integer),
        sa.Column("error", sa.Text),
        sa.Column("metrics", sa.Text, nullable=False),
    )
    op.create_index("rlvr_sessions_by_task", "rlvr_sessions", ["kind", "task_id", "final_confidence"])
    op.create_index("rlvr_sessions_by_time", "rlvr_sessions", ["created", "id"])
    op.create_index("rlvr_sessions_by_status", "rlvr_sessions", ["status", "created"])
    op.create_table(
        "rlvr_experiences",
        sa.Column("id", _big, primary_key=True, autoincrement=True, nullable=False),
        sa.Column("session_id", sa.Text, sa.ForeignKey("rlvr_sessions.id", ondelete="CASCADE"), nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
        sa.Column("sample", sa.Integer, nullable=False),
        sa.Column("iteration", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("prompt", "generated_output", "feedback", "scores")),
        sa.Column("outcome", sa.Text, nullable=False),
        *(sa.Column(name, sa.Double) for name in ("confidence", "correctness", "quality", "reward", "gain")),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("action_logprob", sa.Double),
        sa.Column("advantage", sa.Double),
        sa.Column("stop_reason", sa.Text, nullable=False),
        sa.Column("tokens", sa.Text),
        sa.Column("logprobs", sa.Text),
        sa.Column("num_tokens", sa.Integer, nullable=False),
        sa.Column("policy_version", sa.Integer, nullable=False),
        sa.Column("policy_fingerprint", sa.Text, nullable=False),
        sa.Column("step", sa.Integer),
        sa.Column("priority", sa.Double, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.UniqueConstraint("session_id", "sample", "iteration", name="rlvr_experiences_once"),
        sqlite_autoincrement=True,
    )
    op.create_index("rlvr_experiences_by_task", "rlvr_experiences", ["task_id", "id", "reward", "confidence"])
    op.create_index("rlvr_experiences_by_time", "rlvr_experiences", ["created", "id"])
    op.create_index("rlvr_experiences_by_outcome", "rlvr_experiences", ["outcome", "id"])
    op.create_index("rlvr_experiences_by_step", "rlvr_experiences", ["session_id", "step", "id"])
    op.create_index(
        "rlvr_experiences_by_iteration",
        "rlvr_experiences",
        ["session_id", "iteration", "task_id", "reward", "confidence"],
    )
    op.create_index(
        "rlvr_experiences_replay",
        "rlvr_experiences",
        ["id", "priority", "gain", "task_id", "reward", "confidence", "created", "step"],
        sqlite_where=sa.text("step IS NULL"),
        postgresql_where=sa.text("step IS NULL"),
    )
    experience = sa.ForeignKey("rlvr_experiences.id", ondelete="CASCADE")
    op.create_table(
        "rlvr_error_types",
        sa.Column("experience_id", _big, experience, primary_key=True, autoincrement=False, nullable=False),
        sa.Column("code", sa.Text, primary_key=True, nullable=False),
        sa.Column("task_id", sa.Text, nullable=False),
    )
    op.create_index("rlvr_error_types_by_task", "rlvr_error_types", ["task_id", "code"])
    op.create_table(
        "rlvr_states",
        sa.Column("name", sa.Text, primary_key=True, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.Column("saved", sa.Double, nullable=False),
    )


def downgrade() -> None:
    for table in ("rlvr_states", "rlvr_error_types", "rlvr_experiences", "rlvr_sessions"):
        op.drop_table(table)
