"""Shares of /grade: one key's endless programs delay another key by one program at most, and end with their client."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
from rlvr.service.http.grading import SHARE, WAITING_SHARE, GradingQueue
from rlvr.web.errors import HttpProblem
from tests.kit.rlvr_service import RlvrService

GREEDY, OTHER = "key-of-the-greedy", "key-of-another"
ENDLESS = {"tests": ["assert f() == 1"], "answers": ["def f():\n    while True: pass\n"] * 64}
QUICK = {"tests": ["assert f() == 1"], "answers": ["def f(): return 1"]}
ENDLESS_GRADER = {
    "grader": {"type": "python", "source": "def grade(sample, item):\n    while True: pass\n"},
    "items": [{"sample": {"output_text": "x"}}] * 64,
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlvrService]:
    with RlvrService(tmp_path_factory.mktemp("state"), keys=f"{GREEDY},{OTHER}", LLM_ENDPOINT="none") as running:
        grade(running, OTHER)  # starts the sandbox
        yield running


def test_the_document_says_which_requests_need_a_key(service: RlvrService):
    document = service.get("/openapi.json").json()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "key"}
    with httpx2.Client(base_url=service.url, trust_env=False, verify=False) as client:
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                is_refused = client.request(method, path).status_code == 401
                assert is_refused == bool(operation.get("security")), (method, path)


def send(service: RlvrService, body: Any) -> socket.socket:
    """Send a request of the greedy key without waiting for its response."""
    content = json.dumps(body).encode()
    head = f"POST /grade HTTP/1.1\r\nHost: x\r\nX-API-Key: {GREEDY}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", service.port))
    connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return connection


def grade(service: RlvrService, key: str) -> float:
    began = time.perf_counter()
    with service.client() as client:
        answer = client.post("/grade", json=QUICK, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200 and answer.json()["mean"] == 1.0, answer.text
    return time.perf_counter() - began


def processor_seconds(service: RlvrService) -> float:
    """The processor time of the service's sandbox."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for place in Path("/proc").iterdir():
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split() if place.name.isdigit() else []
        except OSError:  # it ended meanwhile
            continue
        if fields:
            children.setdefault(int(fields[1]), []).append(int(place.name))
            ticks[int(place.name)] = int(fields[11]) + int(fields[12])
    assert service._process is not None
    todo, total = list(children.get(service._process.pid, [])), 0
    while todo:
        pid = todo.pop()
        total += ticks[pid]
        todo += children.get(pid, [])
    return total / 100


def wait_until_idle(service: RlvrService, seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        before = processor_seconds(service)
        time.sleep(0.5)
        if processor_seconds(service) - before < 0.1:
            return
        assert time.monotonic() < until, "programs run on after their client has left"


@pytest.mark.slow
@pytest.mark.parametrize("body", [ENDLESS, ENDLESS_GRADER], ids=["tests", "python grader"])
def test_another_key_waits_for_one_program_and_a_client_that_leaves_ends_its_own(service: RlvrService, body: Any):
    with ExitStack() as connections:
        for _ in range(2 * SHARE):  # more than run at once
            connections.enter_context(send(service, body))
        time.sleep(1.0)
        assert processor_seconds(service) > 0
        assert grade(service, OTHER) < 25.0, "one program has 10 s; 512 of them take many minutes"
    wait_until_idle(service, 5.0)
    assert grade(service, GREEDY) < 5.0


def test_a_client_that_leaves_ends_its_programs(service: RlvrService):
    with send(service, ENDLESS):
        time.sleep(0.7)
    wait_until_idle(service, 5.0)
    assert grade(service, OTHER) < 5.0


class _Client:
    """A request whose client stays until `leave` is set."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.leave.wait()
        return {"type": "http.disconnect"}


def test_a_key_has_its_share_of_the_slots_and_of_the_places_to_wait():
    async def run() -> None:
        queue, client, release = GradingQueue(), _Client(), threading.Event()
        order: list[str] = []

        def work(name: str) -> None:
            order.append(name)
            release.wait(10)

        def ask(owner: str, name: str) -> asyncio.Task[None]:
            return asyncio.create_task(queue.run(owner, client, lambda: work(name)))  # type: ignore[arg-type]

        greedy = [ask("greedy", f"greedy {number}") for number in range(SHARE + WAITING_SHARE)]
        await asyncio.sleep(0.2)
        assert len(order) == SHARE
        with pytest.raises(HttpProblem, match="too many") as refused:
            await ask("greedy", "one more")
        assert refused.value.status == 429
        other = ask("other", "other")
        await asyncio.sleep(0.2)
        assert order[SHARE:] == ["other"]
        release.set()
        await asyncio.gather(*greedy, other)
        assert len(order) == SHARE + WAITING_SHARE + 1

    asyncio.run(run())


def test_a_client_that_leaves_the_queue_makes_room_and_a_closed_queue_refuses():
    async def run() -> None:
        queue, stays, leaves, release = GradingQueue(), _Client(), _Client(), threading.Event()
        running = [asyncio.create_task(queue.run("a", stays, lambda: release.wait(10))) for _ in range(SHARE)]  # type: ignore[arg-type]
        waiting = [asyncio.create_task(queue.run("a", client, lambda: True)) for client in (leaves, stays)]  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        leaves.leave.set()
        with pytest.raises(HttpProblem, match="the client left"):
            await waiting[0]
        queue.close()
        with pytest.raises(HttpProblem, match="is stopping"):
            await waiting[1]
        release.set()
        assert await asyncio.gather(*running) == [True] * SHARE
        with pytest.raises(HttpProblem, match="is stopping"):
            await queue.run("a", stays, lambda: True)  # type: ignore[arg-type]

    asyncio.run(run())
