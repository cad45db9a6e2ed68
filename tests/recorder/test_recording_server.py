"""A recorder that stands alone: what programs may do with it, and that every answer was written before it was sent."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette", reason="the extra [serve] is not installed")
pytest.importorskip("transformers", reason="the extra [train] is not installed")

from rlvr.chat.dialects.forms import DialectError
from rlvr.chat.dialects.registry import DIALECTS
from rlvr.recorder.open_rollouts import MAX_WAITING
from rlvr.recorder.recording_server import MAX_ROLLOUTS
from rlvr.recorder.rows import make_rows
from tests.kit.recorder import Recorder, chat, post, read_message, recorder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Recorder]:
    with recorder(tmp_path / "calls.jsonl", "12", "13", "14") as made:
        yield made


def test_a_call_is_on_disk_when_the_client_has_its_answer(server: Recorder) -> None:
    rollout = server.open("task-1")
    for count in range(1, 4):
        answer = read_message(chat(rollout["openai_base_url"], "go", temperature=0.5, max_tokens=9))
        (recorded,) = server.recorded
        assert (recorded.id, recorded.group, len(recorded.calls)) == (rollout["id"], "task-1", count)
        last = recorded.calls[-1]
        assert last.choices[0].message["content"] == answer["content"] == f"{11 + count}"
        assert (
            last.prompt == server.sampler.prompts[-1]
            and last.policy == "script"
            and last.dialect in {one.name for one in DIALECTS.values()}
        )
        assert last.settings == {"temperature": 0.5, "max_tokens": 9} and last.began <= last.ended
        assert last.request["messages"] == [{"role": "user", "content": "go"}]
    assert "Bearer" not in server.path.read_text() and rollout["url"].rpartition("/")[2] not in server.path.read_text()


def test_a_stream_is_on_disk_before_its_first_event(server: Recorder) -> None:
    base = urlsplit(server.open()["openai_base_url"])
    connection = http.client.HTTPConnection(base.netloc, timeout=60)
    body = {"model": "any", "messages": [{"role": "user", "content": "go"}], "stream": True}
    connection.request("POST", f"{base.path}/chat/completions", json.dumps(body), {"content-type": "application/json"})
    with closing(connection), connection.getresponse() as answer:
        assert answer.status == 200 and answer.readline().startswith(b"data: ")
        assert len(server.recorded[0].calls) == 1
        assert answer.read().rstrip().endswith(b"data: [DONE]")


def test_every_dialect_names_the_model_that_is_recorded(server: Recorder) -> None:
    rollout = server.open()
    assert post(f"{rollout['openai_base_url']}/models")[1]["data"][0]["id"] == "acme/small"
    for dialect in DIALECTS.values():
        status, answer = post(f"{rollout['url']}{dialect.path}", b"[" * 200_000)
        assert status == 400 and "JSON" in json.dumps(answer), dialect.name


def test_a_conversation_goes_on_with_the_ids_that_were_sampled_and_rollouts_are_apart(server: Recorder) -> None:
    first, second = server.open("g"), server.open("g")
    message = read_message(chat(first["openai_base_url"], "go"))
    read_message(chat(first["openai_base_url"], "go", message, "on"))
    read_message(chat(second["openai_base_url"], "go", message, "on"))
    one, two = server.recorded
    (row,) = make_rows(one)
    assert row.num_action_tokens == sum(len(call.choices[0].tokens) for call in one.calls)
    assert len(make_rows(two)) == 1 and make_rows(two)[0].turn_starts == [0], "it never sampled what it claims"
    assert {one.group, two.group} == {"g"} and one.id != two.id


def test_rewards_are_written_and_the_last_counts(server: Recorder) -> None:
    rollout, silent = server.open(), server.open()
    read_message(chat(rollout["openai_base_url"], "go"))
    read_message(chat(silent["openai_base_url"], "go"))
    for reward in (True, 0.25):
        assert post(f"{rollout['url']}/reward", {"reward": reward, "source": "tests"})[0] == 200
    for wrong in ({}, {"reward": "1"}, {"reward": None}, {"reward": 1, "source": 3}, b'{"reward": NaN}', b"[]", b"{"):
        status, answer = post(f"{rollout['url']}/reward", wrong)
        assert status == 400 and answer["error"]["message"], wrong
    assert [one.reward for one in server.recorded] == [0.25, None]
    assert make_rows(server.recorded[1])[0].reward is None


def test_a_reward_of_a_call_is_that_of_its_branch(server: Recorder) -> None:
    rollout = server.open()
    base = rollout["openai_base_url"]
    said = read_message(chat(base, "go"))
    (_, left), (_, right) = (chat(base, "go", said, side) for side in ("left", "right"))
    for given in ({"reward": 0.5}, {"reward": 1, "call": left["id"]}, {"reward": 0, "call": right["id"]}):
        assert post(f"{rollout['url']}/reward", given) == (200, {**given, "reward": float(given["reward"])})
    status, answer = post(f"{rollout['url']}/reward", {"reward": 1, "call": "none"})
    assert status == 404 and "id 'none'" in answer["error"]["message"]
    assert post(f"{rollout['url']}/reward", {"reward": 1, "call": 3})[0] == 400
    (recorded,) = server.recorded
    assert (recorded.reward, recorded.call_rewards) == (0.5, {left["id"]: 1.0, right["id"]: 0.0})
    assert [row.turn_credits for row in make_rows(recorded)] == [[0.5, 1.0], [0.0]]


def test_a_rollout_that_is_closed_and_an_address_that_never_was_answer_410(server: Recorder) -> None:
    rollout = server.open()
    assert post(f"{rollout['url']}/close", {}) == (200, {"id": rollout["id"]})
    for url in (rollout["url"], f"{server.url}/r/nonsense"):
        for path, body in (*((dialect.path, {}) for dialect in DIALECTS.values()), ("/v1/models", None)):
            status, answer = post(f"{url}{path}", body)
            assert status == 410 and "rollout" in json.dumps(answer), path
        assert post(f"{url}/reward", {"reward": 1})[0] == post(f"{url}/close", {})[0] == 410
    assert server.recorded == []


def in_background(function: Any, *words: Any, **more: Any) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(function(*words, **more)))
    thread.start()
    return thread, answers


def wait_for_call(server: Recorder, count: int = 1) -> None:
    deadline = time.monotonic() + 30
    while len(server.sampler.prompts) < count:
        assert time.monotonic() < deadline, "no call arrived"
        time.sleep(0.01)


def test_a_call_that_was_refused_since_its_rollout_was_closed_is_not_recorded(server: Recorder) -> None:
    server.wait, rollout = 1.0, server.open()
    thread, answers = in_background(chat, rollout["openai_base_url"], "go")
    wait_for_call(server)
    assert post(f"{rollout['url']}/close", {})[0] == 200
    thread.join()
    assert answers[0][0] == 410
    server.wait = 0.0
    read_message(chat(server.open()["openai_base_url"], "go"))
    assert len(server.recorded) == 1 and len(server.recorded[0].calls) == 1


def test_a_client_that_leaves_is_not_recorded_and_others_are_answered(server: Recorder) -> None:
    server.wait, rollout = 1.5, server.open()
    base = urlsplit(rollout["openai_base_url"])
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": "gone"}]}).encode()
    with socket.create_connection((base.hostname, base.port)) as connection:
        head = f"POST {base.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        wait_for_call(server)
    time.sleep(0.6)  # the server looks twice a second
    server.wait = 0.0
    assert read_message(chat(rollout["openai_base_url"], "go"))["content"] == "13"
    (recorded,) = server.recorded
    assert [one.request["messages"][0]["content"] for one in recorded.calls] == ["go"]


def test_a_body_of_100_megabytes_is_refused_and_the_server_goes_on(server: Recorder) -> None:
    rollout = server.open()
    for path in ("v1/chat/completions", "reward"):
        base = urlsplit(f"{rollout['url']}/{path}")
        with socket.create_connection((base.hostname, base.port), timeout=60) as connection:
            connection.sendall(f"POST {base.path} HTTP/1.1\r\nhost: x\r\ncontent-length: {100 << 20}\r\n\r\n".encode())
            answer = b""
            for _ in range(100):
                try:
                    connection.sendall(b" " * (1 << 20))
                except OSError:  # it closed the connection
                    break
                connection.setblocking(False)
                try:
                    answer += connection.recv(1 << 16)
                except BlockingIOError:
                    pass
                finally:
                    connection.settimeout(60)
                if answer:
                    break
            assert b" 413 " in (answer or connection.recv(1 << 16)), path
    read_message(chat(rollout["openai_base_url"], "go"))
    assert len(server.recorded[0].calls) == 1


def test_too_many_rollouts_are_refused_until_one_is_closed(server: Recorder) -> None:
    first = server.open()
    for _ in range(MAX_ROLLOUTS - 1):
        server.server.open()
    with pytest.raises(DialectError, match="close some"):
        server.server.open()
    status, answer = post(f"{server.url}/rollouts", {})
    assert status == 429 and "close some" in answer["error"]["message"]
    assert post(f"{first['url']}/close", {})[0] == 200
    assert len({server.open()["id"], first["id"]}) == 2


def test_too_many_calls_at_once_and_too_many_choices_are_refused(server: Recorder) -> None:
    server.wait, rollout = 0.05, server.open()
    status, answer = chat(rollout["openai_base_url"], "go", n=65)
    assert status == 400 and "64" in answer["error"]["message"]
    calls = [in_background(chat, rollout["openai_base_url"], f"go {i}") for i in range(MAX_WAITING + 16)]
    for thread, _ in calls:
        thread.join()
    statuses = [answers[0][0] for _, answers in calls]
    assert set(statuses) <= {200, 429}
    assert len(server.recorded[0].calls) == statuses.count(200), "each answer is there, and nothing else"


@pytest.mark.parametrize("group", [3, "g" * 501])
def test_a_group_is_a_short_text(server: Recorder, group: Any) -> None:
    status, answer = post(f"{server.url}/rollouts", {"group": group})
    assert status == 400 and "group" in answer["error"]["message"]


def test_several_choices_are_one_call(server: Recorder) -> None:
    status, answer = chat(server.open()["openai_base_url"], "go", n=3)
    assert status == 200 and [one["message"]["content"] for one in answer["choices"]] == ["12", "13", "14"]
    (call,) = server.recorded[0].calls
    assert [one.message["content"] for one in call.choices] == ["12", "13", "14"]


def test_an_engine_that_fails_and_a_disk_that_is_full_are_errors_of_the_call(server: Recorder) -> None:
    rollout = server.open()
    server.turns[0] = "FAIL"
    status, answer = chat(rollout["openai_base_url"], "go")
    assert status == 500 and "out of memory" in answer["error"]["message"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (server.path.stat().st_size + 20, hard))
    try:
        assert chat(rollout["openai_base_url"], "go")[0] == 500
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert server.recorded == []
    assert read_message(chat(rollout["openai_base_url"], "go"))["content"] == "14"
    assert len(server.recorded[0].calls) == 1


def test_an_empty_call_and_an_unknown_setting_are_refused_by_name(server: Recorder) -> None:
    rollout = server.open()
    status, answer = chat(rollout["openai_base_url"])
    assert status == 400 and "messages" in answer["error"]["message"]
    status, answer = chat(rollout["openai_base_url"], "go", logit_bias={"1": 5})
    assert status == 400 and "logit_bias" in answer["error"]["message"]
    assert server.recorded == []
