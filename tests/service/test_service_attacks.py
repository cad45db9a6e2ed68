"""A client, a model and an endpoint that mean harm: none of them may stop the service for the others.

Every one of these stopped it once: a loop that was busy with one body, threads that all waited for one grader, a row
that no table takes.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sqlite3
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from rlvr.core.chat_client import MOST_TOKENS, ChatClient, ChatError, Cost, Dialect, Endpoint
from rlvr.core.fair_slots import FairSlots
from rlvr.core.types import Outcome
from rlvr.reward import resolve_reward
from rlvr.reward.graders import Grader
from rlvr.service.http import requests, strict_routes
from rlvr.service.http.service_middleware import ServiceMiddleware
from rlvr.service.sessions.live_session import LiveSession
from rlvr.service.sessions.session_writer import SessionWriter
from rlvr.service.settings import ServiceLimits
from rlvr.store import open_store
from rlvr.store.records import Experience, Session, Status
from rlvr.web.auth import ApiKeys
from rlvr.web.errors import HttpProblem
from rlvr.web.middleware import Message, Scope
from tests.kit.rlvr_service import RlvrService
from tests.kit.text_endpoint import EndpointReply, serving

TASK = {"task_id": "t", "prompt": "Say something.", "max_iterations": 1}
QUICK = 2.0  # seconds in which a service that does something else answers; a blocked one took 4 to 120


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RlvrService]:
    state = tmp_path_factory.mktemp("attacked")
    with serving(lambda asked: "Something, said in some words.") as server:
        running = RlvrService(state, LLM_ENDPOINT=server.plain_url)
        with running:
            yield running


def meanwhile(service: RlvrService, path: str, body: Any, times: int = 1) -> list[threading.Thread]:
    """Start requests without waiting for their responses."""

    def ask() -> None:
        with service.client() as client:
            try:
                client.post(path, json=body, timeout=8)
            except Exception:  # late, as they are meant to be
                return

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(times)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    return threads


def slowest(service: RlvrService, *paths: str) -> float:
    with service.client() as client:
        took: list[float] = []
        for path in paths:
            began = time.perf_counter()
            assert client.get(path, timeout=20).status_code == 200
            took.append(time.perf_counter() - began)
    return max(took)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"task_id": "t", "prompt": "x", "tests": [' + "1," * 1_000_000 + "1]}", "more than 50,000 values"),
        ("{" + ",".join(f'"f{i}": 1' for i in range(40_000)) + "}", "40,000 fields"),
        (json.dumps(TASK | {"verifiers": [{f"f{i}": 1 for i in range(20_000)}]}), "20,000 fields"),
    ],
)
def test_a_body_with_too_many_values_is_refused(service: RlvrService, body: str, said: str):
    with service.client() as client:
        reply = client.post("/train", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 422 and said in reply.json()["detail"]


@pytest.mark.parametrize("part", ["[]", "{}", '{"a":1}', "1"])
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(part: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(strict_routes.json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(HttpProblem, match="more than 50,000 values"):
        strict_routes.parse_body(f'{{"item": [{",".join([part] * 50_002)}]}}'.encode())


def test_a_long_body_is_read_off_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    on_loop: list[bool] = []
    real = requests._check_value

    def check(*given: Any) -> None:
        on_loop.append(asyncio._get_running_loop() is not None)
        real(*given)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(TASK).encode() + b" " * strict_routes.SMALL_BODY}

    async def read() -> Any:
        request = Request({"type": "http"}, receive)
        return await strict_routes.StrictRequest(request, requests.TrainBody, FairSlots(1)).json()

    monkeypatch.setattr(requests, "_check_value", check)
    body = asyncio.run(read())
    assert body == requests.TrainBody(**TASK) and set(on_loop) == {False}


@pytest.mark.parametrize("path", ["/train?background=true", "/evaluate?background=true", "/feedback", "/grade"])
def test_a_long_body_gets_the_answer_of_a_short_one(service: RlvrService, path: str):
    with service.client() as client:
        for body in ('{"verifier": 3}', "[]", '{"a": 1, "a": 2}', '{"prompt": 1e999}', json.dumps(TASK)):
            replies = [
                client.post(path, content=body + " " * more, headers={"content-type": "application/json"})
                for more in (0, strict_routes.SMALL_BODY)
            ]
            kept = [{**reply.json(), "request_id": "", "session_id": ""} for reply in replies]
            assert replies[0].status_code == replies[1].status_code != 429 and kept[0] == kept[1], body


def test_a_refusal_does_not_repeat_the_body(service: RlvrService):
    words = {"name": "required_words", "options": {"words": [1] * 40_000}}
    reply = service.post("/train", TASK | {"verifiers": [words]})
    assert reply.status_code == 422 and len(reply.content) < 5_000


@pytest.mark.slow
def test_a_slow_schema_check_does_not_block_other_requests(service: RlvrService):
    levels = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(25)}
    schema = {"$defs": levels | {"a25": {"type": "string"}}, "$ref": "#/$defs/a0"}
    schema["$defs"]["a25"] = {"type": ["string", "null", "number", "boolean", "object", "array"]}
    options = {"name": "json_schema", "options": {"schema": schema}}
    threads = meanwhile(service, "/train?background=true", TASK | {"verifiers": [options]})
    assert slowest(service, "/health", "/stats") < QUICK
    threads[0].join()


def test_slow_graders_do_not_block_the_store(service: RlvrService):
    source = "import time\ndef grade(sample, item):\n    time.sleep(4)\n    return 1\n"
    body = {"grader": {"type": "python", "source": source}, "items": [{"sample": {"output_text": "x"}}]}
    meanwhile(service, "/grade", body, times=18)
    assert slowest(service, "/health", "/stats", "/sessions") < QUICK


@pytest.mark.slow
def test_a_hanging_judge_does_not_stop_the_heartbeat(tmp_path: Path):
    def answer(asked: Any) -> str | EndpointReply:
        return EndpointReply("x", delay=60) if asked.chat else "Something, said in some words."

    with (
        serving(answer) as server,
        RlvrService(
            tmp_path, LLM_ENDPOINT=server.plain_url, JUDGE_ENDPOINT=server.chat_url, JUDGE_MODEL="judge"
        ) as running,
    ):
        for _ in range(12):  # more than the threads that Python gives a loop on a small machine
            assert running.post("/train?background=true", TASK).status_code == 202
        with closing(sqlite3.connect(tmp_path / "service.sqlite")) as store:
            begun = heard = None
            until = time.monotonic() + 20
            while (begun is None or heard == begun) and time.monotonic() < until:
                (heard,) = store.execute("SELECT max(heartbeat) FROM rlvr_sessions").fetchone()
                begun = begun or heard
                time.sleep(0.2)
        assert heard != begun, "another instance would take these sessions for lost"
        running.kill()


def test_a_key_that_an_endpoint_rejects_is_not_quoted(monkeypatch: pytest.MonkeyPatch):
    """An endpoint may quote the beginning and the end of the key."""
    monkeypatch.setenv("A_KEY", "sk-begin-of-a-secret-and-end")

    async def ask(status: int) -> str:
        words = '{"error": "Incorrect API key provided: sk-begin*****and-end"}'
        with serving(lambda asked: EndpointReply(raw=words, status=status)) as server:
            async with ChatClient(Endpoint(server.plain_url, "", "A_KEY", dialect=Dialect.PLAIN)) as client:
                with pytest.raises(ChatError) as error:
                    await client.ask({"prompt": "x"}, Cost())
                return str(error.value)

    for status in (401, 403):
        message = asyncio.run(ask(status))
        assert "A_KEY" in message and "sk-begin" not in message and "and-end" not in message


def test_wrong_token_counts_of_an_endpoint_are_ignored():
    async def ask(usage: str) -> int:
        with serving(
            lambda asked: EndpointReply(raw=f'{{"text": "hi", "usage": {{"completion_tokens": {usage}}}}}')
        ) as server:
            async with ChatClient(Endpoint(server.plain_url, "", dialect=Dialect.PLAIN)) as line:
                return (await line.ask({"prompt": "x"}, Cost())).completion_tokens

    assert asyncio.run(ask("7")) == 7
    assert asyncio.run(ask("9" * 30)) == 0 == asyncio.run(ask("-3")) and MOST_TOKENS < 2**31  # of an SQL integer


def test_the_session_list_omits_texts(tmp_path: Path):
    large = "x" * 100_000
    with closing(open_store(tmp_path / "s.sqlite")) as store:
        store.add_session(Session("one", "t", large, request={"tests": [large]}, final_solution=large))
        (light,) = store.sessions(texts=False)
        (whole,) = store.sessions()
    assert (len(light.prompt), light.request, light.final_solution) == (2_000, {}, None)
    assert whole.prompt == large and whole.request == {"tests": [large]} and whole.final_solution == large


@pytest.mark.parametrize(
    ("text", "word", "stands"),
    [("a" * 100_000, "a" * 1_000, False), ("ab b", "b", True), ("is-ab is-a", "is-a", True), ("x-ab-ab", "-a", False)],
)
def test_overlapping_words_are_matched_in_linear_time(text: str, word: str, stands: bool):
    verdict = resolve_reward("required_words", words=[word])("", text)
    assert (getattr(verdict, "value", verdict) == 1.0) is stands


def test_an_endless_request_head_is_cut_off(service: RlvrService):
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as line:
        line.sendall(b"GET /stats HTTP/1.1\r\nHost: localhost\r\nx: ")
        with pytest.raises(OSError):
            for _ in range(200):
                line.sendall(b"a" * 100_000)
    assert service.get("/health").status_code == 200


def test_a_slow_body_is_refused():
    """The connection is closed too, because its remaining bytes are unknown."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    async def receive() -> Message:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/train", "headers": [(b"host", b"localhost")]}
    asyncio.run(ServiceMiddleware(app, ApiKeys([]), ServiceLimits(), body_seconds=0.1)(scope, receive, send))
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["code"] == "too_slow"


def test_half_sent_bodies_of_one_owner_fill_no_memory():
    """The 33rd body of the largest size is refused, while the others are still arriving."""

    async def run() -> list[int]:
        complete, statuses = asyncio.Event(), list[int]()

        async def app(scope: Scope, receive: Any, send: Any) -> None:
            while (await receive())["more_body"]:
                pass
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async def ask() -> None:
            pieces = iter([b"x" * 1_000, b""])

            async def receive() -> Message:
                if not (piece := next(pieces)):
                    await complete.wait()
                return {"type": "http.request", "body": piece, "more_body": bool(piece)}

            async def send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])

            scope = {"type": "http", "method": "POST", "path": "/train", "headers": [(b"host", b"localhost")]}
            await middleware(scope, receive, send)

        middleware = ServiceMiddleware(app, ApiKeys([]), ServiceLimits(max_body=1_000, requests_per_minute=0))
        tasks = [asyncio.create_task(ask()) for _ in range(33)]
        for _ in range(3 * len(tasks)):  # one owner's requests go on one after the other
            await asyncio.sleep(0)
        complete.set()
        await asyncio.gather(*tasks)
        return statuses

    assert sorted(asyncio.run(run())) == [200] * 32 + [429]


def test_a_template_that_repeats_a_long_text_is_not_expanded():
    many = "{{item.a}}" * 9_000  # of half a megabyte each
    grader = Grader.of({"type": "string_check", "operation": "eq", "input": many, "reference": many})
    tracemalloc.start()
    try:
        score = grader.grade({"a": "y" * 500_000}, {"output_text": "x"})
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert (score.outcome, score.reason) == (Outcome.INVALID, "too_large")


@pytest.mark.slow
def test_huge_answers_are_truncated_and_pages_of_them_end_early(tmp_path: Path):
    rule = {"name": "length", "options": {"at_least": 10**6}}  # which no answer keeps
    task = TASK | {"verifiers": [rule], "max_iterations": 2}
    with (
        serving(lambda asked: "word " * 200_000) as server,
        RlvrService(tmp_path, LLM_ENDPOINT=server.plain_url) as here,
    ):
        for _ in range(20):
            session = here.post("/train", task).json()
        assert all(len(answer["generated_output"]) < 200_000 for answer in session["training_data"])
        seen, after, pages = list[int](), "", 0
        while True:
            page = here.get(f"/experiences/t?limit=500{after}")
            assert len(page.content) < 16 << 20
            seen, pages = seen + [row["id"] for row in page.json()["experiences"]], pages + 1
            if page.json()["next_after"] is None:
                break
            after = f"&after={page.json()['next_after']}"
        assert pages > 1 and seen == sorted(set(seen)) and len(seen) == 40
        reply = here.get(f"/sessions/{session['session_id']}/events").text
    names = re.findall("^event: (.*)$", reply, re.MULTILINE)
    assert names == ["status", "status", "iteration", "iteration", "end"]


def test_an_answer_that_cannot_be_stored_ends_only_its_session(store_url: str):
    """The answer is lost, and the session's row is written."""

    live = LiveSession(Session("s", "t", "x", status=Status.FAILED), target=None)  # pyright: ignore[reportArgumentType]
    live.experiences = [Experience("s", "t", 1, "x", "y", num_tokens=2**80)]
    live.unsaved = list(live.experiences)
    with closing(open_store(store_url)) as store:
        store.add_session(Session("s", "t", "x", status=Status.RUNNING))
        SessionWriter(store, "here").finish(live)
        session = store.session("s")
        assert session is not None and (session.status, session.iterations) == (Status.FAILED, 0)
        assert store.count() == 0
