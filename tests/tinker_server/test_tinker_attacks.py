"""The Tinker server against those who have a key and mean harm, or only ask for too much: others go on as before."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("google.protobuf", reason="the extra [serve] is not installed")

from rlvr.core.messages import AdamParams, ModelInput, SamplingParams
from rlvr.core.tensors import TensorData
from rlvr.tinker_server.backend.request_futures import JsonResult, Pending, RequestFailure
from rlvr.tinker_server.backend.runs.run_operations import OptimStep
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.http.app import create_app
from rlvr.tinker_server.protocol import proto
from rlvr.tinker_server.protocol.errors import UserError
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.tinker_server.protocol.wire import BadRequest, parse_forward_backward
from rlvr.web.auth import ApiKeys, owner_of
from rlvr.web.logs import JsonLines
from tests.kit.tinker_backend import (
    ADAM,
    MODEL,
    BackendClient,
    ServerFactory,
    assert_failed,
    counters,
    forward_backward,
    sampled_tokens,
    tiny_engine,
)
from tests.kit.tinker_server import serving
from tests.kit.tiny import data, with_inputs

KEYS = ["tml-anna-has-a-key", "tml-bob-has-another"]
LIMITS = ServerLimits(max_body=5 << 20, poll_seconds=0.3)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[ServerFactory]:
    servers = ServerFactory(tmp_path / "state")
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    backend = TinkerBackend({MODEL: tiny_engine()}, tmp_path_factory.mktemp("state"))
    with serving(create_app(backend, ApiKeys(KEYS), LIMITS)) as number:
        yield number
    backend.close()


def call(port: int, path: str, body: Any = None, key: str = KEYS[0], **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    text = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
    given = {
        "X-API-Key": key,
        "Content-Type": "application/json",
        **{k.replace("_", "-"): v for k, v in headers.items()},
    }
    connection.request("GET" if text is None else "POST", f"/api/v1/{path}", text, given)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if "json" in (answer.getheader("content-type") or "") else content


def result(port: int, request_id: str, key: str = KEYS[0]) -> Any:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        status, answer = call(port, "retrieve_future", {"request_id": request_id}, key)
        if status != 408:
            return answer
    raise AssertionError(f"no answer to {request_id}")


def sampler(port: int, key: str = KEYS[0]) -> str:
    session = call(port, "create_session", {"tags": []}, key)[1]["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    return call(port, "create_sampling_session", asked, key)[1]["sampling_session_id"]


def asample(port: int, session: str, seq: int, key: str = KEYS[0], **more: Any) -> tuple[int, Any]:
    params = {"max_tokens": 3, "stop": [], **more.pop("params", {})}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    asked = {"sampling_session_id": session, "seq_id": seq, "prompt": prompt, "sampling_params": params, **more}
    return call(port, "asample", asked, key)


# One owner's load is not another's


def test_many_samples_of_one_owner_leave_room_for_another_owner(start: ServerFactory) -> None:
    backend = start(engine=tiny_engine(max_rows=8))
    anna, bob = BackendClient(backend), BackendClient(backend, "bob")
    long = SamplingParams(max_tokens=150, stop=[], seed=1)
    base = backend.sampling.create_sampler("anna", anna.session, 1, MODEL)
    flood = [backend.sampling.sample("anna", base, seq, ModelInput([1, 2]), 6, long)[0] for seq in range(40)]
    own = backend.sampling.create_sampler("bob", bob.session, 1, MODEL)
    short = backend.sampling.sample("bob", own, 1, ModelInput([1, 2]), 1, SamplingParams(max_tokens=2, stop=[]))[0]
    assert len(sampled_tokens(bob.wait(short))[0]) == 2
    waiting = [isinstance(asyncio.run(backend.result("anna", request, 0)), Pending) for request in flood]
    assert sum(waiting) > 30
    for request in flood:
        backend.sampling.cancel("anna", request)


def test_one_request_does_not_take_every_row() -> None:
    """Nor does what is left of it stand before others; alone it is answered whole all the same."""
    engine = tiny_engine(max_rows=8, one_request=0.75)
    base = engine.base_snapshot()
    large = engine.enqueue(base, ModelInput([1, 2]), 30, SamplingParams(max_tokens=20, stop=[], seed=1))
    engine.advance()
    small = engine.enqueue(base, ModelInput([1, 2]), 2, SamplingParams(max_tokens=3, stop=[], seed=2))
    for _ in range(3):
        engine.advance()
    assert small.is_done and not large.is_done
    while not engine.idle:
        engine.advance()
    alone = tiny_engine().sample(base, ModelInput([1, 2]), 30, SamplingParams(max_tokens=20, stop=[], seed=1)).result()
    assert [s.tokens for s in large.response().sequences] == [s.tokens for s in alone.sequences]


def test_the_next_free_row_is_for_a_request_without_one() -> None:
    """Two large requests hold all rows, and wait with most of their completions before a small one."""
    engine = tiny_engine(max_rows=4, one_request=0.5)
    base = engine.base_snapshot()
    how = SamplingParams(max_tokens=20, stop=[], seed=1)
    large = [engine.enqueue(base, ModelInput([1, 2]), 12, how) for _ in range(2)]
    engine.advance()
    small = engine.enqueue(base, ModelInput([1, 2]), 1, SamplingParams(max_tokens=3, stop=[], seed=2))
    while not small.is_done:
        engine.advance()
    assert max(len(request.finished) for request in large) <= 4


def test_an_owner_s_request_is_sampled_beside_those_of_others_that_fill_the_cache(start: ServerFactory) -> None:
    """Room for four rows of the longest request; each of three owners asks for far more, again and again."""
    backend = start(engine=tiny_engine(max_rows=8, cache_tokens=4 * 152, one_request=0.5))
    bob, greedy = BackendClient(backend, "bob"), [BackendClient(backend, f"greedy-{i}") for i in range(3)]
    long = SamplingParams(max_tokens=150, stop=[], seed=1)
    flood: list[tuple[str, str]] = []
    for client in greedy:
        base = backend.sampling.create_sampler(client.owner, client.session, 1, MODEL)
        for seq in range(4):
            asked = backend.sampling.sample(client.owner, base, seq, ModelInput([1, 2]), 40, long)[0]
            flood.append((client.owner, asked))
    own = backend.sampling.create_sampler("bob", bob.session, 1, MODEL)
    for seq in range(3):
        short = SamplingParams(max_tokens=2, stop=[], seed=seq)
        request = backend.sampling.sample("bob", own, seq, ModelInput([1, 2]), 1, short)[0]
        assert len(sampled_tokens(bob.wait(request))[0]) == 2
    waiting = [isinstance(asyncio.run(backend.result(owner, request, 0)), Pending) for owner, request in flood]
    assert all(waiting)
    for owner, request in flood:
        backend.sampling.cancel(owner, request)


def test_an_owner_with_many_runs_gets_as_many_turns_as_one_with_one(start: ServerFactory) -> None:
    backend = start(engine=tiny_engine(micro_tokens=18))
    clients = [BackendClient(backend) for _ in range(9)]
    bob = BackendClient(backend, "bob")
    for client in (*clients, bob):
        client.make()
    clients[0].send(1, forward_backward(clients[0].run, 1, data(lengths=[9] * 400)))  # while the others queue up
    many = [client.gradients(seq, seed=seq) for client in clients[1:] for seq in (1, 2, 3, 4)]
    last = [bob.gradients(seq, seed=seq) for seq in (1, 2, 3)][-1]
    bob.wait(last)
    assert sum(isinstance(asyncio.run(backend.result("anna", request, 0)), Pending) for request in many) > 20


def test_a_setting_that_overflows_is_refused_and_other_samples_go_on(port: int) -> None:
    theirs = sampler(port, KEYS[1])
    status, long = asample(port, theirs, 1, KEYS[1], num_samples=20, params={"max_tokens": 200})
    assert status == 200
    mine = sampler(port)
    for seq, wrong in enumerate(({"top_k": 10**30}, {"max_tokens": 10**30}, {"stop": ["\ud800"]}, {"top_k": 2**63})):
        status, answer = asample(port, mine, seq, params=wrong)
        assert status == 400 and answer["category"] == "user", answer
    status, most = asample(port, mine, 9, params={"top_k": 2**63 - 1, "seed": 10**400})
    assert status == 200 and isinstance(result(port, most["request_id"]), bytes)
    assert isinstance(result(port, long["request_id"], KEYS[1]), bytes)


def test_a_failed_row_leaves_nothing_for_the_next_one() -> None:
    """Attention gives a masked place the weight 0, and 0 x nan is nan."""
    engine = tiny_engine()
    base = engine.base_snapshot()

    def ask(prompt: list[int], count: int, tokens: int) -> Any:
        return engine.enqueue(base, ModelInput(prompt), count, SamplingParams(max_tokens=tokens, stop=[], seed=1))

    broken = ask([1, 2, 3] * 6, 3, 20)
    for _ in range(12):
        engine.advance()
    with torch.inference_mode():
        for layer in engine._sampler.cache.layers:  # as an adapter leaves it whose values overflow
            layer.values[:, :, 3:] = float("nan")
    while not broken.is_done:
        engine.advance()
    assert "not finite" in str(broken.error)
    others = [ask([1, 2, 3], 2, 20), ask([1, 2, 3] * 6, 2, 3)]
    while not engine.idle:
        engine.advance()
    assert [other.error for other in others] == [None, None]


def test_too_many_stops_and_likeliest_tokens_are_refused(port: int, start: ServerFactory) -> None:
    session = sampler(port)
    for wrong in ({"stop": ["x"] * 2_000}, {"stop": "x" * 2_000}, {"stop": list(range(2_000))}):
        assert asample(port, session, 1, params=wrong)[0] == 400
    backend = start(request_logprobs=100)
    client = BackendClient(backend)
    base = backend.sampling.create_sampler("anna", client.session, 1, MODEL)
    prompt, asked = ModelInput([1] * 30), SamplingParams(max_tokens=10)
    for wants in ({"topk_prompt": 4}, {"topk_sample": 3}, {"topk_sample": 200}):
        with pytest.raises(UserError, match="expected at most"):
            backend.sampling.sample("anna", base, 1, prompt, 4, asked, wants)
    assert sampled_tokens(
        client.wait(backend.sampling.sample("anna", base, 1, prompt, 4, asked, {"topk_sample": 2})[0])
    )


# Bodies


def test_a_large_body_is_accepted_for_gradients_only(port: int) -> None:
    """Reading JSON holds up everybody."""
    large = json.dumps({"tags": [], "user_metadata": {"a": "x" * LIMITS.max_json}})
    status, answer = call(port, "create_session", large)
    assert status == 413 and f"{LIMITS.max_json:,}" in answer["detail"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)  # and one that does not say its size
    pieces = (large[i : i + 65_536].encode() for i in range(0, len(large), 65_536))
    headers = {"X-API-Key": KEYS[0], "Content-Type": "application/json"}
    connection.request("POST", "/api/v1/create_session", pieces, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    status, answer = call(port, "forward_backward", b"x" * (LIMITS.max_json + 1), Content_Type="application/x-protobuf")
    assert status == 400


def test_bodies_arriving_at_once_are_limited_per_owner(port: int) -> None:
    def open_request(key: str) -> socket.socket:
        sending = socket.create_connection(("127.0.0.1", port))
        size = LIMITS.max_body
        head = f"POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nContent-Length: {size}\r\n"
        sending.sendall(f"{head}Content-Type: application/x-protobuf\r\n\r\n".encode() + b"x" * (size - 1))
        return sending

    slow = [open_request(KEYS[0]) for _ in range(LIMITS.arriving_bodies)]
    try:
        until = time.monotonic() + 20
        while call(port, "create_session", {"tags": [], "display_name": "x" * 400})[0] != 429:
            assert time.monotonic() < until  # all of them has arrived by then
            for refused in select.select(slow, [], [], 0)[0]:  # its last bytes came while that request was there
                refused.close()
                slow[slow.index(refused)] = open_request(KEYS[0])
        assert call(port, "create_session", {"tags": []}, KEYS[1])[0] == 200
    finally:
        for sending in slow:
            sending.close()
    until = time.monotonic() + 20
    while call(port, "create_session", {"tags": []})[0] != 200:  # what was held is given back
        assert time.monotonic() < until


def test_fields_without_content_are_counted_over_all_rows() -> None:
    """Each takes microseconds, and a compressed body of kilobytes could hold millions."""
    request = proto.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = proto.Datum()
    for _ in range(1_000):
        datum.model_input.add().encoded_text.tokens = b""
    request.data.extend([datum.SerializeToString()] * 200)
    with pytest.raises(BadRequest, match=r"data\[131\].*fields"):
        parse_forward_backward(request.SerializeToString())


def test_an_error_does_not_quote_an_endless_name() -> None:
    for wrong in (
        {"loss_fn": "x" * 10_000},
        {"loss_fn": "ppo", "loss_fn_config": {"x" * 10_000: 1.0}},
    ):
        with pytest.raises(BadRequest) as told:
            parse_forward_backward(proto.ForwardBackwardRequest(model_id="m", seq_id=1, **wrong).SerializeToString())
        assert len(str(told.value)) < 300 and told.value.seq_id == 1


# Numbers


def test_a_step_that_leaves_weights_not_finite_is_undone(start: ServerFactory, tmp_path: Path) -> None:
    hashes: list[str] = []
    for bad in (False, True):
        client = BackendClient(backend := start())
        client.make()
        client.wait(client.gradients(1))
        if bad:
            for seq, adam in ((2, AdamParams(eps=1e-60)), (3, AdamParams(learning_rate=1e30, weight_decay=1e30))):
                assert_failed(client.do(seq, OptimStep(adam)), "not finite", "taken back")
        assert isinstance(client.do(4 if bad else 2, OptimStep(ADAM)), JsonResult)
        client.save_weights(5 if bad else 3, "after")
        hashes.append(counters(tmp_path / "state", client.run, "after")["weights_sha256"])
        backend.finish_session("anna", client.session, "success")
    assert hashes[0] == hashes[1]


def test_a_gradient_whose_norm_overflows_is_refused_and_the_run_goes_on(start: ServerFactory, tmp_path: Path) -> None:
    """Every number of it is finite, so it would be kept, and no step could ever be taken."""
    hashes: list[str] = []
    for bad in (False, True):
        client = BackendClient(backend := start())
        client.make()
        client.wait(client.gradients(1))
        if bad:
            row = data()[0]
            advantages = [3e37] * row.model_input.length
            huge = forward_backward(client.run, 2, [with_inputs(row, advantages=TensorData.of(advantages))], "ppo")
            assert_failed(client.do(2, huge), "not finite", "before this request are kept")
        assert isinstance(client.do(3 if bad else 2, OptimStep(ADAM)), JsonResult)
        client.save_weights(4 if bad else 3, "after")
        hashes.append(counters(tmp_path / "state", client.run, "after")["weights_sha256"])
        backend.finish_session("anna", client.session, "success")
    assert hashes[0] == hashes[1]


def test_an_invalid_number_uses_up_its_seq_id(port: int) -> None:
    session = call(port, "create_session", {"tags": []})[1]["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 2, "seed": 2**70}}
    model = call(port, "create_model", asked)[1]["model_id"]
    for seq, rate in enumerate((str(10**400), "1e400", "NaN", "1e31"), 1):
        told = call(
            port,
            "optim_step",
            f'{{"model_id": "{model}", "seq_id": {seq}, "adam_params": {{"learning_rate": {rate}}}}}',
        )
        assert told[0] == 200
        assert "expected a finite number" in result(port, told[1]["request_id"])["error"]


# Questions that are none of the server's faults


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"training_runs?offset={10**30}&limit={10**30}", 200),
        (f"sessions?offset={2**63}", 200),
        ("training_runs/%20/checkpoints/external_weights/x/external_weights_urls", 400),
        ("training_runs/x/checkpoints/external_weights/%00/external_weights_urls", 400),
        ("external/%C3%A9/1/o/r/n/f", 403),
        ("training_runs/%00", 404),
    ],
)
def test_unusual_requests_get_a_response(port: int, path: str, status: int) -> None:
    found, answer = call(port, path)
    assert found == status and (found == 200 or answer["category"] == "user")


def test_metadata_that_cannot_be_sent_back_is_refused(port: int) -> None:
    deep = '{"a":' * 300 + "1" + "}" * 300
    assert call(port, "create_session", f'{{"user_metadata": {deep}}}')[0] == 400
    status, answer = call(port, "create_session", '{"user_metadata": {"a": {"b": [NaN, 1]}}}')
    assert status == 200 and call(port, f"sessions/{answer['session_id']}")[0] == 200


def test_the_address_of_a_download_is_not_logged(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rlvr"):
        call(port, f"external/secret-signature/9/{owner_of(KEYS[0])}/run/name/file")
        time.sleep(0.05)  # a line is written after its answer
    lines = "\n".join(JsonLines().format(record) for record in caplog.records)
    assert "/run/name/file" in lines and "secret-signature" not in lines


# Folders


def test_a_damaged_list_of_samples_is_replaced(start: ServerFactory, tmp_path: Path) -> None:
    client = BackendClient(start())
    client.make()
    start.close()
    for part in ("", "-wal"):
        (tmp_path / f"state/samples.db{part}").write_bytes(b"no database" * 1_000)
    again = BackendClient(start(), session=client.session)
    assert not isinstance(again.wait(again.gradients(1)), RequestFailure) and not isinstance(
        again.wait(again.step(2)), RequestFailure
    )


def test_unreadable_records_are_reported(start: ServerFactory, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/records.db").write_bytes(b"no database" * 1_000)
    with pytest.raises(ValueError, match=r"records\.db.* use another folder"):
        start()


def test_other_users_cannot_read_the_state(start: ServerFactory, tmp_path: Path) -> None:
    start()
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0
