"""Rollouts of agents on the engine server: an address of their own, recorded for their owner alone."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")

from rlvr.chat.dialects.registry import DIALECTS
from rlvr.core.messages import ModelInput
from rlvr.recorder.recording import read_recording
from rlvr.recorder.rows import make_rows
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from tests.kit.open_server import NAME, events, request, text_engine
from tests.kit.tinker_server import serving

KEYS = ["tml-first-owner-key", "tml-second-owner-key"]
FIRST, SECOND = ({"Authorization": f"Bearer {key}"} for key in KEYS)


@contextmanager
def server(state: Path, engine: Any, **limits: Any) -> Iterator[int]:
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
    from rlvr.tinker_server.http.app import create_app
    from rlvr.web.auth import ApiKeys

    chosen = ServerLimits(**limits)
    backend = TinkerBackend({NAME: engine}, state, limits=chosen)
    try:
        with serving(create_app(backend, ApiKeys(KEYS), chosen)) as port:
            yield port
    finally:
        backend.close()


@pytest.fixture(scope="module")
def engine() -> Any:
    return text_engine()


def open_rollout(port: int, **more: Any) -> tuple[dict[str, Any], str]:
    """(what the server says, the path of the address)."""
    status, made = request(port, "/rollouts", more, **FIRST)
    assert status == 200, made
    return made, made["url"].partition(f":{port}")[2]


def chat(port: int, path: str, *messages: Any, **more: Any) -> tuple[int, Any]:
    read = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
    body = {"model": "any", "messages": read, "max_tokens": 6, **more}
    return request(port, f"{path}/v1/chat/completions", body, Authorization="Bearer anything")


def message_of(answer: tuple[int, Any]) -> Any:
    assert answer[0] == 200, answer
    return answer[1]["choices"][0]["message"]


def call(port: int, method: str, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def read(port: int, name: str, tmp_path: Path) -> Any:
    status, text = call(port, "GET", f"/rollouts/{name}", **FIRST)
    assert status == 200, text
    path = tmp_path / "read.jsonl"
    path.write_text(text)
    return read_recording(path)


def test_an_agent_is_recorded_at_its_address_with_any_key(tmp_path: Path, engine: Any) -> None:
    with server(tmp_path / "state", engine) as port:
        made, path = open_rollout(port, group="task-1")
        assert made["model"] == NAME and made["expires"] > time.time() + 80_000
        message = message_of(chat(port, path, "go", seed=3))
        assert len(read(port, made["id"], tmp_path).rollouts[0].calls) == 1, "written before it was answered"
        said = events(chat(port, path, "go", message, "on", stream=True)[1])
        assert said[0]["choices"]
        assert request(port, f"{path}/reward", {"reward": 0.5})[0] == 200
        named = read(port, made["id"], tmp_path).rollouts[0].calls[1].id
        assert request(port, f"{path}/reward", {"reward": 1, "call": named})[1]["call"] == named
        assert request(port, f"{path}/reward", {"reward": 1, "call": "none"})[0] == 404
        assert request(port, f"{path}/v1/models")[1]["data"][0]["id"] == NAME
        recording = read(port, made["id"], tmp_path)
        (rollout,) = recording.rollouts
        assert (recording.model, rollout.id, rollout.group, rollout.reward) == (NAME, made["id"], "task-1", 0.5)
        (row,) = make_rows(rollout)
        assert row.turn_credits == [1.0, 1.0]
        own = engine.logprobs(engine.base_snapshot(), ModelInput(row.full_tokens)).result()[len(row.prompt_tokens) :]
        expected = [value if is_sampled else 0.0 for value, is_sampled in zip(own, row.action_mask, strict=True)]
        assert row.logprobs == pytest.approx(expected, abs=1e-4)
        assert "anything" not in "".join(one.read_text() for one in (tmp_path / "state").rglob("*.jsonl"))


def test_a_call_that_names_no_most_tokens_may_fill_what_the_context_has_left(tmp_path: Path, engine: Any) -> None:
    with server(tmp_path / "state", engine) as port:
        made, path = open_rollout(port)
        message_of(chat(port, path, "go", max_tokens=None))
        (call_read,) = read(port, made["id"], tmp_path).rollouts[0].calls
        (choice,) = call_read.choices
        room = engine.model.context - len(call_read.prompt)
        assert 6 < len(choice.tokens) <= room, "more than the calls of the other tests ask for"


def test_opening_needs_a_key_and_no_owner_reads_anothers(tmp_path: Path, engine: Any) -> None:
    with server(tmp_path / "state", engine) as port:
        assert request(port, "/rollouts", {})[0] == 401
        made, path = open_rollout(port)
        name = made["id"]
        message_of(chat(port, path, "go"))
        for method in ("GET", "DELETE"):
            assert call(port, method, f"/rollouts/{name}")[0] == 401
            status, answer = call(port, method, f"/rollouts/{name}", **SECOND)
            assert status == 404 and "no rollout" in answer
        for wrong in ("..%2F..%2Frecords", "0" * 20, f"..%2F{name}"):
            assert request(port, f"/rollouts/{wrong}", **FIRST)[0] == 404
        assert request(port, "/rollouts", {"model": "nothing"}, **FIRST)[0] in (400, 404)
        assert read(port, name, tmp_path).rollouts


def test_a_closed_an_expired_and_a_deleted_rollout_answer_410(tmp_path: Path, engine: Any) -> None:
    with server(tmp_path / "state", engine) as port:
        made, path = open_rollout(port)
        message_of(chat(port, path, "go"))
        assert request(port, f"{path}/close", {}) == (200, {"id": made["id"]})
        gone = [path, "/r/nonsense"]
        deleted, path = open_rollout(port)
        assert call(port, "DELETE", f"/rollouts/{deleted['id']}", **FIRST)[0] == 200
        assert request(port, f"/rollouts/{deleted['id']}", **FIRST)[0] == 404
        for address in [*gone, path]:
            for dialect in DIALECTS.values():
                assert request(port, f"{address}{dialect.path}", {})[0] == 410
            assert request(port, f"{address}/reward", {"reward": 1})[0] == 410
            assert request(port, f"{address}/v1/models")[0] == request(port, f"{address}/close", {})[0] == 410
        assert read(port, made["id"], tmp_path).rollouts, "what was recorded stays"
    with server(tmp_path / "state", engine, rollout_seconds=0.5) as port:
        assert read(port, made["id"], tmp_path).rollouts, "after a restart too"
        made, path = open_rollout(port)
        time.sleep(0.6)
        assert chat(port, path, "go")[0] == 410


def test_an_owner_has_limits(tmp_path: Path, engine: Any) -> None:
    with server(tmp_path / "state", engine, owner_rollouts=2, owner_recorded_bytes=2_000) as port:
        made, path = open_rollout(port)
        open_rollout(port)
        status, answer = request(port, "/rollouts", {}, **FIRST)
        assert status == 429 and "owner_rollouts" in json.dumps(answer)
        assert request(port, "/rollouts", {}, **SECOND)[0] == 200
        statuses = [chat(port, path, f"go {'x' * 300} {number}")[0] for number in range(6)]
        assert statuses[0] == 200 and statuses[-1] == 413
        assert call(port, "DELETE", f"/rollouts/{made['id']}", **FIRST)[0] == 200
        _, path = open_rollout(port)
        message_of(chat(port, path, "go"))


def test_what_is_wrong_is_named(tmp_path: Path, engine: Any) -> None:
    with server(tmp_path / "state", engine) as port:
        made, path = open_rollout(port)
        for more, words in (({"logit_bias": {"1": 2}}, "logit_bias"), ({"max_tokens": 100_000}, "max_tokens")):
            status, answer = chat(port, path, "go", **more)
            assert status == 400 and words in answer["error"]["message"]
        status, answer = chat(port, path, "go " * 3_000)
        assert status == 400 and "context" in answer["error"]["message"]
        for wrong in ({}, {"reward": "x"}, b'{"reward": NaN}'):
            assert request(port, f"{path}/reward", wrong)[0] == 400
        assert read(port, made["id"], tmp_path).rollouts == []
