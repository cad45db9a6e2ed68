"""Rows of NeMo-Gym, verified by a server that answers as its resources servers do."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Trajectory
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE

TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE


class Server(BaseHTTPRequestHandler):
    """A resources server whose sessions are cookies, and whose verifier compares with `expected` of the row."""

    sessions = 0
    before: ClassVar[list[Any]] = []  # of the last response

    def do_GET(self) -> None:
        paths = {"/seed_session": {}, "/verify": {}, "/add": {}}
        self._answer({"paths": paths} if self.path == "/openapi.json" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/seed_session":
            Server.sessions += 1
            self._answer({}, cookie=f"session=number{Server.sessions}; path=/; httponly; samesite=lax")
            return
        if self.path == "/add":
            if not isinstance(body.get("number"), int):
                self.send_error(422, "number must be an integer")
            else:
                self._answer({"sum": 40 + body["number"]})
            return
        assert self.path == "/verify" and re.fullmatch(r"session=number\d+", self.headers["Cookie"])
        *before, message = body["response"]["output"]
        Server.before = before
        text = message["content"][0]["text"]
        if text == "break":
            self.send_error(500, "it broke")
        elif text == "nan":
            self._answer({**body, "reward": float("nan")})
        elif text == "none":
            self._answer(body)
        else:
            self._answer({**body, "reward": float(text == body["expected"]), "length": len(text)})

    def _answer(self, body: Any, cookie: str = "") -> None:
        raw = json.dumps(body).encode()
        self.send_response(200)
        if cookie:
            self.send_header("Set-Cookie", cookie)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def write_rows(path: Path, *given: Any, **fields: Any) -> str:
    rows = [
        {"responses_create_params": {"input": one} if not isinstance(one, dict) else one, "expected": "42", **fields}
        for one in given
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(url: str, **options: Any) -> Any:
    return apply_prompt_options(resolve_environment(f"nemo_gym:{url}", **options), TEXT, PromptOptions())


def play(made: Any, *turns: str, size: int = 1) -> list[Trajectory]:
    groups = open_groups(made, [made.train(0, 0, "")], size, TEXT, "g")
    said = [[*TEXT.encode(turn, add_special_tokens=False), TEXT.eos_token_id] for turn in turns]
    sampler = ScriptedSamplingClient(TEXT, lambda i: said[(i // size) % len(said)])
    played = rollout(groups, sampler, SamplingParams(max_tokens=900), seed=1)
    score(played, resolve_reward(made.reward).plus_environment(made.environment_weight))
    return played


def test_the_server_verifies_what_the_policy_says(tmp_path: Path, url: str) -> None:
    messages = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "6 times 7?"}]
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "7 times 6?"}]}]
    train, held = write_rows(tmp_path / "a.jsonl", messages), write_rows(tmp_path / "b.jsonl", "2 times 21?", parts)
    made = source(url, rows=train, heldout_rows=held)
    before = Server.sessions
    played = play(made, "42", size=3)
    assert [t.reward for t in played] == [1.0] * 3 and played[0].metadata["length"] == 2.0
    assert Server.sessions >= before + 3, "a session for each episode"
    prompt = TEXT.decode(played[0].prompt_tokens)
    assert "<|im_start|>system\nBe short." in prompt and "6 times 7?" in prompt
    assert [t.reward for t in play(made, "41")] == [0.0]
    assert sorted(task.prompt_text for task in made.heldout(None)) == ["2 times 21?", "7 times 6?"]


@pytest.mark.parametrize(
    ("said", "words"), [("break", "500"), ("nan", "NaN, which is no number"), ("none", "reward=None")]
)
def test_what_fails_is_an_error_and_no_zero(tmp_path: Path, url: str, said: str, words: str) -> None:
    (t,) = play(source(url, rows=write_rows(tmp_path / "a.jsonl", "a?", "b?", "c?")), said)
    assert t.reward is None and re.search(words, t.scores["environment"].detail or "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input": "a?", "tools": [{"type": "web_search"}]}, "tool None, expected functions"),
        ({"input": "a?", "tools": [{"name": "verify"}]}, "tool 'verify', expected functions"),
        ({"input": "a?", "tools": [{"name": "fly"}]}, "none of the tools fly of the rows"),
        ({"input": []}, "expected responses_create_params with input"),
        ([{"type": "function_call_output", "output": "x"}], "expected messages with a role and text"),
    ],
)
def test_rows_that_cannot_be_played_are_refused(tmp_path: Path, url: str, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        source(url, rows=write_rows(tmp_path / "a.jsonl", given, "b?"))


def test_rows_of_one_prompt_say_what_gives_held_out_ones(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match=r"one prompt only.* set heldout_rows, or heldout_fraction=1"):
        source(url, rows=write_rows(tmp_path / "a.jsonl", "a?", "a?"))


ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}},
}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_tools_of_a_row_are_called_at_the_server(tmp_path: Path, url: str) -> None:
    """What was said and called comes to the verifier in its order; rows without tools are of one turn."""
    rows = write_rows(tmp_path / "a.jsonl", {"input": "40 and 2?", "tools": [ADD]})
    held = write_rows(tmp_path / "b.jsonl", "6 times 7?")
    made = source(url, rows=rows, heldout_rows=held)
    (t,) = play(made, f"I add.{call('add', number=2)}", call("add", number="x"), "42")
    assert t.reward == 1.0 and t.metadata["tool_calls"] == 2.0 and t.metadata["tool_errors"] == 1.0
    assert '"add"' in TEXT.decode(t.prompt_tokens) and '{"sum": 42}' in t.response and "422" in t.response
    message, first, result, second, problem = Server.before
    assert message["content"][0]["text"].strip() == "I add." and json.loads(first["arguments"]) == {"number": 2}
    assert [one["type"] for one in Server.before[1:]] == ["function_call", "function_call_output"] * 2
    assert result["call_id"] == first["call_id"] != second["call_id"] == problem["call_id"]
    assert json.loads(result["output"]) == {"sum": 42} and "422" in problem["output"]
    groups = open_groups(made, made.heldout(1), 1, TEXT, "g")
    said = [*TEXT.encode("42", add_special_tokens=False), TEXT.eos_token_id]
    (t,) = rollout(groups, ScriptedSamplingClient(TEXT, lambda i: said), SamplingParams(max_tokens=900), seed=1)
    assert t.metadata["turns"] == 1.0 and Server.before == []


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is the server of the environment running"):
        source("http://127.0.0.1:9", rows=write_rows(tmp_path / "a.jsonl", "a?"))
