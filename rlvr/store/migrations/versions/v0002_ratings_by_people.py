"""People rate answers: who gave which rating, and the reward as it was before they did."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_big = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("rlvr_experiences", sa.Column("verified_reward", sa.Double))
    op.add_column("rlvr_experiences", sa.Column("rating", sa.Double))
    op.add_column("rlvr_experiences", sa.Column("ratings", sa.Integer, nullable=False, server_default="0"))
    op.execute("UPDATE rlvr_experiences SET verified_reward = reward")
    experience = sa.ForeignKey("rlvr_experiences.id", ondelete="CASCADE")
    op.create_table(
        "rlvr_ratings",
        sa.Column("experience_id", _big, experience, primary_key=True, autoincrement=False, nullable=False),
        sa.Column("owner", sa.Text, primary_key=True, nullable=False),
        sa.Column("rating", sa.Double, nullable=False),
        sa.Column("comment", sa.Text, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
    )


def downgrade() -> None:
    """The ratings are lost, and what they changed: every reward is the verifiers' again."""
    op.drop_table("rlvr_ratings")
    op.execute("UPDATE rlvr_experiences SET reward = verified_reward")
    for column in ("ratings", "rating", "verified_reward"):
        op.drop_column("rlvr_experiences", column)
