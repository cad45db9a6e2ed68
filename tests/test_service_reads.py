"""Hundreds of reads of one key beside another key's, and beside health checks: threads of the database are shared."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

from rlvr.core.fair_queue import become_owner, current_owner
from rlvr.service.http.runtime import Service
from rlvr.service.http.service_middleware import ServiceMiddleware
from rlvr.store.records import Status
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
            # A check is shared by all, whoever began it.
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
