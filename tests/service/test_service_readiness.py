"""/health/ready tries what a session needs: a full disk or an endpoint that is gone is a 503, until it is back."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
from rlvr.service.http.readiness import PartCheck
from rlvr.store import StoreDown, open_store
from tests.kit.rlvr_service import RlvrService
from tests.kit.text_endpoint import serving

TASK = {"task_id": "t", "prompt": "Say something.", "max_iterations": 1}


@contextmanager
def small_file_system(place: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> Path:
    with (place / "filler").open("wb") as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 65536)
            file.flush()
    return place / "filler"


def wait_for(service: RlvrService, status: int, seconds: float = 20.0) -> dict[str, Any]:
    until = time.monotonic() + seconds
    while (answer := service.get("/health/ready")).status_code != status:
        assert time.monotonic() < until, answer.text
        time.sleep(0.2)
    return answer.json()


def test_a_service_on_a_full_disk_is_not_ready_until_there_is_room(tmp_path: Path):
    with (
        small_file_system(tmp_path / "disk") as disk,
        serving(lambda asked: "Something, said in some words.") as endpoint,
        RlvrService(tmp_path, "--database", f"sqlite:///{disk}/store.db", LLM_ENDPOINT=endpoint.plain_url) as service,
    ):
        wait_for(service, 200)
        filler = fill(disk)
        state = wait_for(service, 503)
        assert (state["detail"], state["database"]) == ("database: full", {"state": "down", "detail": "full"})
        assert str(disk) not in str(state) and "127.0.0.1" not in str(state)
        assert service.get("/health").json()["status"] == "degraded"
        filler.unlink()
        wait_for(service, 200)
        assert service.post("/train", TASK).status_code == 200


def test_a_limit_on_files_and_an_endpoint_that_is_gone(tmp_path: Path):
    with ExitStack() as ends:
        endpoint = ends.enter_context(serving(lambda asked: "Something, said in some words."))
        with RlvrService(tmp_path, LLM_ENDPOINT=endpoint.plain_url) as service:
            assert service._process is not None
            limit = partial(resource.prlimit, service._process.pid, resource.RLIMIT_FSIZE)
            assert wait_for(service, 200)["verifiers"]["state"] in ("ready", "absent")
            before = limit()
            limit((100_000, before[1]))
            assert "full" in wait_for(service, 503)["database"]["detail"]
            limit(before)
            wait_for(service, 200)
            ends.close()
            state = wait_for(service, 503)
            assert state["detail"] == "generator: down" and "127.0.0.1" not in str(state)


def test_a_probe_of_the_store_leaves_nothing(store_url: str):
    with closing(open_store(store_url)) as store:
        store.check_writable()
        assert store.sessions() == [] and sum(store.count_sessions().values()) == 0


def test_a_database_that_cannot_be_written_is_found(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/store.db?timeout=0.1"
    with (
        closing(open_store(url)) as store,
        closing(open_store(url)) as other,
        store.write(),
        pytest.raises(StoreDown) as locked,
    ):
        other.check_writable()
    assert locked.value.reason == "locked by another process" and str(tmp_path) not in locked.value.reason


def test_a_check_is_shared_and_a_late_one_is_an_outage():
    async def run() -> None:
        calls, release = 0, asyncio.Event()

        async def check() -> str:
            nonlocal calls
            calls += 1
            await release.wait()
            return ""

        part = PartCheck(check, 0.0, "")
        assert all(result.startswith("no answer for") for result in await asyncio.gather(part(), part(), part()))
        patient = PartCheck(check, 60.0, "")
        assert await patient() == ""
        release.set()
        assert await asyncio.gather(part(), part()) == ["", ""] and calls == 2

        async def fail() -> str:
            raise RuntimeError("of our own")

        assert await PartCheck(fail, 60.0, "")() == "the check failed (RuntimeError)"

    asyncio.run(run())
