"""The tables are there and are those of this version: made in an empty database, migrated in an older one.

    python -m rlvr.store sqlite:///runs/service/service.sqlite 0001     # back, for an older rlvr

The schema's version stands in `rlvr_schema`. A database that a newer rlvr wrote is refused, and so is one whose tables
of our names are not ours. Several instances may start at once: one does the work while the others wait. alembic is
loaded only when there is something to migrate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import sqlalchemy as sa

from rlvr.store.connections import Database
from rlvr.store.tables import HEAD, KNOWN_VERSIONS, metadata

if TYPE_CHECKING:
    from rlvr.store.postgres_deadline import DeadlineConnection

VERSION_TABLE = "rlvr_schema"
MIGRATIONS = Path(__file__).parent / "migrations"
_LOCK = 0x726C7672  # "rlvr": the advisory lock under which PostgreSQL's tables are made

_version = sa.Table(VERSION_TABLE, sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))


def prepare(database: Database) -> None:
    """Create the tables in an empty database, or migrate those of an older version.

    ValueError for a database of a newer version or of something else.
    """
    with database.read() as connection:
        if _read_version(connection, database.where) == HEAD:
            return  # the usual start: nothing is locked
    with database.write() as connection, _take_turn(connection):
        found = _read_version(connection, database.where)  # again: another instance may have been faster
        if found is None:
            metadata.create_all(connection)
            _version.create(connection)
            connection.execute(_version.insert().values(version_num=HEAD))
        elif found != HEAD:
            migrate(connection, HEAD)


def downgrade(database: Database, revision: str) -> str:
    """Migrate back to an older `revision`, all or nothing; return the revision that it was.

    ValueError for an unknown revision, or one that is newer than the database's.
    """
    if revision not in KNOWN_VERSIONS:
        raise ValueError(f"revision {revision!r} is unknown; expected one of {', '.join(KNOWN_VERSIONS)}")
    with database.write() as connection, _take_turn(connection):
        found = _read_version(connection, database.where)
        if found is None or found < revision:
            raise ValueError(f"{database.where} is of revision {found}; expected {revision} or a newer one")
        if found != revision:
            migrate(connection, revision, back=True)
        return found


@contextmanager
def _take_turn(connection: sa.Connection) -> Iterator[None]:
    """Wait for other instances that make or migrate the tables; then take as long as it takes."""
    if connection.dialect.name == "sqlite":
        yield
        return
    with cast("DeadlineConnection", connection.connection.dbapi_connection).without_deadline():
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        yield


def migrate(connection: sa.Connection, revision: str, *, back: bool = False) -> None:
    """Migrate to `revision`, within the connection's transaction; `back`: to an older one."""
    try:
        from alembic import command
        from alembic.config import Config
    except ModuleNotFoundError as error:
        raise ValueError(
            "the database is of an older version and alembic is missing: pip install 'rlvr[serve]'"
        ) from error
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    (command.downgrade if back else command.upgrade)(config, revision)


def _read_version(connection: sa.Connection, where: str) -> str | None:
    """The version of the database's tables; None where there are none yet."""
    names = set(sa.inspect(connection).get_table_names())
    if VERSION_TABLE not in names:
        if taken := sorted(names & set(metadata.tables)):
            raise ValueError(f"{where} has a table {taken[0]} that rlvr did not make; give another database")
        return None
    found = connection.scalar(sa.select(_version.c.version_num))
    if found not in KNOWN_VERSIONS:
        raise ValueError(
            f"{where} was written by a newer rlvr: its tables are of version {found}, this one knows "
            f"{', '.join(KNOWN_VERSIONS)}. Install the newer rlvr, or give another database"
        )
    return str(found)


def main(arguments: list[str]) -> str:
    """`URL REVISION`: migrate a database back. Returns what to print; ValueError or StoreDown if it cannot be done."""
    if len(arguments) != 2:
        raise ValueError(
            f"{len(arguments)} words given, expected two: a database, and a revision of {', '.join(KNOWN_VERSIONS)}"
        )
    url, revision = arguments
    database = Database(url)
    try:
        return f"{database.where}: revision {downgrade(database, revision)} -> {revision}"
    finally:
        database.close()
