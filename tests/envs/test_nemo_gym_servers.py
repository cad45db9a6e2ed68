"""Resources servers that NeMo-Gym has itself, unmodified, with the rows that come with them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Task, Trajectory
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from tests.kit.code_rows import chat_tokenizer
from tests.kit.ecosystems import find_interpreter
from tests.kit.open_server import TOOLS_TEMPLATE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE
SCRIPT = Path(__file__).parents[1] / "kit/ecosystems/nemo_gym_server.py"


@contextmanager
def serving(name: str) -> Iterator[Any]:
    """The environment of a server with the rows in `data/example.jsonl` beside it."""
    python = find_interpreter("nemo_gym")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen([python, str(SCRIPT), name, str(port)], env=own)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/openapi.json", timeout=5).read()
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.2)
        (rows,) = (
            Path(python).parents[1].glob(f"lib/python3.*/site-packages/resources_servers/{name}/data/example.jsonl")
        )
        made = resolve_environment(f"nemo_gym:http://127.0.0.1:{port}", rows=str(rows))
        yield apply_prompt_options(made, TEXT, PromptOptions())
    finally:
        process.terminate()
        process.wait()


def play(made: Any, task: Task, *turns: str) -> Trajectory:
    said = [[*TEXT.encode(turn, add_special_tokens=False), TEXT.eos_token_id] for turn in turns]
    sampler = ScriptedSamplingClient(TEXT, lambda i: said[i])
    (played,) = rollout(open_groups(made, [task], 1, TEXT, "g"), sampler, SamplingParams(max_tokens=900), seed=1)
    score([played], resolve_reward(made.reward))
    return played


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_choices_are_verified_by_the_server_of_one_turn() -> None:
    with serving("mcqa") as made:
        tasks = [*made.heldout(None), *(made.train(0, place, "") for place in range(made.size("")))]
        assert len(tasks) == 5
        for task in tasks:
            right = task.meta["row"]["expected_answer"]
            said = (f"\\boxed{{{right}}}", "\\boxed{Z}", right, "")
            assert [play(made, task, one).reward for one in said] == [1.0, 0.0, 0.0, 0.0]


def test_a_counter_of_a_session_is_reached_by_calls_of_tools() -> None:
    with serving("example_session_state_mgmt") as made:
        for task in [*made.heldout(1), made.train(0, 0, ""), made.train(0, 1, "")]:
            row = task.meta["row"]
            need = row["expected_count"] - row["initial_count"]
            right = play(made, task, call("increment_counter", count=need), call("get_counter_value"), "done")
            assert right.reward == 1.0 and f'{{"count": {row["expected_count"]}}}' in right.response
            assert play(made, task, call("increment_counter", count=need + 1), "done").reward == 0.0
            refused = play(made, task, call("increment_counter", count="much"), "done")
            assert refused.reward == 0.0 and "valid integer" in refused.response
