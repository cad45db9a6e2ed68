"""The door of the server and its answers, over plain sockets: what is refused, how, and what is written down."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.tinker_server.backend.storage.client_sessions import ClientSessions
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.http.app import create_app
from rlvr.tinker_server.protocol import proto
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.web.auth import ApiKeys, owner_of
from rlvr.web.logs import JsonLines
from tests.kit.tinker_server import serving

PROTOBUF = "application/x-protobuf"
KEY = "tml-a-secret-key"
MAX_BODY = 8 << 20
LIMITS = ServerLimits(max_body=MAX_BODY, poll_seconds=0.3)


class BrokenSessions(ClientSessions):
    """Sessions with a fault of the server, on demand."""

    is_broken = False

    def create(self, *args: Any, **kwargs: Any) -> str:
        if self.is_broken:
            raise RuntimeError("a fault of ours")
        return super().create(*args, **kwargs)


@pytest.fixture(scope="module")
def backend(fresh: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerBackend]:
    made = TinkerBackend({"tiny": fresh("qwen3")}, tmp_path_factory.mktemp("state"))
    made.sessions.__class__ = BrokenSessions
    yield made
    made.close()


@pytest.fixture(scope="module")
def port(backend: TinkerBackend) -> Iterator[int]:
    """Without keys: for this machine only."""
    with serving(create_app(backend, ApiKeys([]), LIMITS)) as number:
        yield number


@pytest.fixture(scope="module")
def locked_port(backend: TinkerBackend) -> Iterator[int]:
    """With a key."""
    with serving(create_app(backend, ApiKeys([KEY]), LIMITS)) as number:
        yield number


def call(
    port: int, path: str, body: Any = None, *, method: str = "", raw: bytes | None = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """(status, body, headers) of one request; underscores in header names stand for dashes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    given = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    connection.request(method or ("GET" if data is None else "POST"), f"/api/v1/{path}", data, given)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    parsed = json.loads(text) if "json" in (answer.getheader("content-type") or "") else text
    return answer.status, parsed, {name.lower(): value for name, value in answer.getheaders()}


def new_session(port: int) -> str:
    status, answer, _ = call(port, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"})
    assert status == 200
    return answer["session_id"]


def new_model(port: int) -> str:
    asked = {"session_id": new_session(port), "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    _, answer, _ = call(port, "create_model", asked)
    assert result(port, answer["request_id"])["model_id"] == answer["model_id"]
    return answer["model_id"]


def result(port: int, request_id: str, **more: Any) -> Any:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        status, answer, _ = call(port, "retrieve_future", {"request_id": request_id, **more}, Accept=PROTOBUF)
        if status != 408:
            return answer
    raise AssertionError(f"no answer to {request_id}")


def forward_backward(model: str, seq: int, tokens: list[int], targets: list[int], repeat: int = 1) -> bytes:
    import numpy as np

    request = proto.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
    for _ in range(repeat):
        datum = proto.Datum()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        for name, values, dtype in (("target_tokens", targets, "<i8"), ("weights", [1.0] * len(targets), "<f4")):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense = np.array(values, dtype).tobytes()
            tensor.dtype = proto.DTYPE_INT64 if dtype == "<i8" else proto.DTYPE_FLOAT32
            tensor.shape.append(len(values))
        request.data.append(datum.SerializeToString())
    return request.SerializeToString()


def test_a_key_is_required_and_never_logged(locked_port: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rlvr"):
        assert call(locked_port, "whoami")[0] == call(locked_port, "healthz/whoami")[0] == 401
        status, answer, headers = call(locked_port, "whoami", X_API_Key="tml-another-key")
        assert status == 401 and "TINKER_API_KEY" in answer["detail"]
        assert headers["x-request-id"] == answer["request_id"]
        status, answer, headers = call(locked_port, "whoami", X_API_Key=KEY)
        assert status == 200 and answer["user_urn"].endswith(owner_of(KEY))
        assert call(locked_port, "healthz")[0] == 200
        time.sleep(0.05)  # a line is written after its answer
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    assert headers["x-request-id"] in {line.get("request_id") for line in lines}
    assert owner_of(KEY) in {line.get("owner") for line in lines}
    assert KEY not in json.dumps(lines) and "tml-another-key" not in json.dumps(lines)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[::2]:80", ""])
def test_without_keys_web_pages_cannot_reach_it(port: int, host: str) -> None:
    assert call(port, "get_server_capabilities", Host=host)[0] == 403


def test_only_origins_of_this_machine_are_accepted(port: int, locked_port: int) -> None:
    assert call(port, "get_server_capabilities", Origin="http://evil.example")[0] == 403
    assert call(port, "get_server_capabilities", Origin="http://localhost:3000")[0] == 200
    assert call(port, "get_server_capabilities", Host=f"localhost:{port}")[0] == 200
    assert call(locked_port, "get_server_capabilities", Host="server.example", X_API_Key=KEY)[0] == 200  # has keys


def test_a_body_is_refused_as_soon_as_it_is_too_large(port: int) -> None:
    status, answer, _ = call(port, "forward_backward", raw=bytes(MAX_BODY + 1), Content_Type=PROTOBUF)
    assert status == 413 and f"{MAX_BODY:,}" in answer["detail"]

    def endless() -> Iterator[bytes]:
        for _ in range(20):
            yield bytes(1 << 19)

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)  # without a length: it is counted
    connection.request("POST", "/api/v1/forward_backward", endless(), {"Content-Type": PROTOBUF}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert call(port, "healthz")[0] == 200


def test_a_truncated_body_is_harmless(port: int) -> None:
    for path in ("forward_backward", "asample"):
        with socket.create_connection(("127.0.0.1", port)) as line:
            head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {PROTOBUF}\r\n"
            line.sendall((head + "Content-Length: 100\r\n\r\n").encode() + b"half")
    assert call(port, "healthz")[0] == 200


def test_unknown_fields_and_calls_are_named(port: int) -> None:
    assert call(port, "no/such/call")[0] == 404
    assert call(port, "create_session", method="GET")[0] == 405
    status, answer, _ = call(port, "create_model", raw=b"{not json")
    assert status == 400 and answer["category"] == "user"
    status, answer, _ = call(port, "create_model", {"session_id": "s", "model_seq_id": "x", "base_model": "tiny"})
    assert status == 400 and "model_seq_id" in answer["detail"]
    status, answer, _ = call(port, "create_session", {"tags": [], "new_wish": 7})
    assert status == 400 and "new_wish" in answer["detail"]
    assert call(port, "create_session", {"tags": [], "new_default": None, "other_default": False})[0] == 200
    assert call(port, "asample", {"prompt": {"chunks": [{"type": "image"}]}})[0] == 400
    assert call(port, "forward_backward", raw=b"{}")[0] == 415
    assert call(port, "forward_backward", raw=b"\xff\xff", Content_Type=PROTOBUF)[0] == 400
    assert call(port, "retrieve_future", {"request_id": "no such"})[0] == 410


SAMPLE = {"sampling_session_id": "s", "seq_id": 1, "prompt": {"chunks": [{"tokens": [1, 2, 3]}]}}
IDS = {"data": [1, 2, 3, -1], "dtype": "int64", "shape": [2, 2]}
CSR = {"data": [5], "dtype": "int64", "shape": [2, 2], "sparse_crow_indices": [0, 0, 1], "sparse_col_indices": [1]}
OPTIM, SAVE = {"model_id": "m", "adam_params": {}}, {"model_id": "m", "seq_id": 1, "path": "a"}
REFUSED: list[tuple[str, Any, str]] = [  # path, body or None for a GET, what the answer names
    ("optim_step", {**OPTIM, "seq_id": True}, "seq_id: Input should be a valid integer"),
    ("optim_step", {**OPTIM, "seq_id": "1"}, "seq_id: Input should be a valid integer"),
    ("optim_step", {**OPTIM, "seq_id": 1.0}, "seq_id: Input should be a valid integer"),
    ("create_model", {"session_id": "s", "model_seq_id": False, "base_model": "tiny"}, "model_seq_id"),
    ("save_weights", {**SAVE, "ttl_seconds": True}, "ttl_seconds"),
    ("asample", {**SAMPLE, "num_samples": True}, "num_samples"),
    ("asample", {**SAMPLE, "sampling_params": {"temperature": True}}, "temperature"),
    ("asample", {**SAMPLE, "sampling_params": {"stop": [True]}}, "stop"),
    ("training_runs?limit=-1", None, "limit=-1, offset=0: expected a limit of at least 1"),
    ("training_runs?limit=0", None, "limit=0"),
    ("training_runs?limit=all", None, "limit"),
    ("checkpoints?offset=-1", None, "offset=-1"),
    ("sessions?limit=-1", None, "limit=-1"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**IDS, "shape": [4]}}, "shape"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**IDS, "shape": [2, 3]}}, "4 ids do not fill"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**IDS, "shape": [1, 4]}}, "1 rows, expected 2"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**IDS, "shape": [4, 1]}}, "4 rows, expected 2"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**IDS, "dtype": "float32"}}, "int64"),
    (
        "asample",
        {**SAMPLE, "target_prompt_logprobs": {**IDS, "data": [-1] * 4}},
        "target_prompt_logprobs: every id is -1",
    ),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**IDS, "data": [True] * 4}}, "integers"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**IDS, "data": [2**70] * 4}}, "64 bits"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**IDS, "more": 1}}, "expected a tensor"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": [[1, 2]]}, "expected a tensor"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**CSR, "sparse_col_indices": [2]}}, "col_indices"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**CSR, "sparse_crow_indices": [0, 1]}}, "row starts"),
    ("asample", {**SAMPLE, "target_prompt_logprobs": {**CSR, "shape": [2, 2**40]}}, "shape"),
    ("asample", {**SAMPLE, "prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k=-1, expected at least 0"),
    ("asample", {**SAMPLE, "prompt_alt_tokens_k": 2**70}, "prompt_alt_tokens_k"),
    ("asample", {**SAMPLE, "prompt_alt_tokens_k": 1.5}, "prompt_alt_tokens_k"),
    ("asample", {**SAMPLE, "prompt_logprobs_last_n": 1}, "set these too"),
    ("asample", {**SAMPLE, "prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "expected 1 to 2"),
    ("asample", {**SAMPLE, "prompt_logprobs": True, "prompt_logprobs_last_n": -(2**60)}, "expected 1 to 2"),
    ("asample", {**SAMPLE, "prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "expected 1 to 2"),
]


@pytest.mark.parametrize(("path", "body", "said"), REFUSED, ids=[f"{i} {row[2]}" for i, row in enumerate(REFUSED)])
def test_a_request_that_makes_no_sense_gets_status_400(port: int, path: str, body: Any, said: str) -> None:
    status, answer, _ = call(port, path, body)
    assert status == 400 and answer["category"] == "user" and said in answer["detail"], answer


def new_sampler(port: int) -> str:
    asked = {"session_id": new_session(port), "sampling_session_seq_id": 0, "base_model": "tiny"}
    return call(port, "create_sampling_session", asked)[1]["sampling_session_id"]


def test_more_log_probs_than_one_request_may_have_are_refused(port: int) -> None:
    sampler = new_sampler(port)
    for name in ("prompt_alt_tokens_k", "topk_prompt_logprobs", "topk_sample_logprobs"):
        status, answer, _ = call(port, "asample", {**SAMPLE, "sampling_session_id": sampler, name: 2**40})
        assert status == 400 and f"{name}={2**40}" in answer["detail"], answer
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        for wrong in (18, -1):  # the vocabulary has 17 tokens
            body = {**SAMPLE, "sampling_session_id": sampler, "seq_id": wrong % 100, name: wrong}
            failed = result(port, call(port, "asample", body)[1]["request_id"])
            assert failed["category"] == "user" and f"{name}={wrong}, expected 0 (off) to 17" in failed["error"]


def test_chosen_tokens_outside_the_vocabulary_are_named(port: int) -> None:
    sampler = new_sampler(port)
    target = {**IDS, "data": [1, 2, 3, 99]}
    body = {**SAMPLE, "sampling_session_id": sampler, "target_prompt_logprobs": target}
    failed = result(port, call(port, "asample", body)[1]["request_id"])
    assert failed["category"] == "user" and "token 99, outside 0..16" in failed["error"]


def test_a_key_can_be_described_and_not_deleted(port: int, locked_port: int) -> None:
    """What `tinker auth login` and `logout` ask."""
    status, answer, _ = call(locked_port, "auth/apikey/me", X_API_Key=KEY)
    assert (status, answer["name"]) == (200, owner_of(KEY)) and KEY not in json.dumps(answer)
    assert call(locked_port, "auth/apikey/me", X_API_Key="tml-another-key")[0] == 401
    status, answer, _ = call(locked_port, "auth/apikey/me", method="DELETE", X_API_Key=KEY)
    assert status == 403 and "key file" in answer["detail"]
    assert call(port, "auth/apikey/me", X_API_Key="tml-anything-at-all")[0] == 200
    status, answer, _ = call(port, "auth/apikey/me", X_API_Key="a key of elsewhere")
    assert status == 400 and "'tml-'" in answer["detail"]


def test_an_unreadable_request_uses_up_its_seq_id(port: int) -> None:
    """Otherwise everything after it would wait for it."""
    model = new_model(port)
    torn = proto.ForwardBackwardRequest.FromString(forward_backward(model, 1, [1, 2, 3], [2, 3, 4]))
    torn.data[0] = torn.data[0][:-3]
    status, answer, _ = call(port, "forward_backward", raw=torn.SerializeToString(), Content_Type=PROTOBUF)
    assert status == 200
    failed = result(port, answer["request_id"])
    assert failed["category"] == "user" and "data[0]" in failed["error"]
    good = forward_backward(model, 2, [1, 2, 3], [2, 3, 4])
    _, answer, _ = call(port, "forward_backward", raw=good, Content_Type=PROTOBUF)
    assert proto.ForwardBackwardOutput.FromString(result(port, answer["request_id"])).metrics["loss:sum"] > 0


def test_results_are_protobuf_and_their_size_can_be_queried_first(port: int) -> None:
    model = new_model(port)
    body = forward_backward(model, 1, [1] * 250, [2] * 250, repeat=1_100)
    status, answer, _ = call(port, "forward_backward", raw=body, Content_Type=PROTOBUF)
    assert status == 200
    assert call(port, "forward_backward", raw=body, Content_Type=PROTOBUF)[1] == answer  # the same request
    whole = result(port, answer["request_id"])
    assert len(whole) > 1_100 * 250 * 4
    told = result(port, answer["request_id"], allow_metadata_only=True)
    assert told == {"status": "complete_metadata", "response_payload_size": len(whole)}
    status, told, _ = call(port, "retrieve_future", {"request_id": answer["request_id"]}, Accept="application/json")
    assert status == 406 and "0.38" in told["detail"]


def test_a_poll_is_held_and_then_asks_to_retry(port: int) -> None:
    """seq_id 2 waits for seq_id 1."""
    model = new_model(port)
    _, answer, _ = call(port, "optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
    begun = time.monotonic()
    status, told, _ = call(port, "retrieve_future", {"request_id": answer["request_id"]})
    assert status == 408 and told["type"] == "try_again" and told["queue_state"] == "active"
    assert time.monotonic() - begun >= 0.25


def test_one_poll_waits_for_many_samples(port: int) -> None:
    """The batch form: what is finished after a cursor, then each answer by its id; a stop is reported as a failure."""
    session = new_session(port)
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = call(port, "create_sampling_session", asked)[1]["sampling_session_id"]
    wanted: set[str] = set()
    for seq in range(3):
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3 + seq]}]}
        how = {"max_tokens": 3, "stop": []}
        body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": 2, "prompt": prompt}
        _, answer, _ = call(port, "asample", {**body, "sampling_params": how})
        assert len(set(answer["sample_sequence_ids"])) == 2
        wanted.add(answer["request_id"])
    seen: dict[str, Any] = {}
    cursor, until = 0, time.monotonic() + 30
    while set(seen) != wanted and time.monotonic() < until:
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
        asked = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": []}
        _, answer, _ = call(port, "retrieve_futures", asked)
        assert answer["cursor"] >= cursor and not set(seen) & {c["request_id"] for c in answer["completions"]}
        cursor = answer["cursor"]
        seen |= {c["request_id"]: c for c in answer["completions"]}
    assert set(seen) == wanted and {c["state"] for c in seen.values()} == {"finished"}
    for request_id in wanted:
        found = proto.SampleResponse.FromString(result(port, request_id))
        assert [len(sequence.tokens) for sequence in found.sequences] == [12, 12]  # three tokens of four bytes


def test_an_abandoned_sample_is_cancelled(port: int) -> None:
    session = new_session(port)
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = call(port, "create_sampling_session", asked)[1]["sampling_session_id"]
    body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 64, "sampling_params": {"stop": []}}
    _, answer, _ = call(port, "asample", {**body, "prompt": {"chunks": [{"tokens": [1]}]}})
    assert call(port, "cancel_future", {"request_id": answer["request_id"]})[0] == 204
    told = result(port, answer["request_id"])
    assert isinstance(told, bytes) or "cancel" in told["error"]  # a fast machine may have been done


def test_a_held_poll_is_released_when_the_server_stops(backend: TinkerBackend, port: int) -> None:
    model = new_model(port)
    _, answer, _ = call(port, "optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}})
    app, told = create_app(backend, ApiKeys([]), ServerLimits(poll_seconds=60.0)), []
    loop: list[Any] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        import asyncio

        loop.append(asyncio.get_running_loop())
        await app(scope, receive, send)

    with serving(noting) as other:
        held = threading.Thread(
            target=lambda: told.append(call(other, "retrieve_future", {"request_id": answer["request_id"]})[0])
        )
        held.start()
        time.sleep(0.5)
        assert not told
        loop[-1].call_soon_threadsafe(app.polls.close)
        held.join(10)
    assert told == [408]


def test_an_internal_error_gets_an_immediate_response_with_its_id(
    port: int, backend: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend.sessions.is_broken = True
    try:
        status, answer, _ = call(port, "create_session", {"tags": []})
    finally:
        backend.sessions.is_broken = False
    assert status == 422 and answer["category"] == "server" and "RuntimeError" in answer["detail"]
    time.sleep(0.05)  # a line is written after its answer
    (fault,) = [r for r in caplog.records if r.exc_info]
    line = json.loads(JsonLines().format(fault))
    assert line["request_id"] == answer["request_id"] and "a fault of ours" in line["traceback"]
    assert "a fault of ours" not in json.dumps(answer)


def test_the_log_is_one_line_of_json_per_request_whatever_was_sent(port: int, tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log")
    handler.setFormatter(JsonLines())
    logging.getLogger("rlvr").addHandler(handler)
    try:
        call(port, "samplers/%0a%1b[2J%22")
        time.sleep(0.05)
    finally:
        logging.getLogger("rlvr").removeHandler(handler)
        handler.close()
    (line,) = (tmp_path / "log").read_bytes().splitlines()
    assert b"\x1b" not in line and json.loads(line)["status"] == 404
