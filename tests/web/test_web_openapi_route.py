"""/openapi.json of both servers is built once, on a thread: on the event loop it would hold up every other request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.service.http.app import create_app
from rlvr.service.serve_service import build
from rlvr.service.settings import Settings
from rlvr.tinker_server.http.app import create_routes
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.web.auth import ApiKeys


async def get(app: Any, path: str) -> dict[str, Any]:
    parts: list[bytes] = []

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200
        parts.append(message.get("body", b""))

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": []}
    await app(scope, receive, send)
    return json.loads(b"".join(parts))


def read_together(app: Any) -> list[dict[str, Any]]:
    """What three requests at once get, once the document is known to be built one time and off the event loop."""
    build: Callable[[], Any] = app.openapi
    threads: list[threading.Thread] = []

    def note() -> Any:
        threads.append(threading.current_thread())
        return build()

    app.openapi = note

    async def read() -> list[dict[str, Any]]:
        return list(await asyncio.gather(*(get(app, "/openapi.json") for _ in range(3))))

    documents = asyncio.run(read())
    assert len(threads) == 1 and threads[0] is not threading.current_thread()
    return documents


def test_the_service_builds_its_document_once_and_off_the_event_loop(tmp_path: Path):
    service = build(Settings(state=tmp_path, dashboard=False), ApiKeys.load(None), 0)
    assert service.name_lock is not None
    with closing(service.store), closing(service.name_lock):
        documents = read_together(create_app(service)._app)
    assert all("/train" in one["paths"] and one == documents[0] for one in documents)


def test_the_engine_server_builds_its_document_once_and_off_the_event_loop():
    middleware = SimpleNamespace(limits=ServerLimits(), has_keys=False)
    documents = read_together(create_routes(SimpleNamespace(), middleware))  # type: ignore[arg-type]
    assert all("/v1/completions" in one["paths"] and one == documents[0] for one in documents)
