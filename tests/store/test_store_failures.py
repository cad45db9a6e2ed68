"""A database that is away, locked, full or cut off is one named error, leaves nothing half written, and comes back."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rlvr.store import Experience, ExperienceStore, Retention, Session, StoreDown, open_store
from rlvr.store.records import Status
from rlvr.store.shared_states import WaitingGroup
from rlvr.store.tables import experiences, sessions
from tests.kit.postgres import make_read_only


def experience(iteration: int = 1) -> Experience:
    return Experience("s", "t", iteration, "p", "o", gain=0.5)


CALLS: list[Callable[[ExperienceStore], Any]] = [
    lambda store: store.ping(),
    lambda store: store.add_session(Session("new", "t", "p")),
    lambda store: store.session("s"),
    lambda store: store.sessions(),
    lambda store: store.count_sessions(),
    lambda store: store.update_session("s", iterations=1),
    lambda store: store.claim("s", "me"),
    lambda store: store.heartbeat("me"),
    lambda store: store.interrupt_lost("me", 10),
    lambda store: store.add_experiences([experience(9)]),
    lambda store: store.record_answers("s", [experience(10)], {"iterations": 1}, Status.QUEUED),
    lambda store: store.experience(1),
    lambda store: store.experiences(),
    lambda store: store.count(),
    lambda store: store.rate(1, "me", 1.0),
    lambda store: store.set_gains({1: 1.0}),
    lambda store: store.read_buffer(),
    lambda store: store.buffer(),
    lambda store: store.task_analysis("t"),
    lambda store: store.aggregates(),
    lambda store: store.global_stats(),
    lambda store: store.prune(Retention(keep_days=1)),
    lambda store: store.state("x"),
    lambda store: store.save_state("x", {}, 0),
    lambda store: store.lead_policy("p", "me", 0, 60.0),
    lambda store: store.policy("p"),
    lambda store: store.led_policies(),
    lambda store: store.add_groups("p", [WaitingGroup("s", 0, [])]),
    lambda store: store.waiting_groups("p", 1),
    lambda store: store.count_waiting("p"),
    lambda store: store.publish_policy("p", 1, {}, {"s": 1}),
    lambda store: store.leave_policy("p", 1),
]


@pytest.fixture
def remote(postgres: Any) -> Iterator[ExperienceStore]:
    with closing(open_store(postgres.database())) as store:
        store.add_session(Session("s", "t", "p"))
        store.add_experiences([experience()])
        yield store


def test_every_call_says_that_the_database_is_away_and_works_again_when_it_is_back(
    remote: ExperienceStore, postgres: Any
):
    postgres.stop()
    try:
        for call in CALLS:
            with pytest.raises(StoreDown, match=r"^postgresql\+psycopg://"):
                call(remote)
        with pytest.raises(StoreDown):
            open_store(postgres.url("rlvr"))
    finally:
        postgres.start()
    assert remote.session("new") is None and remote.count() == 1
    for call in CALLS:
        call(remote)
    assert remote.session("new") is not None and remote.count() == 3


def test_a_connection_that_is_cut_in_the_middle_leaves_nothing_half_written(remote: ExperienceStore):
    with pytest.raises(StoreDown), remote.write() as connection:
        connection.execute(sa.insert(sessions).values({**vars(Session("half", "t", "p"))}))
        with remote.write() as other:
            mine = connection.connection.dbapi_connection.info.backend_pid  # type: ignore[union-attr]
            other.execute(sa.select(sa.func.pg_terminate_backend(mine)))
        connection.execute(sa.select(sa.func.count()).select_from(experiences))
    assert remote.session("half") is None and remote.count() == 1


@pytest.mark.parametrize("write", [ExperienceStore.check_writable, lambda store: store.lead_policy("p", "me", 0, 1.0)])
def test_a_server_that_takes_no_writes_for_a_while_is_read_only(
    remote: ExperienceStore, write: Callable[[ExperienceStore], Any]
):
    """A standby after a failover, or maintenance. What was connected meanwhile is read-only for good."""
    with make_read_only(remote.url.render_as_string()):
        remote.sessions()
        with pytest.raises(StoreDown) as caught:
            write(remote)
    assert caught.value.reason == "read-only"
    write(remote)


def test_a_file_system_that_takes_no_writes_for_a_while_is_read_only(tmp_path: Path):
    """SQLite opens a file that it may not write for reading alone, and never again otherwise."""
    mount = ["mount", "--bind", str(tmp_path), str(tmp_path)]
    with closing(open_store(tmp_path / "store.db")) as store:
        store.add_session(Session("s", "t", "p"))
        if subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("mounting is not permitted here")
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", str(tmp_path)], check=True)
            store._engine.dispose()  # what is open may go on to write
            assert store.session("s") is not None
            with pytest.raises(StoreDown) as caught:
                store.add_session(Session("lost", "t", "p"))
        finally:
            subprocess.run(["umount", "-l", str(tmp_path)], check=True)
        assert caught.value.reason == "read-only"
        assert store.add_session(Session("again", "t", "p"))


FROZEN = """
import os, signal, sys
from sqlalchemy import event
from rlvr.store import connections, open_store
connections.IDLE_S = 1
store = open_store(sys.argv[1])
event.listen(store._engine, "commit", lambda connection: os.kill(os.getpid(), signal.SIGSTOP))
store.heartbeat("frozen")
"""


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_process_that_is_frozen_in_a_transaction_does_not_keep_others_from_its_sessions(remote: ExperienceStore):
    remote.update_session("s", instance="frozen")
    url = remote.url.render_as_string().replace("+psycopg", "")
    frozen = subprocess.Popen([sys.executable, "-c", FROZEN, url], stderr=subprocess.PIPE, text=True)
    try:
        _, status = os.waitpid(frozen.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert remote.interrupt_lost("other", 0.0) == ["s"]
        frozen.send_signal(signal.SIGCONT)
        assert "StoreDown" in frozen.communicate(timeout=30)[1]
    finally:
        frozen.kill()
        frozen.wait()


def test_a_password_is_in_no_message(tmp_path: Path):
    with pytest.raises(StoreDown) as told:
        open_store(f"postgresql://me:secret@/x?host={tmp_path}")
    assert "***" in str(told.value) and "secret" not in str(told.value)


def test_a_sqlite_file_that_another_process_holds_is_waited_for_and_then_named(tmp_path: Path):
    with closing(open_store(f"sqlite:///{tmp_path}/store.db?timeout=0.2")) as store:
        store.add_session(Session("s", "t", "p"))
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreDown, match="database is locked"):
                store.add_experiences([experience()])
            assert store.session("s") is not None, "readers do not wait for a writer"
            other.execute("ROLLBACK")
        assert store.add_experiences([experience()]) == [1]


def test_a_writer_behind_others_of_its_process_is_told_in_time(tmp_path: Path):
    with closing(open_store(f"sqlite:///{tmp_path / 'a.db'}?timeout=0.2")) as store, ThreadPoolExecutor(1) as threads:
        with store.write():
            late = threads.submit(store.add_session, Session("s", "t", "p"))
            with pytest.raises(StoreDown, match="locked"):
                late.result(30)
        assert store.add_session(Session("s", "t", "p"))


def test_a_full_disk_is_reported_and_earlier_records_stay(tmp_path: Path):
    """A limit on the size of files stands in for the disk; SQLite meets the same failing write."""
    code = f"""
import resource
from rlvr.store import Experience, Session, StoreDown, open_store
store = open_store({str(tmp_path / "store.db")!r})
store.add_session(Session("s", "t", "p"))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
written = 0
try:
    for written in range(10_000):
        store.add_experiences([Experience("s", "t", written + 1, "p", "o" * 5000, sample=k) for k in range(2)])
except StoreDown as error:
    print(error)
assert 10 < written < 10_000 and store.count() == 2 * written, (written, store.count())
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert len(store.add_experiences([Experience("s", "t", written + 1, "p", "o")])) == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "store.db: disk I/O error" in done.stdout or "store.db: database or disk is full" in done.stdout


def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path: Path):
    place = tmp_path / "notes.txt"
    place.write_text("not a database " * 100)
    with pytest.raises(StoreDown, match=r"notes.txt: file is not a database"):
        open_store(place)
    assert place.read_text() == "not a database " * 100
