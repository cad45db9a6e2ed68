"""Environments behind real servers of OpenEnv."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("websockets", reason="websockets is not installed")

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Trajectory
from rlvr.envs.ecosystems.json_server import MAX_BYTES
from rlvr.envs.ecosystems.openenv import MOST_TASKS, choose_action, list_choices
from rlvr.envs.ecosystems.openenv_server import OpenEnvServer
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from tests.kit.code_rows import chat_tokenizer
from tests.kit.ecosystems import find_interpreter
from tests.kit.open_server import TOOLS_TEMPLATE

TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE
SERVER = Path(__file__).parents[1] / "kit/ecosystems/openenv_server.py"


@contextmanager
def serving(kind: str, sessions: int) -> Iterator[str]:
    """The address of a server with an environment of tests/kit/ecosystems/openenv_server.py."""
    python = find_interpreter("openenv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(SERVER), kind, str(port), str(sessions)])
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def count() -> Iterator[str]:
    with serving("count", 4) as url:
        yield url


def source(url: str, **options: Any) -> Any:
    return apply_prompt_options(resolve_environment(f"openenv:{url}", **options), TEXT, PromptOptions())


def play(made: Any, *turns: str, task: Any = None, size: int = 1) -> list[Trajectory]:
    """`size` episodes at a time say these turns."""
    said = [list(TEXT.encode(turn, add_special_tokens=False)) for turn in turns]
    groups = open_groups(made, [task or made.heldout(1)[0]], size, TEXT, "g")
    sampler = ScriptedSamplingClient(TEXT, lambda i: [*said[(i // size) % len(said)], TEXT.eos_token_id])
    played = rollout(groups, sampler, SamplingParams(max_tokens=900), seed=1)
    score(played, resolve_reward(made.reward).plus_environment(made.environment_weight))
    return played


def task_that_begins_at(made: Any, number: int) -> Any:
    return next(task for task in made.heldout(None) if 1 + task.meta["seed"] % 3 == number)


def test_an_environment_of_text_is_played_turn_by_turn(count: str) -> None:
    made = source(count, prompt="Count down from ")
    (t,) = play(made, "1", "0", task=task_that_begins_at(made, 2))
    assert t.reward == 0.5 and t.metadata["stop/done"] == 1.0 and t.metadata["turns"] == 2.0
    assert "Count down from 2<|im_end|>" in TEXT.decode(t.prompt_tokens) and "go<|im_end|>" in t.response
    assert made.train(3, 0, "") == made.train(3, 0, "") and made.train(3, 0, "").id != made.train(3, 1, "").id


def test_more_episodes_than_sessions_wait_for_one(count: str) -> None:
    made = source(count)
    played = play(made, "7", task=task_that_begins_at(made, 2), size=11)
    assert [t.reward for t in played] == [0.0] * 11
    assert made.env(made.heldout(1)[0], TEXT).slots.most == 4, "the server's own number, below 16"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("boom", "EXECUTION_ERROR: it broke"),
        ("nan", "no step gave a reward"),
        ("long", "200,000 characters"),
    ],
)
def test_what_fails_is_an_error_and_no_zero(count: str, said: str, words: str) -> None:
    (t,) = play(source(count), said)
    assert t.reward is None and re.search(words, t.scores["environment"].detail or "")


def test_the_server_that_ends_is_an_error_of_its_episodes() -> None:
    with serving("count", 2) as url:
        made = source(url, seconds=20)
        played = play(made, "7", size=2)
    assert [t.reward for t in played] == [0.0, 0.0]
    played = play(made, "7", size=2)
    assert [t.reward for t in played] == [None, None]
    with pytest.raises(ValueError, match="is the server of the environment running"):
        source(url)


def test_the_tasks_of_the_server_are_train_and_test() -> None:
    with serving("tasks", 2) as url:
        made = source(url)
        assert [task.id for task in made.heldout(None)] == ["test-0", "test-1", "test-2"]
        assert sorted(made.train(5, index, "").id for index in range(5)) == [f"train-{n}" for n in range(5)]
        assert made.size("") == 5
        (t,) = play(made, "1", "0", task=made.heldout(None)[1])
        assert t.reward == 0.5 and "test 2" in TEXT.decode(t.prompt_tokens)
        play(made, "tasks 1000000000000")
        endless = source(url)
        assert endless.size("") == MOST_TASKS and endless.train(0, 7, "").id.startswith("train-")
        play(made, "tasks -1")
        with pytest.raises(ValueError, match="num_tasks=-1, expected a number"):
            source(url)
        play(made, "tasks 0")
        with pytest.raises(ValueError, match="has no tasks: its splits train, test are empty"):
            source(url)
        (t,) = play(made, "exit")
        assert t.reward is None and "closed the session in 'step'" in (t.scores["environment"].detail or "")


def test_an_environment_of_tools_is_played_by_calls() -> None:
    def use(digit: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': 'press', 'arguments': {'digit': digit}})}\n</tool_call>"

    with serving("tools", 2) as url:
        made = source(url, prompt="Open the safe.")
        (t,) = play(made, use(4), use(2), "open")
        assert t.reward == 1.0 and t.metadata["tool_calls"] == 2.0 and "pressed 4" in t.response
        assert '"press"' in TEXT.decode(t.prompt_tokens)
        (t,) = play(made, use("x"), use(4), "open")
        assert t.reward == 0.0 and "valid integer" in t.response and t.metadata["tool_errors"] == 1.0
        (t,) = play(made, use(7), use(4), "open")
        assert t.reward == 0.0 and "Unknown tool" in t.response, "a tool that is gone is for the policy to read"


def test_the_field_of_an_action_is_found_by_the_schema() -> None:
    """As pydantic writes it: text, or the one field that is needed, also where it refers to a list of choices."""
    text, number = {"type": "string"}, {"type": "integer"}
    moves = {"$defs": {"Move": {"enum": ["UP", "DOWN"], "type": "string"}}}
    for schema, field, choices in (
        ({"properties": {"message": text, "metadata": {"type": "object"}}}, "message", []),
        ({"properties": {"why": text, "column": number}, "required": ["column"]}, "column", []),
        ({**moves, "properties": {"move": {"$ref": "#/$defs/Move"}}, "required": ["move"]}, "move", ["UP", "DOWN"]),
    ):
        action = choose_action(schema, "http://x")
        assert action == {field: "{text}"} and list_choices(schema, action) == choices
    for schema in ({"properties": {"a": number, "b": number}, "required": ["a", "b"]}, {"properties": {}}):
        with pytest.raises(ValueError, match=r"env\.kwargs\.action="):
            choose_action(schema, "http://x")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("hello", "no JSON .*hello"),
        ("[1]", "expected type and data"),
        ('{"type": "observation", "data": {"reward": NaN}}', "NaN, which is no number"),
        ("x" * (MAX_BYTES + 1), "1009|too big"),
    ],
)
def test_nonsense_in_a_session_is_an_error_of_its_episode(answer: str, words: str) -> None:
    from websockets.sync.server import serve

    with serve(lambda socket: socket.send(answer) if socket.recv() else None, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.socket.getsockname()[1]
        connection = OpenEnvServer(f"http://127.0.0.1:{port}", 10).connect()
        with pytest.raises(EpisodeError, match=words):
            connection.ask("reset", {})
        connection.close()
        server.shutdown()
        thread.join()


def test_an_action_of_several_fields_is_asked_for(count: str) -> None:
    made = source(count, action={"message": "{text}"}, observation_field="text", reset={"episode_id": "mine"})
    (t,) = play(made, "7")
    assert t.reward == 0.0
    with pytest.raises(ValueError, match="did not answer 'reset' within 3 s"):
        source(count, seconds=3, reset={"hang": 5})
    with pytest.raises(ValueError, match="has no field 'words'; it has"):
        source(count, observation_field="words")
