"""Policies that replicas of a service train together, and the sessions that wait to be learned from."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "rlvr_policies",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("token", sa.Integer, nullable=False),
        sa.Column("expires", sa.Double, nullable=False),
        sa.Column("state", sa.Text),
    )
    op.create_table(
        "rlvr_groups",
        sa.Column("session_id", sa.Text, sa.ForeignKey("rlvr_sessions.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("step", sa.Integer),
        sa.Column("value", sa.Text),
        sa.Column("created", sa.Double, nullable=False),
    )
    op.create_index("rlvr_groups_by_step", "rlvr_groups", ["policy", "step", "created"])


def downgrade() -> None:
    op.drop_table("rlvr_groups")
    op.drop_table("rlvr_policies")
