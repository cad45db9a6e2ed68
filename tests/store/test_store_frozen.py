"""A PostgreSQL that takes packets and never answers, and a SQLite file that is gone, are noticed and named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlvr.store import Session, StoreDown, open_store
from tests.kit.postgres import Server, cluster, freeze, missing

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[Server]:
    """A cluster of this file's own, to freeze."""
    if why := missing():
        pytest.skip(why)
    with cluster() as server:
        yield server


def test_a_call_to_a_frozen_server_ends_and_the_store_works_again_after_it(
    own_postgres: Server, monkeypatch: pytest.MonkeyPatch
):
    deadline = pytest.importorskip("rlvr.store.postgres_deadline", reason="psycopg is not installed")
    monkeypatch.setattr(deadline, "STATEMENT_S", 1)
    monkeypatch.setattr(deadline, "SLACK_S", 0.5)
    with closing(open_store(own_postgres.database() + "&connect_timeout=2")) as store:
        store.add_session(Session("s", "t", "p"))
        for call in (store.ping, lambda: store.add_session(Session("lost", "t", "p"))):
            with freeze(own_postgres), pytest.raises(StoreDown) as caught:
                call()
            assert caught.value.reason in ("not answering", "not reachable")
        with pytest.raises(StoreDown, match="the server hangs"), store.read() as connection, freeze(own_postgres):
            connection.exec_driver_sql("SELECT 1")
        assert store.session("s") is not None and store.session("lost") is None


def test_a_statement_that_takes_too_long_is_ended_by_the_server(own_postgres: Server, monkeypatch: pytest.MonkeyPatch):
    deadline = pytest.importorskip("rlvr.store.postgres_deadline", reason="psycopg is not installed")
    monkeypatch.setattr(deadline, "STATEMENT_S", 1)
    with closing(open_store(own_postgres.database())) as store:
        with pytest.raises(StoreDown) as caught, store.read() as connection:
            connection.exec_driver_sql("SELECT pg_sleep(60)")
        assert caught.value.reason == "too slow: a statement reached its time limit"
        store.ping()


def test_a_statement_timeout_of_the_url_counts_and_a_migration_has_none(own_postgres: Server):
    with closing(open_store(own_postgres.database() + "&options=-c statement_timeout=2000")) as store:
        with store.write() as connection:
            driver: Any = connection.connection.dbapi_connection
            assert driver.deadline_s == pytest.approx(7.0)
            with driver.without_deadline():
                assert driver.deadline_s is None
                assert connection.exec_driver_sql("SHOW statement_timeout").scalar() == "0"
            assert driver.deadline_s == pytest.approx(7.0)
        with store.read() as connection:
            assert connection.exec_driver_sql("SHOW statement_timeout").scalar() == "2s"


@pytest.mark.parametrize("fault", ["moved", "deleted", "replaced"])
def test_a_sqlite_file_that_is_not_the_opened_one_is_named_and_not_written(tmp_path: Path, fault: str):
    path, aside = tmp_path / "store.db", tmp_path / "aside.db"
    with closing(open_store(path)) as store:
        store.add_session(Session("s", "t", "p"))
        path.rename(aside)
        if fault == "replaced":
            open_store(path).close()
        before = path.read_bytes() if fault == "replaced" else None
        for call in (store.ping, store.check_writable, lambda: store.add_session(Session("lost", "t", "p"))):
            with pytest.raises(StoreDown, match="moved away or replaced") as caught:
                call()
            assert "moved away or replaced" in caught.value.reason and str(tmp_path) not in caught.value.reason
        assert (path.read_bytes() if path.exists() else None) == before
        if fault == "moved":
            aside.rename(path)
            assert store.session("s") is not None
            store.add_session(Session("again", "t", "p"))
