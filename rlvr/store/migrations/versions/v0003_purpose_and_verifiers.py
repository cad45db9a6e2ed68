"""What an answer was asked for and what verified it, and which verifier named an error: columns to group by.

The rows that are there get them from what was stored beside: the request, the metrics of their session, the scores.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

BATCH = 500  # rows read at a time: scores are long


def upgrade() -> None:
    for name, default in (("kind", "train"), ("verified_by", "")):
        op.add_column("rlvr_experiences", sa.Column(name, sa.Text, nullable=False, server_default=default))
    op.add_column("rlvr_error_types", sa.Column("verifier", sa.Text, nullable=False, server_default=""))
    op.drop_index("rlvr_experiences_by_iteration", "rlvr_experiences")
    columns = ["session_id", "iteration", "sample", "kind", "verified_by", "action", "outcome", "task_id", "reward"]
    op.create_index("rlvr_experiences_by_iteration", "rlvr_experiences", [*columns, "confidence", "id"])
    op.execute("UPDATE rlvr_experiences SET kind = 'run' WHERE step IS NOT NULL")
    # `_` is any character: a `:` would begin a parameter.
    evaluations = "SELECT id FROM rlvr_sessions WHERE kind = 'train' AND request LIKE '%\"learn\"_false%'"
    op.execute(f"UPDATE rlvr_experiences SET kind = 'evaluate' WHERE session_id IN ({evaluations})")
    _fill_verified_by()
    _fill_verifier()


def downgrade() -> None:
    op.drop_index("rlvr_experiences_by_iteration", "rlvr_experiences")
    for table, column in (("experiences", "kind"), ("experiences", "verified_by"), ("error_types", "verifier")):
        op.drop_column(f"rlvr_{table}", column)
    columns = ["session_id", "iteration", "task_id", "reward", "confidence"]
    op.create_index("rlvr_experiences_by_iteration", "rlvr_experiences", columns)


def _fill_verified_by() -> None:
    connection = op.get_bind()
    found = connection.execute(sa.text("SELECT id, metrics FROM rlvr_sessions WHERE metrics LIKE '%\"verified_by\"%'"))
    rows = [{"id": id, "names": "+".join(map(str, json.loads(metrics)["verified_by"]))} for id, metrics in found]
    if rows:
        update = "UPDATE rlvr_experiences SET verified_by = :names WHERE session_id = :id"
        connection.execute(sa.text(update), rows)


def _fill_verifier() -> None:
    connection, last = op.get_bind(), 0
    read = sa.text(
        "SELECT id, scores FROM rlvr_experiences WHERE id > :last "
        f"AND id IN (SELECT experience_id FROM rlvr_error_types) ORDER BY id LIMIT {BATCH}"
    )
    write = sa.text("UPDATE rlvr_error_types SET verifier = :verifier WHERE experience_id = :id AND code = :code")
    while rows := connection.execute(read, {"last": last}).all():
        last = rows[-1].id
        found = [
            {"id": id, "code": code[:200], "verifier": verifier}
            for id, scores in rows
            for verifier, score in reversed(json.loads(scores).items())  # the first one to name it is written last
            if score.get("outcome") != "passed"
            for code in str(score.get("reason") or score.get("outcome")).split("+")
        ]
        if found:
            connection.execute(write, found)
