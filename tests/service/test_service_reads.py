"""Hundreds of reads of one key beside another key's, and beside health checks: threads of the database are shared."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

from rlvr.core.fair_queue import become_owner, current_owner
from rlvr.core.fair_slots import LoopTurns
from rlvr.service.http import routes_read, routes_sessions
from rlvr.service.http.routes_sessions import stream_events
from rlvr.service.http.runtime import Service
from rlvr.service.http.service_middleware import ServiceMiddleware
from rlvr.service.sessions.session_writer import SessionWriter
from rlvr.store.records import Experience, Status
from rlvr.web.auth import ApiKeys, owner_of

KEY = "a-key-of-the-service"


async def ask_as(owner: str, call: Awaitable[Any]) -> Any:
    become_owner(owner)
    return await asyncio.wait_for(call, 10)


def build_service() -> Service:
    store: Any = SimpleNamespace(
        where="here", count_sessions=lambda: dict.fromkeys(Status, 0), check_writable=lambda: None
    )
    sessions: Any = SimpleNamespace(wait_out=lambda call: call())
    settings: Any = SimpleNamespace()
    return Service(settings, store, sessions, SimpleNamespace(), ApiKeys([KEY]), "here")


def test_reads_of_one_key_leave_threads_to_others_and_to_health_checks() -> None:
    async def run() -> None:
        service, release = build_service(), threading.Event()
        greedy = [asyncio.create_task(ask_as("anna", service.run_blocking(release.wait, 30))) for _ in range(200)]
        try:
            await asyncio.sleep(0.05)
            assert await asyncio.create_task(ask_as("bob", service.run_blocking(lambda: "found"))) == "found"
            # All callers share a check, also one that another caller began.
            assert await asyncio.create_task(ask_as("anna", service.probe_database()))
            assert await asyncio.create_task(ask_as("anna", service.readiness.database())) == ""
        finally:
            release.set()
            assert await asyncio.gather(*greedy) == [True] * 200

    asyncio.run(run())


def test_a_request_is_worked_on_for_its_owner() -> None:
    limits: Any = SimpleNamespace(max_body=1_000, requests_per_minute=0, reads_per_minute=0)
    owners: list[str] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        owners.append(current_owner())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def run() -> None:
        middleware = ServiceMiddleware(note, ApiKeys([KEY]), limits)
        for path, headers in (("/stats", [(b"x-api-key", KEY.encode())]), ("/health", [])):
            scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
            receive: Any = asyncio.Event().wait
            await asyncio.create_task(middleware(scope, receive, lambda _: asyncio.sleep(0)))
        assert current_owner() == ""

    asyncio.run(run())
    assert owners == [owner_of(KEY), ""]


def test_pages_are_written_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    service, row = build_service(), Experience("s", "t", 1, "a prompt", "an answer", id=1, created=1.0)
    store: Any = service.store
    store.sessions, store.experiences, store.count = lambda **_: [], lambda **_: [row], lambda **_: 1
    on_loop: list[bool] = []
    for routes in (routes_sessions, routes_read):

        def write(*args: Any, real: Any = routes.json_response) -> Any:
            on_loop.append(asyncio._get_running_loop() is not None)
            return real(*args)

        monkeypatch.setattr(routes, "json_response", write)
    page = json.loads(asyncio.run(routes_sessions.sessions(service)).body)
    assert page == {"sessions": [], "next_offset": None}
    page = json.loads(asyncio.run(routes_read.experiences("t", service)).body)
    assert (page["count"], page["next_after"], page["experiences"][0]["generated_output"]) == (1, None, "an answer")
    assert on_loop == [False, False]


def test_those_who_watch_sessions_keep_no_write_and_no_other_owner_waiting() -> None:
    async def run() -> None:
        store: Any = SimpleNamespace()
        writer, release = SessionWriter(store, "here"), threading.Event()
        greedy = [asyncio.create_task(ask_as("anna", writer.read(partial(release.wait, 30)))) for _ in range(200)]
        try:
            await asyncio.sleep(0.05)
            assert await asyncio.wait_for(asyncio.to_thread(writer.write_once, lambda: "written"), 10) == "written"
            assert await asyncio.create_task(ask_as("bob", writer.read(lambda: "read"))) == "read"
        finally:
            release.set()
            assert await asyncio.gather(*greedy) == [True] * 200

    asyncio.run(run())


def test_watchers_of_one_owner_go_on_one_by_one() -> None:
    got: list[str] = []

    async def run() -> None:
        turns, published = LoopTurns(), asyncio.Event()

        async def one_event() -> AsyncIterator[dict[str, Any]]:
            await published.wait()
            yield {"event": "end"}

        async def watch(owner: str) -> None:
            become_owner(owner)
            async for piece in stream_events(one_event(), turns=turns):
                if b"event: end" in piece:
                    got.append(owner)

        tasks = [asyncio.create_task(watch(owner)) for owner in (*["anna"] * 100, "bob")]
        await asyncio.sleep(0.05)
        published.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert got.index("bob") < 20 and len(got) == 101
