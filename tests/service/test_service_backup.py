"""Backups by docs/service/operations.md while sessions run: what was over is copied, and a service starts from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
from rlvr.store import open_store
from tests.kit.postgres import Server
from tests.kit.rlvr_service import RlvrService, scripted_service, wait_for

pytestmark = pytest.mark.timeout(200)
TASK = {"prompt": "Write a function for Fibonacci numbers.", "max_iterations": 2}


def copy_under_load(service: RlvrService, copy: Callable[[], Any]) -> list[str]:
    """Copy while three clients send sessions; the sessions that were over before."""
    done, stop = list[str](), threading.Event()

    def send() -> None:
        while not stop.is_set():
            done.append(service.post("/train", {"task_id": f"t{len(done) % 5}", **TASK}).json()["session_id"])

    clients = [threading.Thread(target=send) for _ in range(3)]
    try:
        for client in clients:
            client.start()
        wait_for(lambda: len(done) >= 6)
        over = list(done)
        copy()
        copied = len(done)
        wait_for(lambda: len(done) > copied + 3)
    finally:
        stop.set()
        for client in clients:
            client.join()
    return over


def check_copy(url: str, over: list[str], state: Path) -> None:
    with closing(open_store(url)) as store:
        kept = {session.id: session for session in store.sessions(limit=500)}
        assert all(kept[id].status.value == "done" for id in over)
        assert all(store.experiences(session_id=id) for id in over)
    with scripted_service(state, "--database", url) as service:
        wait_for(lambda: service.get("/health/ready").status_code == 200)
        assert service.get(f"/sessions/{over[0]}").json()["answer"]["final_solution"]
        assert service.post("/train", {"task_id": "after", **TASK}).status_code == 200


@pytest.mark.parametrize("program", ["sqlite3", "python"])
def test_a_copy_of_a_sqlite_file(tmp_path: Path, program: str):
    if program == "sqlite3" and shutil.which(program) is None:
        pytest.skip("the program sqlite3 is not installed")
    source, backup = tmp_path / "service.sqlite", tmp_path / "backup.sqlite"
    code = f"import sqlite3; sqlite3.connect('{source}').backup(sqlite3.connect('{backup}'))"
    command = [sys.executable, "-c", code] if program == "python" else [program, source, f".backup '{backup}'"]
    with scripted_service(tmp_path / "state", "--database", f"sqlite:///{source}") as service:
        over = copy_under_load(service, lambda: subprocess.run(command, check=True))
    check_copy(f"sqlite:///{backup}", over, tmp_path / "restored")


def test_a_dump_of_a_postgresql_database(tmp_path: Path, postgres: Server):
    source, restored, dump = postgres.database(), postgres.database(), str(postgres.folder / "service.dump")
    with scripted_service(tmp_path / "state", "--database", source) as service:
        over = copy_under_load(service, lambda: postgres.run("pg_dump", "--format=custom", f"--file={dump}", source))
    flags = ("--no-owner", "--exit-on-error", "--single-transaction")
    postgres.run("pg_restore", *flags, f"--dbname={restored}", dump)
    check_copy(restored, over, tmp_path / "restored")
