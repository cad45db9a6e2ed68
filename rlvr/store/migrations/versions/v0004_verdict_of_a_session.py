"""The verdict on a session's final answer, and evaluations as a kind of their own.

The sessions that are there get both from their answers and their requests. Statistics read the verdicts of answers
from the index that has their rewards.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_REPLAY = ["id", "priority", "gain", "task_id", "reward", "confidence", "created", "step"]
_VERDICT = (
    "SELECT e.outcome FROM rlvr_experiences e WHERE e.session_id = rlvr_sessions.id "
    "AND e.confidence = rlvr_sessions.final_confidence ORDER BY e.iteration, e.sample LIMIT 1"
)


def upgrade() -> None:
    op.add_column("rlvr_sessions", sa.Column("outcome", sa.Text, nullable=False, server_default=""))
    op.execute(f"UPDATE rlvr_sessions SET outcome = COALESCE(({_VERDICT}), '') WHERE kind <> 'run'")
    # `_` is any character: a `:` would begin a parameter.
    op.execute("UPDATE rlvr_sessions SET kind = 'evaluate' WHERE kind = 'train' AND request LIKE '%\"learn\"_false%'")
    _index([*_REPLAY, "kind", "outcome"])


def downgrade() -> None:
    op.execute("UPDATE rlvr_sessions SET kind = 'train' WHERE kind = 'evaluate'")
    op.drop_column("rlvr_sessions", "outcome")
    _index(_REPLAY)


def _index(columns: list[str]) -> None:
    op.drop_index("rlvr_experiences_replay", "rlvr_experiences")
    served = sa.text("step IS NULL")
    op.create_index(
        "rlvr_experiences_replay", "rlvr_experiences", columns, sqlite_where=served, postgresql_where=served
    )
