"""A server that is loading: it listens, says so, holds requests and answers them when the models are there."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("uvicorn", reason="the extra [serve] is not installed")

from starlette.responses import PlainTextResponse

from rlvr.core.gc_pause import CollectionPause, paused_collection
from rlvr.tinker_server.http.tinker_middleware import TinkerMiddleware
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.web.auth import ApiKeys
from rlvr.web.server import BackgroundServer, bind_socket
from tests.kit.forked_process import run_forked
from tests.kit.model_shell import write_model_shell
from tests.kit.server_process import FRESH
from tests.kit.tinker_model import write_model
from tests.kit.tinker_server import TinkerServer

KEY = "tml-a-secret-key"
HEALTH = "/api/v1/healthz"


def get(port: int, path: str, key: str = KEY) -> tuple[int, Any, float]:
    """(status, body, seconds it took)."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"X-API-Key": key})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status == 503:
        assert answer.getheader("retry-after") == "1"
    body = json.loads(text) if text.startswith("{") else text
    return answer.status, body, time.perf_counter() - began


def test_a_server_that_loads_says_so_and_holds_requests() -> None:
    middleware = TinkerMiddleware(ApiKeys([KEY]), ServerLimits(poll_seconds=0.5))
    middleware.progress = "model 1 of 2 is being loaded"
    held: list[tuple[int, Any, float]] = []
    with bind_socket("127.0.0.1", 0) as listening, BackgroundServer(middleware, listening) as server:
        port = listening.getsockname()[1]
        for path in (HEALTH, "/metrics"):
            status, body, seconds = get(port, path)
            assert (status, body["status"], seconds < 0.5) == (503, "loading", True)
            assert body["detail"] == "model 1 of 2 is being loaded; try again"
        status, body, seconds = get(port, "/api/v1/sessions")
        assert (status, body["status"], seconds >= 0.5) == (503, "loading", True), "held, then told to try again"
        assert get(port, "/api/v1/sessions", "tml-of-nobody")[0] == 401
        middleware.polls.poll_seconds = 20.0
        client = threading.Thread(target=lambda: held.append(get(port, "/api/v1/sessions")))
        client.start()
        time.sleep(0.2)
        assert not held
        server.call_soon(middleware.open, PlainTextResponse("answered"))
        client.join(10)
        assert held[0][:2] == (200, "answered") and get(port, HEALTH)[:2] == (200, "answered")


def test_an_error_while_loading_ends_the_server_though_requests_are_held() -> None:
    middleware = TinkerMiddleware(ApiKeys([]), ServerLimits(poll_seconds=30.0))
    with bind_socket("127.0.0.1", 0) as listening:
        client = socket.create_connection(listening.getsockname())
        began = time.perf_counter()
        with pytest.raises(ValueError, match="no such model"), BackgroundServer(middleware, listening):
            client.sendall(b"GET /api/v1/sessions HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(0.3)
            raise ValueError("no such model")
        assert time.perf_counter() - began < 5
        client.close()


def test_a_model_that_cannot_be_loaded_ends_the_process(tmp_path: Path) -> None:
    write_model_shell(tmp_path / "model")
    words = ["--model", f"tiny={tmp_path / 'model'}", "--port", "0", "--state", str(tmp_path / "state")]
    done = run_forked(["-m", "rlvr.cli.main", "serve", "engine", *words], timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "loading tiny; requests to http://127.0.0.1:" in done.stderr and "holds no tokenizer" in done.stderr


def test_no_garbage_is_looked_for_while_a_server_loads() -> None:
    """In a process of its own: what is frozen would stay so in this one."""
    code = "import gc\nfrom rlvr.core.gc_pause import paused_collection\n"
    code += "with paused_collection():\n    assert not gc.isenabled(); kept = [[] for _ in range(1000)]\n"
    code += "assert gc.isenabled() and gc.get_freeze_count() > 1000"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    frozen = gc.get_freeze_count()
    with pytest.raises(RuntimeError), paused_collection():
        raise RuntimeError
    assert gc.isenabled() and gc.get_freeze_count() <= frozen  # other threads may end what was frozen before


def test_no_garbage_is_looked_for_while_any_answer_is_built() -> None:
    pause, seen = CollectionPause(), list[bool]()
    both, one_left = threading.Barrier(2, timeout=30), threading.Event()

    def build(is_last: bool) -> None:
        with pause:
            both.wait()
            if is_last:
                assert one_left.wait(30)
                seen.append(gc.isenabled())
        one_left.set()

    threads = [threading.Thread(target=build, args=(is_last,)) for is_last in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False] and gc.isenabled()
    with pytest.raises(RuntimeError), pause:
        raise RuntimeError
    assert gc.isenabled()


def test_a_stop_signal_waits_for_requests() -> None:
    """`wait` returns when the requests that were being answered have their response."""
    begun, answers = threading.Event(), list[tuple[int, Any, float]]()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        await asyncio.sleep(0.5)
        await PlainTextResponse("whole")(scope, receive, send)

    stopped: list[str] = []
    with bind_socket("127.0.0.1", 0) as listening, BackgroundServer(slow, listening) as server:
        port = listening.getsockname()[1]
        client = threading.Thread(target=lambda: answers.append(get(port, "/")))
        client.start()
        assert begun.wait(10)
        import os
        import signal

        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        server.wait(lambda: stopped.append(threading.current_thread().name))
    client.join(10)
    assert answers[0][:2] == (200, "whole") and stopped == ["http"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_real_server_listens_before_it_has_loaded(tmp_path: Path) -> None:
    """A request that was sent as soon as the port was open is answered; the health said that it was loading."""
    write_model(tmp_path / "model")
    server = TinkerServer({"tiny": tmp_path / "model"}, tmp_path / "state")
    server.command = FRESH
    with server:
        port = server.port  # the same one after a kill
        server.kill()
        starting = threading.Thread(target=server.start)
        starting.start()
        while True:
            try:
                status, body, _ = get(port, HEALTH)
                break
            except ConnectionError:
                time.sleep(0.01)
        assert (status, body["status"]) == (503, "loading")
        assert get(port, "/api/v1/sessions")[0] == 200, "held until the models were loaded"
        starting.join(60)
        assert get(port, HEALTH)[:2] == (200, {"status": "ok"})
