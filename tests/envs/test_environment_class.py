"""Classes by TRL's contract as tools: an instance for each episode, `reset`, public methods, `get_reward`."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import environments_of_tests as given
import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.futures import run_to_end
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Task, Trajectory
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.registry import resolve_environment
from rlvr.envs.tools.environment_class import EnvironmentClass
from rlvr.envs.tools.tool import Toolbox
from rlvr.envs.tools.tool_env import ToolEnv
from rlvr.envs.tools.tool_source import find_call_format
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE

TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Open safe {n}.", "answer": "35"}) + "\n" for n in range(4)))
    return str(path)


def source(rows: str, name: str, chat: str = "auto", **options: Any) -> Any:
    made = resolve_environment(
        "tools",
        inner="dataset",
        inner_kwargs={"path": rows, "reward": "exact_match"},
        environment=f"environments_of_tests:{name}",
        **options,
    )
    return apply_prompt_options(made, TEXT, PromptOptions(chat=chat))


def use(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(made: Any, *turns: str, size: int = 1) -> list[Trajectory]:
    """Each of the `size` episodes says these turns."""

    def answer(i: int) -> list[int]:
        return [*TEXT.encode(turns[i // size], add_special_tokens=False), TEXT.eos_token_id]

    groups = open_groups(made, [made.train(0, 0, "")], size, TEXT, "g")
    return rollout(groups, ScriptedSamplingClient(TEXT, answer), SamplingParams(max_tokens=900), seed=1)


def results(t: Trajectory) -> list[str]:
    """What the tools said."""
    text = TEXT.decode([token for token, mask in zip(t.response_tokens, t.action_mask, strict=True) if not mask])
    return [part.partition("<|im_end|>")[0] for part in text.split("<|im_start|>tool\n")[1:]]


def test_an_episode_has_a_state_and_a_reward(rows: str) -> None:
    made = source(rows, "Safe")
    (t,) = play(made, use("press", digit=4), use("clear"), use("press", digit=3) + use("press", digit=5), "35")
    assert results(t) == ["pressed 4, closed", "pressed , closed", "pressed 3, closed", "pressed 35, open"]
    read = TEXT.decode(t.prompt_tokens)
    assert "The code has 2 digits.<|im_end|>" in read and '"press"' in read
    assert not any(name in read for name in ("get_reward", "reset", "_state"))
    assert t.reward == 1.0 and made.environment_weight == 1.0
    score([t], resolve_reward("exact_match").plus_environment(made.environment_weight))
    assert t.reward == 2.0, "of the verifier and of the environment"


def test_episodes_of_a_group_share_nothing(rows: str) -> None:
    pair = play(source(rows, "Silent"), use("count_up"), use("count_up"), "7", size=2)
    assert [results(t) for t in pair] == [["1", "2"], ["1", "2"]]
    assert pair[0].reward == 0.0 and source(rows, "Silent").environment_weight is None


def test_an_episode_has_its_own_copy_of_the_row() -> None:
    task = Task("t", [{"role": "user", "content": "Take."}], meta={"letters": ["a", "b"]})
    kept = copy.deepcopy(task)
    environment = EnvironmentClass("environments_of_tests:Greedy")
    for _ in range(2):
        env = ToolEnv(
            task,
            TEXT,
            Toolbox(environment.tools),
            find_call_format(TEXT, Toolbox(environment.tools)),
            session=environment.open(),
        )
        run_to_end(env.initial_observation())
        (tool,) = [one.function for one in env._toolbox.tools]
        assert tool() == "b"
        said = env.task.model_prompt[-1]["content"]
        assert said.startswith("Take.") and "42?" in said and "<|im" not in said
    assert task == kept


def test_a_failed_call_is_an_observation(rows: str) -> None:
    (t,) = play(source(rows, "Safe"), use("clear") + use("get_reward"), use("press", digit="x"), "7")
    first, second, third = results(t)
    assert first == "error: LookupError: nothing was pressed" and "there is no tool 'get_reward'" in second
    assert "valid integer" in third and t.reward == 0.0


def test_functions_stand_beside_it_and_words_before_a_text(rows: str) -> None:
    made = source(rows, "Safe", chat="off", tools=["tools_of_tests:add"], calls={})
    (t,) = play(made, "<call> press 3 </call>", "<call> add 2 3 </call>", "<call> press 5 </call>", "35")
    read = TEXT.decode(t.prompt_tokens)
    assert read.endswith("The code has 2 digits.")
    assert "press digit: Press a digit." in read and "add a b" in read
    assert t.reward == 1.0 and "<result> 5 </result>" in t.response


def test_a_reward_may_be_awaited(rows: str) -> None:
    assert play(source(rows, "Late"), "35")[0].reward == 0.25


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Broken", "Broken.get_reward.*KeyError: 'lost'"),
        ("Endless", "nan, expected a finite number"),
        ("Leaving", "Leaving.get_reward.*SystemExit"),
    ],
)
def test_a_reward_that_fails_is_an_error_of_the_episode_and_no_zero(rows: str, name: str, words: str) -> None:
    made = source(rows, name)
    (t,) = play(made, "35")
    score([t], resolve_reward("exact_match").plus_environment(made.environment_weight))
    assert t.reward is None and re.search(words, t.scores["environment"].detail or "")


def test_a_reset_that_fails_or_hangs_is_an_error_of_its_episode(rows: str) -> None:
    for name, words in (("Moody", "reset of task .* failed: OSError: not today"), ("Slow", "longer than 0.2 s")):
        made = source(rows, name)
        made._environment.seconds, getattr(given, name).count = 0.2, 0
        pair = play(made, "35", "35", size=2)
        score(pair, resolve_reward("exact_match").plus_environment(made.environment_weight))
        failed = [t for t in pair if t.reward is None]
        assert len(failed) == 1 and re.search(words, failed[0].scores["environment"].detail or ""), name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Picky", r"reset of task .* failed: TypeError"),
        ("Talkative", "reset gave a int, expected text or None"),
        ("Still", "no method `reset`"),
        ("Empty", "at least one"),
        ("refuse", "cannot be made: RuntimeError: no safe here"),
        ("Nothing", "Nothing"),
    ],
)
def test_what_is_no_such_class_is_refused(rows: str, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        source(rows, name)


def test_a_dictionary_of_classes_is_chosen_from_by_the_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}.", "answer": "35", "environment": ("safe", "shop")[n % 2]} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    inner = {"inner": "dataset", "inner_kwargs": {"path": str(path), "reward": "exact_match"}}
    made = apply_prompt_options(
        resolve_environment("trl:environments_of_tests:factories", **inner), TEXT, PromptOptions()
    )
    tasks = [made.train(0, index, "") for index in range(7)]
    safe, shop = (next(t for t in tasks if t.meta["environment"] == name) for name in ("safe", "shop"))
    assert made.environment_weight == 1.0
    for task, turn, shown, hidden in (
        (safe, use("press", digit=3), "press", "buy"),
        (shop, use("buy", count=2), "buy", "press"),
    ):
        groups = open_groups(made, [task], 1, TEXT, "g")
        said = iter([turn, "35"])
        sampler = ScriptedSamplingClient(
            TEXT, lambda i, said=said: [*TEXT.encode(next(said), add_special_tokens=False), TEXT.eos_token_id]
        )
        (t,) = rollout(groups, sampler, SamplingParams(max_tokens=900), seed=1)
        read = TEXT.decode(t.prompt_tokens)
        assert f'"{shown}"' in read and f'"{hidden}"' not in read
        assert t.reward == float(shown == "buy")
    with pytest.raises(ValueError, match=r"environment='shed' \(did you mean"):
        made.env(Task("t", "x", {"environment": "shed"}), TEXT)
    with pytest.raises(ValueError, match="no method `reset`"):
        resolve_environment("trl:environments_of_tests:Still")
