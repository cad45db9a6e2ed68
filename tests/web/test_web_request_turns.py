"""An owner of thousands of connections beside one with a single request, and long work that lets other threads run."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.chat.dialects.chat_completions import ChatCompletions
from rlvr.chat.dialects.forms import DialectError
from rlvr.core.fair_slots import LoopTurns
from rlvr.core.messages import SampledSequence, SampleResponse
from rlvr.core.types import StopReason
from rlvr.engine import sampling
from rlvr.service.http.service_middleware import ServiceMiddleware
from rlvr.tinker_server.http.tinker_middleware import HEALTH_PATH, MAX_DOWNLOADS, SIGNED_PREFIX, TinkerMiddleware
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.tinker_server.protocol.wire import encode_samples
from rlvr.web.auth import ApiKeys, owner_of
from rlvr.web.json_bodies import read_json

ANNA, BOB = "tml-anna-has-a-key", "tml-bob-has-another"


class Client:
    """A request as the middleware sees it; `receive` is called for its body."""

    def __init__(self, key: str, receive: Callable[[], Any], path: str = "/api/v1/create_session") -> None:
        self.scope: dict[str, Any] = {
            "type": "http", "method": "POST", "path": path, "query_string": b"",
            "headers": [(b"x-api-key", key.encode())],
        }  # fmt: skip
        self.receive = receive
        self.statuses: list[int] = []

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.statuses.append(message["status"])


def protect(app: Any, **limits: Any) -> TinkerMiddleware:
    middleware = TinkerMiddleware(ApiKeys([ANNA, BOB]), ServerLimits(**limits))
    middleware.open(app)
    return middleware


def test_requests_of_one_owner_that_begin_at_once_do_not_stand_before_anothers() -> None:
    begun: list[str] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["state"]["owner"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def run() -> None:
        middleware = protect(note)
        clients = [Client(key, asyncio.Event().wait) for key in (*[ANNA] * 100, BOB)]
        await asyncio.gather(*(middleware(one.scope, one.receive, one.send) for one in clients))
        assert begun.index(owner_of(BOB)) < 3 and len(begun) == 101

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/api/v1/create_session", f"{SIGNED_PREFIX}s/1/key-a/run/name/file"])
def test_requests_without_a_key_do_not_stand_before_a_probe(path: str) -> None:
    answered: list[str] = []

    async def run() -> None:
        middleware = protect(lambda scope, receive, send: asyncio.sleep(0))
        clients = [Client("", asyncio.Event().wait, path) for _ in range(100)]
        probe = Client("", asyncio.Event().wait)
        probe.scope["path"] = "/api/v1/healthz"

        async def ask(client: Client) -> None:
            await middleware(client.scope, client.receive, client.send)
            answered.append(client.scope["path"])

        await asyncio.gather(*map(ask, [*clients, probe]))
        assert answered.index("/api/v1/healthz") < 5

    asyncio.run(run())


def ask_beside(middleware: Any, held: list[Client], asked: list[Client]) -> list[int]:
    """The statuses of `asked` while `held` are open, whose application answers when `release` is set."""

    async def run() -> list[int]:
        release = asyncio.Event()

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] in {one.scope["path"] for one in held}:
                await release.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body"})

        middleware._app = answer
        tasks = [asyncio.create_task(middleware(one.scope, one.receive, one.send)) for one in held]
        await asyncio.sleep(0.05)
        others = [asyncio.create_task(middleware(one.scope, one.receive, one.send)) for one in asked]
        await asyncio.sleep(0.05)
        release.set()
        await asyncio.gather(*tasks, *others)
        assert not middleware._open
        return [status for one in asked for status in one.statuses]

    return asyncio.run(run())


def test_open_downloads_count_as_their_owners_and_leave_the_probe_alone() -> None:
    def download(owner: str) -> Client:
        return Client("", asyncio.Event().wait, f"{SIGNED_PREFIX}signed/1/{owner}/run/name/file")

    middleware = protect(None, owner_requests=3)
    held = [download("key-a") for _ in range(MAX_DOWNLOADS)]
    probe = Client("", asyncio.Event().wait, HEALTH_PATH)
    asked = [probe, download("key-a"), download("key-b"), Client(ANNA, asyncio.Event().wait)]
    assert ask_beside(middleware, held, asked) == [200, 429, 200, 200]


def test_open_requests_without_a_key_leave_the_probes_of_the_service_alone() -> None:
    """A body that is sent slowly to the page that asks for a key holds its request for a minute."""
    limits: Any = SimpleNamespace(max_body=1_000, requests_per_minute=0, reads_per_minute=0)
    middleware = ServiceMiddleware(
        lambda *_: asyncio.sleep(0), ApiKeys([ANNA]), limits, has_own_auth=lambda path: path.startswith("/ui")
    )
    middleware.max_open_requests = 3
    held = [Client("", asyncio.Event().wait, "/ui/sign-in") for _ in range(3)]
    paths = ("/health/live", "/health/ready", "/health", "/ui/sign-in")
    asked = [Client("", asyncio.Event().wait, path) for path in paths]
    assert ask_beside(middleware, held, asked) == [200, 200, 200, 429]


@pytest.mark.parametrize("fate", ["slow", "left"])
def test_bodies_that_end_at_once_are_refused_one_by_one(fate: str) -> None:
    """All of them time out, or lose their clients, in one moment, in which another owner's request begins."""
    events: list[str] = []

    async def read(scope: Any, receive: Any, send: Any) -> None:
        owner = scope["state"]["owner"]
        if owner == owner_of(ANNA):
            try:
                await receive()
            finally:
                events.append("ended")
        else:
            events.append("other")

    middleware = protect(read, body_seconds=0.05 if fate == "slow" else 60.0)

    async def run() -> None:
        leave = asyncio.Event()

        async def receive() -> Any:
            await (asyncio.sleep(3600) if fate == "slow" else leave.wait())
            return {"type": "http.disconnect"}

        async def begin_with_the_first() -> None:
            while not events:
                await asyncio.sleep(0)
            other = Client(BOB, asyncio.Event().wait)
            await middleware(other.scope, other.receive, other.send)

        clients = [Client(ANNA, receive) for _ in range(100)]
        tasks = [asyncio.create_task(middleware(one.scope, one.receive, one.send)) for one in clients]
        tasks.append(asyncio.create_task(begin_with_the_first()))
        await asyncio.sleep(0.01)
        if fate == "slow":
            time.sleep(0.1)  # their time is over in the same round of the loop
        leave.set()
        await asyncio.gather(*tasks)
        assert events.index("other") < 60 and events.count("ended") == 100

    asyncio.run(run())


def test_a_turn_that_is_not_wanted_any_more_goes_to_the_next() -> None:
    async def run() -> None:
        turns = LoopTurns()
        await turns.take("anna")
        waiting = [asyncio.ensure_future(turns.take("anna")) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        await asyncio.wait_for(waiting[2], 5)
        await asyncio.sleep(0)
        assert not turns._waiting

    asyncio.run(run())


@pytest.mark.parametrize("text", ["[1,-2,3.5,1e300,true,null]", '{"a":[1],"b":"1.5"}', "-0", "1" * 4_000])
def test_numbers_are_read_as_json_does(text: str) -> None:
    value = json.loads(text)
    assert read_json(text) == value
    assert read_json(text + " " * 100_000) == value


def test_a_long_text_is_read_number_by_number() -> None:
    """Only a function in Python lets another thread run."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    raw = b"[" + b"0.5,7," * 20_000 + b"0]"
    sys.setprofile(count)
    try:
        read_json(raw)
    finally:
        sys.setprofile(None)
    assert calls > 40_000


def test_arguments_of_a_call_hold_no_more_than_a_parser_reads_in_a_moment() -> None:
    arguments = '{"a": [' + "1," * 600_000 + "1]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(DialectError, match=r"arguments has 1,200,\d+ characters, expected at most 1,048,576"):
        ChatCompletions().read({"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]})


def test_likeliest_tokens_are_no_objects_of_the_garbage_collector() -> None:
    """An answer of millions of pairs is arrays: full collections would stop the server's other threads."""
    table = torch.tensor([[-1.0, -3.0, -2.0], [-0.5, -0.25, -4.0]])
    first, second = sampling.top_tokens(table, 2)
    assert (list(first), second) == ([(0, -1.0), (2, -2.0)], [(1, -0.25), (0, -0.5)])
    assert first[1] == (2, -2.0) and first[:1] == [(0, -1.0)] and first != second
    gc.collect()
    before = len(gc.get_objects())
    found = sampling.top_tokens(torch.randn(50, 300), 200)
    assert len(found) == 50 and len(gc.get_objects()) - before < 300
    sampled = SampledSequence(StopReason.LENGTH, [1, 2], [-1.0, -2.0], 0, [first, second])
    pairs = replace(sampled, topk_logprobs=[list(first), list(second)])
    assert encode_samples(SampleResponse([sampled])) == encode_samples(SampleResponse([pairs]))
