"""What alembic runs for a migration: on the connection, and in the transaction, that `rlvr.store.migrate` gives it."""

from alembic import context

from rlvr.store.migrate import VERSION_TABLE
from rlvr.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, version_table=VERSION_TABLE
)
with context.begin_transaction():
    context.run_migrations()
