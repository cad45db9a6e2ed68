"""What a request takes long for is done off the event loop: bodies, texts and answers, in pieces, one at a time."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.chat.dialects.chat_completions import ChatCompletions
from rlvr.tinker_server.http import dependencies
from rlvr.tinker_server.http.dependencies import SMALL_BODY, dump_json
from rlvr.tinker_server.http.open_api import open_replies, served_text
from rlvr.tinker_server.http.open_api.open_sampling import OpenSampling
from rlvr.tinker_server.http.open_api.served_text import ServedText
from rlvr.tinker_server.http.tinker_middleware import TinkerMiddleware
from rlvr.tinker_server.protocol.errors import UserError
from rlvr.tinker_server.protocol.schemas import (
    CreateModelRequest,
    CreateSessionRequest,
    LoadWeightsRequest,
    OptimStepRequest,
)
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.web import json_bodies
from rlvr.web.auth import ApiKeys
from rlvr.web.json_bodies import has_more_parts
from tests.kit.open_server import NAME, open_endpoints, request, text_engine, text_tokenizer

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
USER = [{"role": "user", "content": "What is 4 + 5?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, int]]:
    with open_endpoints({NAME: text_engine()}, tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture
def port(server: tuple[Any, int]) -> int:
    return server[1]


def note_loops(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, seen: dict[str, bool]) -> None:
    """Note under `name` whether a function was ever called on an event loop."""
    real: Callable[..., Any] = getattr(place, name)

    def call(*args: Any, **options: Any) -> Any:
        is_on_loop = asyncio._get_running_loop() is not None
        seen[name] = seen.get(name, False) or is_on_loop
        return real(*args, **options)

    monkeypatch.setattr(place, name, call)


def test_texts_and_answers_are_made_off_the_event_loop(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, bool] = {}
    for place, names in (
        (ServedText, ("__init__", "encode", "decode", "token_text", "render")),
        (open_replies, ("completion_logprobs", "generated_logprobs", "name_tokens")),
        (ChatCompletions, ("read", "write")),
        (dependencies, ("dump_json",)),
        (served_text, ("cut_stops",)),
    ):
        for name in names:
            note_loops(monkeypatch, place, name, seen)
    plain = {"model": NAME, "prompt": "2 + 5", "max_tokens": 3, "logprobs": 2}
    chat = {"model": NAME, "messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    for path, body in (
        (COMPLETIONS, {**plain, "echo": True, "n": 2}),
        (COMPLETIONS, {**plain, "prompt": [[5, 6], [7]], "echo": True}),
        (COMPLETIONS, {**plain, "stream": True, "stop": ["zzz"]}),
        (CHAT, chat),
        (CHAT, {**chat, "stream": True}),
        (GENERATE, {"model": NAME, "token_ids": [5, 6], "sampling_params": {"max_tokens": 3, "logprobs": 2}}),
    ):
        status, answer = request(port, path, body)
        assert status == 200, answer
    assert seen == dict.fromkeys(
        (
            "encode", "decode", "token_text", "render", "completion_logprobs", "generated_logprobs", "name_tokens",
            "read", "write", "dump_json", "cut_stops",
        ),
        False,
    ) | ({"__init__": False} if "__init__" in seen else {})  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"model": "?", "prompt": [1] * SMALL_BODY}),
        (CHAT, {"model": "?", "messages": [{"role": "user", "content": "a" * SMALL_BODY}]}),
        (GENERATE, {"model": "?", "token_ids": [1] * SMALL_BODY}),
        ("/api/v1/create_session", {"user_metadata": {"a": ["b"] * SMALL_BODY}}),
        ("/api/v1/optim_step", {"model_id": "?", "seq_id": 1, "adam_params": {"beta1": 0.5, "a" * SMALL_BODY: 1}}),
        ("/api/v1/retrieve_futures", {"target": {"sampling_session_id": "?"}, "retrieved_request_ids": ["a"] * 9_999}),
        ("/api/v1/asample", {"prompt": {"chunks": [{"tokens": [1] * SMALL_BODY}]}}),
        ("/api/v1/telemetry", {"events": [1] * SMALL_BODY}),
    ],
)
def test_long_bodies_are_parsed_off_the_event_loop(
    port: int, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    seen: dict[str, bool] = {}
    note_loops(monkeypatch, dependencies, "parse_body", seen)
    status, answer = request(port, path, body)
    assert seen == {"parse_body": False}, (status, answer)


def test_every_route_with_a_json_body_reads_it_so(server: tuple[Any, int]) -> None:
    from rlvr.tinker_server.http.app import create_routes

    def routes(found: Any) -> Iterator[Any]:
        for route in found:
            inner = getattr(route, "original_router", None)
            yield from routes(inner.routes) if inner is not None else [route]

    app = create_routes(server[0], SimpleNamespace())  # type: ignore[arg-type]
    with_body = [one for one in routes(app.routes) if getattr(one, "body_field", None) is not None]
    assert with_body == [], "FastAPI parses the body of these on the event loop"
    read = [one.path for one in routes(app.routes) if (getattr(one, "openapi_extra", None) or {}).get("requestBody")]
    assert len(read) >= 20 and any(path.endswith("/asample") for path in read)


def test_the_description_of_the_server_can_be_read(port: int) -> None:
    status, described = request(port, "/openapi.json")
    assert status == 200
    body = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "prompt" in body["properties"] and body["required"] == ["model", "prompt"]
    sample = described["paths"]["/api/v1/asample"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert sample["properties"]["num_samples"]["default"] == 1


def test_one_owner_computes_one_thing_at_a_time_and_all_together_two() -> None:
    """Every thread that computes slows the event loop: so there are few."""
    from anyio import CapacityLimiter

    from rlvr.tinker_server.http.dependencies import COMPUTATIONS, Caller

    begun: list[str] = []
    release, lock = {owner: threading.Event() for owner in "abc"}, threading.Lock()

    def work(owner: str) -> None:
        with lock:
            begun.append(owner)
        assert release[owner].wait(30)

    async def begin(count: int) -> None:
        while len(begun) < count:
            await asyncio.sleep(0.001)
        for _ in range(100):  # time for the others to begin, if they may
            await asyncio.sleep(0)

    async def run() -> None:
        every: Any = CapacityLimiter(COMPUTATIONS)
        own = {owner: CapacityLimiter(1) for owner in "abc"}
        nothing: Any = None

        def caller(owner: str) -> Caller:
            return Caller(nothing, owner, nothing, nothing, nothing, nothing, nothing, own[owner], every)

        tasks = [asyncio.create_task(caller(owner).compute(work, owner)) for owner in "aaabc"]
        await begin(COMPUTATIONS)
        assert sorted(begun) == ["a", "b"]
        release["a"].set()
        await begin(COMPUTATIONS + 1)
        assert begun[2:] == ["c"], "the first owner's next turn comes after those of the others"
        for event in release.values():
            event.set()
        await asyncio.gather(*tasks)
        assert sorted(begun) == list("aaabc")

    asyncio.run(run())


def test_thousands_of_results_that_are_there_leave_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    sampling = OpenSampling(nothing, nothing, [], futures=[nothing] * 1_000)
    ended_on: list[threading.Thread] = []
    rounds = 0

    async def result(*_: Any, **__: Any) -> str:
        return "there"

    async def others() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def run() -> None:
        task = asyncio.create_task(others())
        assert len(await sampling.results()) == 1_000
        task.cancel()

    monkeypatch.setattr(sampling, "_result", result)
    monkeypatch.setattr(sampling, "cancel", lambda: ended_on.append(threading.current_thread()))
    asyncio.run(run())
    assert rounds >= 15 and ended_on != [threading.current_thread()]


def test_an_answer_is_written_in_pieces_as_json_is(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)

    def make(depth: int) -> Any:
        kind = draw.randrange(4 if depth else 2)
        if kind == 0:
            return draw.choice([None, True, 1, -2.5, 'a"b\\é\n🙂', "", 10**20])
        if kind == 1:
            return [draw.random() for _ in range(draw.choice([0, 3, 3_000]))]
        if kind == 2:
            return {str(draw.random()): make(depth - 1) for _ in range(draw.randrange(4))}
        return [make(depth - 1) for _ in range(draw.randrange(4))]

    for _ in range(300):
        value = make(7)
        assert json.loads(dump_json(value)) == value
    longest, real = 0, json.dumps

    def measure(value: Any, **options: Any) -> str:
        nonlocal longest
        text = real(value, **options)
        longest = max(longest, len(text))
        return text

    monkeypatch.setattr(dependencies.json, "dumps", measure)
    row = {f"token {i}": -1.25 for i in range(128)}
    value = {"choices": [{"logprobs": {"tokens": ["a"] * 4_000, "top_logprobs": [None, *([row] * 500)]}}] * 2}
    assert dump_json(value) == real(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert longest <= 8_192


def test_a_token_is_decoded_once() -> None:
    text, decoded = ServedText(text_tokenizer()), list[list[int]]()
    real = text._decoder.decode

    def decode(tokens: list[int], **options: Any) -> str:
        decoded.append(tokens)
        return real(tokens, **options)

    text._decoder.decode = decode
    assert [text.token_text(token) for token in (70, 71, 70, 70)] == [real([one]) for one in (70, 71, 70, 70)]
    assert decoded == [[70], [71]]


def test_a_text_that_must_be_too_long_is_not_tokenized(port: int, server: tuple[Any, int], monkeypatch: Any) -> None:
    model = server[0].engines[NAME].model
    longest = max(map(len, model.tokenizer.get_vocab()))
    text = ServedText(model.tokenizer, model.context)
    assert text.max_chars == model.context * (longest + 1)
    for name in ("encode", "__call__"):
        monkeypatch.setattr(type(text._tokenizer), name, lambda *_, **__: pytest.fail("it was tokenized"))
    with pytest.raises(UserError, match=rf"prompt: .* context of {model.context:,} tokens .* shorten"):
        text.encode("a" * (int(text.max_chars) + 1))
    with pytest.raises(UserError, match=r"messages: .* shorten"):
        text.render([{"role": "user", "content": "a" * int(text.max_chars)}], [], {})


def test_too_many_prompts_are_refused_before_they_are_tokenized(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 429 would be repeated, and can never succeed."""
    monkeypatch.setattr(ServedText, "encode", lambda *_: pytest.fail("it was tokenized"))
    status, answer = request(port, COMPLETIONS, {"model": NAME, "prompt": ["a"] * 9_000, "max_tokens": 1})
    assert status == 400 and answer["error"]["param"] == "prompt"
    assert "9,000 prompts" in answer["detail"] and "8,192" in answer["detail"]


@pytest.mark.parametrize(
    ("path", "body", "logprobs"),
    [  # n x (logprobs x tokens of the prompts + logprobs x max_tokens)
        (COMPLETIONS, {"prompt": [[5] * 20] * 500, "echo": True, "logprobs": 128, "n": 8, "max_tokens": 1},
         8 * 128 * (500 * 20 + 500)),
        (COMPLETIONS, {"prompt": [5], "logprobs": 100, "n": 1_024, "max_tokens": 30}, 100 * 1_024 * 30),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 128, "n": 1_024, "max_tokens": 20},
         128 * 1_024 * 20),
        (GENERATE, {"token_ids": [5], "sampling_params": {"logprobs": 101, "n": 1_024, "max_tokens": 30}},
         100 * 1_024 * 30),
    ],
)  # fmt: skip
def test_an_answer_of_too_many_log_probs_is_refused(port: int, path: str, body: Any, logprobs: int) -> None:
    status, answer = request(port, path, {"model": NAME, **body})
    assert status == 400, answer
    assert f"{logprobs:,} log-probs" in answer["detail"] and "limits.answer_logprobs" in answer["detail"]


def test_a_request_of_more_bytes_than_can_ever_wait_is_no_429(tmp_path: Path) -> None:
    from rlvr.core.messages import ModelInput, SamplingParams
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
    from rlvr.tinker_server.protocol.server_limits import ServerLimits

    backend = TinkerBackend({NAME: text_engine()}, tmp_path, limits=ServerLimits(owner_bytes=10_000))
    try:
        row = backend.sampling.find_model("local", NAME)
        with pytest.raises(UserError, match=r"n=20 for 1 prompts .*limits\.owner_bytes"):
            backend.sampling.check_answer(row, [ModelInput([5])], 20, SamplingParams(max_tokens=2), {})
    finally:
        backend.close()


def test_a_list_of_mistakes_is_refused_at_the_first(port: int) -> None:
    for prompt in ([[5, "x"]] * 40_000, [5, True], [[5], "a"], [-1], {"a": 1}):
        status, answer = request(port, COMPLETIONS, {"model": NAME, "prompt": prompt})
        assert status == 400 and "neither text nor token ids" in answer["detail"], answer
    status, answer = request(port, CHAT, {"model": NAME, "messages": [{"role": "x"}] * 10_000})
    assert status == 400 and answer["detail"].count("messages") == 1, answer


@pytest.mark.parametrize(
    "body",
    [
        {"user_metadata": {str(i): 1 for i in range(100_000)}},
        {"user_metadata": {"a": [[]] * 100_000}},
        {"user_metadata": {"a": [{}] * 100_000}},
        {"user_metadata": {"a": [1.5] * 300_002}},
        {"user_metadata": {"a": [""] * 300_002}},
    ],
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed(
    port: int, monkeypatch: pytest.MonkeyPatch, body: Any
) -> None:
    monkeypatch.setattr(dependencies.json, "loads", lambda *_: pytest.fail("it was parsed"))
    raw = json.dumps(body).encode()
    with pytest.raises(UserError, match=r"50,000 lists, objects and fields"):
        dependencies.parse_body(CreateSessionRequest, raw, "application/json")


def test_an_error_does_not_repeat_a_long_name(port: int) -> None:
    for path, body in (
        (COMPLETIONS, {"model": NAME, "prompt": "a", "k" * 100_000: 1}),
        ("/api/v1/create_session", {"k" * 100_000: 1}),
        ("/api/v1/create_session", {"user_metadata": {"k" * 100_000: {"a": 1}}, "tags": ["a" * 100_000]}),
    ):
        status, answer = request(port, path, body)
        assert status == 400 and len(json.dumps(answer)) < 10_000, path


def test_signs_in_texts_are_no_parts() -> None:
    raw = json.dumps({"a": '[{:,"\\' * 100_000 + "é\\", "b": [1, {"c": 2}]}, ensure_ascii=False).encode()
    limits = ((6, 2), (5, 2), (6, 1))  # 2 objects, a list, 3 fields; 2 commas
    assert [has_more_parts(raw, *limit) for limit in limits] == [False, True, True]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7])
def test_signs_are_counted_in_pieces_as_in_one(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(step)
    monkeypatch.setattr(json_bodies, "_STEP", step)
    for _ in range(300):
        text = "".join(draw.choice(["[", "{", ":", ",", '"', "\\", "a", "é"]) for _ in range(draw.randrange(12)))
        value = {text + "k": [text, {"b": [text, 1, text[:3]]}]}
        raw = json.dumps(value, ensure_ascii=False).encode()
        assert not has_more_parts(raw, 6, 3)  # 2 objects, 2 lists and 2 fields; 3 commas
        assert has_more_parts(raw, 5, 3) and has_more_parts(raw, 6, 2)


class Arrivals:
    """A request whose body arrives in pieces of so many bytes, each after so many seconds of the loop's clock."""

    def __init__(self, path: str, pieces: list[tuple[int, float]], key: str = "tml-aaaaaaaa") -> None:
        self.pieces, self.sent = iter(pieces), list[Any]()
        headers = [(b"x-api-key", key.encode()), (b"content-type", b"application/json")]
        self.scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}

    async def receive(self) -> Any:
        size, seconds = next(self.pieces)
        await asyncio.sleep(seconds)
        return {"type": "http.request", "body": b"x" * size, "more_body": True}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer, so that seconds are exact and take none."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def run_jumping(work: Any) -> float:
    loop = JumpingLoop()
    try:
        loop.run_until_complete(work)
        return loop.now
    finally:
        loop.close()


def protect(app: Any, **limits: Any) -> TinkerMiddleware:
    middleware = TinkerMiddleware(ApiKeys(["tml-aaaaaaaa", "tml-bbbbbbbb"]), ServerLimits(**limits))
    middleware.open(app)
    return middleware


async def read_body(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass


@pytest.mark.parametrize(
    ("pieces", "seconds"),
    [
        ([(1, 1.0)] * 1_000, 60.0 + 60 / 1_000),  # a byte a second: 60 of them are worth 0.06 s
        ([(0, 1_000.0)], 60.0),
        ([(1_000, 1.0)] * 120 + [(0, 1_000.0)], 180.0),  # exactly the rate, then nothing
    ],
)
def test_a_body_that_trickles_is_refused(pieces: list[tuple[int, float]], seconds: float) -> None:
    request = Arrivals("/api/v1/create_session", pieces)
    middleware = protect(read_body, body_seconds=60.0, body_rate=1_000.0)
    assert run_jumping(middleware(request.scope, request.receive, request.send)) == pytest.approx(seconds)
    assert request.sent[0]["status"] == 408 and (b"connection", b"close") in request.sent[0]["headers"]


def test_one_owner_holds_a_number_of_connections() -> None:
    async def run() -> None:
        release = asyncio.Event()

        async def hold(scope: Any, receive: Any, send: Any) -> None:
            await release.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})

        middleware = protect(hold, owner_requests=3)

        async def ask(key: str) -> Any:
            request = Arrivals("/api/v1/create_session", [], key)
            await middleware(request.scope, request.receive, request.send)
            return request.sent

        held = [asyncio.create_task(ask("tml-aaaaaaaa")) for _ in range(3)]
        await asyncio.sleep(0)
        refused = await ask("tml-aaaaaaaa")
        assert refused[0]["status"] == 429 and b"limits.owner_requests" in refused[1]["body"]
        other = asyncio.create_task(ask("tml-bbbbbbbb"))
        await asyncio.sleep(0)
        release.set()
        assert [(await one)[0]["status"] for one in (*held, other)] == [200] * 4
        assert (await ask("tml-aaaaaaaa"))[0]["status"] == 200
        assert not middleware._open

    asyncio.run(run())


def uvicorn_state() -> Any:
    from uvicorn.server import ServerState

    return ServerState()


def test_idle_connections_make_room_for_new_ones_and_those_with_a_request_stay() -> None:
    from rlvr.web import server as web_server

    async def run() -> None:
        release = asyncio.Event()

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/hold":
                await release.wait()
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        config, state = web_server.server_config(answer, limit_concurrency=6), uvicorn_state()
        config.load()
        listening = await asyncio.get_running_loop().create_server(
            lambda: config.http_protocol_class(config, state, {}), "127.0.0.1", 0
        )
        place = listening.sockets[0].getsockname()

        writers: list[asyncio.StreamWriter] = []

        async def connect() -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(*place)
            writers.append(writer)
            return reader

        async def ask(path: str) -> asyncio.StreamReader:
            reader = await connect()
            writers[-1].write(f"GET {path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
            return reader

        async def status(reader: asyncio.StreamReader) -> bytes:
            return (await reader.readuntil(b"\r\n\r\n"))[9:12]

        async with asyncio.timeout(30):
            held = [await ask("/hold") for _ in range(2)]
            used = await ask("/")
            assert await status(used) == b"204"
            silent = [await connect() for _ in range(40)]
            for _ in range(10):
                assert await status(await ask("/")) == b"204"
            for reader in (used, *silent):
                with suppress(ConnectionError):
                    assert await reader.read() == b""  # closed by the server
            held += [await ask("/hold") for _ in range(2)]
            while len(state.tasks) < 4:
                await asyncio.sleep(0.01)
            assert await status(await ask("/")) == b"204"
            held.append(await ask("/hold"))
            while len(state.tasks) < 5:
                await asyncio.sleep(0.01)
            assert await status(await ask("/")) == b"503"
            release.set()
            assert [await status(one) for one in held] == [b"204"] * 5
        for writer in writers:
            writer.close()
        listening.close()
        await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_body_that_goes_on_after_its_answer_is_cut_off(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn's own timer of idle connections begins anew with every byte."""
    from rlvr.web import server as web_server

    monkeypatch.setattr(web_server, "REST_SECONDS", 0.2)

    async def run() -> None:
        config = web_server.server_config(answer_at_once, timeout_keep_alive=60)
        config.load()
        listening = await asyncio.get_running_loop().create_server(
            lambda: config.http_protocol_class(config, uvicorn_state(), {}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")

        async def trickle() -> None:
            with suppress(OSError):
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.01)

        async with asyncio.timeout(30):
            trickling = asyncio.create_task(trickle())
            with suppress(ConnectionError):
                assert b"\r\n\r\n" in await reader.read()
            await trickling
        listening.close()

    async def answer_at_once(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    asyncio.run(run())


def test_an_optimizer_that_is_not_here_is_refused_by_name() -> None:
    dimuon = {"type": "dimuon", "learning_rate": 0.1, "grad_clip_norm": 0.0, "beta1": 0.9}
    for body in ({"optimizer_params": dimuon}, {"adam_params": dimuon}):
        with pytest.raises(UserError, match=r"optimizer 'dimuon' is not supported.*AdamW"):
            OptimStepRequest(model_id="a", seq_id=1, **body).adam()
    config = {"type": "dimuon", "version": 1}  # as the SDK sends it
    for kind, body in (
        (CreateModelRequest, {"session_id": "a", "model_seq_id": 0, "base_model": "m"}),
        (LoadWeightsRequest, {"session_id": "a", "model_seq_id": 0, "path": "p", "optimizer": False}),
    ):
        with pytest.raises(ValidationError, match=r"optimizer 'dimuon' is not supported.*AdamW"):
            kind.model_validate({**body, "optimizer_config": config})
        assert kind.model_validate({**body, "optimizer_config": {"type": "adamw"}})
    with pytest.raises(UserError, match="needs adam_params"):
        OptimStepRequest(model_id="a", seq_id=1).adam()
