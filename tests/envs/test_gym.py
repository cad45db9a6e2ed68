"""Classes by Gym's contract, `reset` and `step`, as episodes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Trajectory
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE

TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE


def source(name: str, chat: str = "auto", **options: Any) -> Any:
    made = resolve_environment(f"environments_of_tests:{name}", **options)
    return apply_prompt_options(made, TEXT, PromptOptions(chat=chat))


def play(made: Any, *turns: str, task: Any = None, size: int = 1) -> list[Trajectory]:
    """Each of the `size` episodes says these turns; judged by what the environment gives."""

    def answer(i: int) -> list[int]:
        return [*TEXT.encode(turns[i // size], add_special_tokens=False), TEXT.eos_token_id]

    groups = open_groups(made, [task or made.heldout(1)[0]], size, TEXT, "g")
    played = rollout(groups, ScriptedSamplingClient(TEXT, answer), SamplingParams(max_tokens=900), seed=1)
    score(played, resolve_reward(made.reward).plus_environment(made.environment_weight))
    return played


def test_a_class_with_reset_and_step_is_an_environment() -> None:
    made = source("Countdown", inner_kwargs={"prompt": "Count down.", "tasks": 5, "heldout": 3})
    assert made.max_turns == 4 and "go" in made.vocabulary and made.reward == "environment"
    first = made.heldout(None)[1]  # 2**30 + 1 is 2 in modulo 3, so it begins at 3
    assert [task.id for task in made.heldout(None)] == [f"seed-{2**30 + n}" for n in range(3)]
    assert sorted(made.train(7, index, "").meta["seed"] for index in range(5)) == [0, 1, 2, 3, 4]
    assert made.train(7, 6, "") == made.train(7, 6, "") and made.size("") == 5
    (t,) = play(made, "2", "1", "0", task=first)
    assert t.reward == 0.75 and t.metadata["turns"] == 3 and t.metadata["stop/done"] == 1
    assert "Count down.3<|im_end|>" in TEXT.decode(t.prompt_tokens)
    said = TEXT.decode([token for token, mask in zip(t.response_tokens, t.action_mask, strict=True) if not mask])
    assert said.count("<|im_start|>user\ngo<|im_end|>") == 2
    assert "".join(TEXT.decode([i]) for i, m in zip(t.response_tokens, t.action_mask, strict=True) if m).count("0") == 1


def test_episodes_of_a_group_begin_alike_and_share_nothing() -> None:
    made = source("Countdown")
    task = next(task for task in made.heldout(None) if task.meta["seed"] % 3 == 1)
    pair = play(made, "1", "0", task=task, size=2)
    assert [t.reward for t in pair] == [0.5, 0.5]
    assert pair[0].prompt_tokens == pair[1].prompt_tokens
    assert [t.scores["environment"].outcome for t in play(made, "7", task=task)] == [Outcome.FAILED]


def test_gymnasiums_values_options_and_coroutines() -> None:
    made = source("Gymnasium", options={"bonus": 1.0}, max_turns=2)
    task = next(task for task in made.heldout(None) if task.meta["seed"] % 3 == 2)
    (t,) = play(made, "2", "1", task=task)
    assert t.reward == 2.5 and t.metadata["correct"] == 1.0 and t.metadata["stop/max_turns"] == 1
    with pytest.raises(ValueError, match=r"options.*bonu.*did you mean 'bonus'"):
        source("Gymnasium", options={"bonu": 1.0})
    with pytest.raises(ValueError, match="max_turns=0"):
        source("Gymnasium", max_turns=0)


def strange(tmp_path: Path, given: str) -> Any:
    path = tmp_path / f"{given}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}:", "answer": given}) + "\n" for n in range(3)))
    return source("Strange", inner="dataset", inner_kwargs={"path": str(path)})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nan", "reward nan, expected a finite number"),
        ("text", r"gave 'only text', expected \(observation, reward, done\)"),
        ("words", "reward 'much', expected a number"),
        ("long", "200,000 characters"),
        ("raise", "step of task .* failed: LookupError: lost"),
        ("exit", "SystemExit: 3"),
    ],
)
def test_what_is_no_step_is_an_error_and_no_zero(tmp_path: Path, given: str, words: str) -> None:
    (t,) = play(strange(tmp_path, given), "hello")
    verdict = t.scores["environment"]
    assert t.reward is None and verdict.outcome is Outcome.ERROR
    assert re.search(words, verdict.detail or "")


def test_a_reward_out_of_the_declared_range_is_an_error_and_no_zero() -> None:
    made = source("Ranged")
    assert made.reward_range == (0.0, 1.0)
    rewards = [play(made, said)[0].reward for said in ("1", "0.5", "1.5", "-1")]
    assert rewards == [1.0, 0.5, None, None]
    assert "reward_range [0, 1]" in (play(made, "2")[0].scores["environment"].detail or "")
    with pytest.raises(ValueError, match="expected the lower number first"):
        source("RangedWrong")


def test_an_observation_that_is_no_text_is_written_as_json(tmp_path: Path) -> None:
    (t,) = play(strange(tmp_path, "object"), "hello")
    assert t.reward == 1.0 and ": Say something." in TEXT.decode(t.prompt_tokens)


def test_a_prompt_of_text_needs_no_template() -> None:
    made = source("Countdown", chat="off", inner_kwargs={"prompt": "Count down from "})
    task = next(task for task in made.heldout(None) if task.meta["seed"] % 3 == 1)
    (t,) = play(made, "1", "0", task=task)
    assert TEXT.decode(t.prompt_tokens) == "Count down from 2" and t.reward == 0.5
    assert t.response.startswith("1<|im_end|>go0")


def test_what_names_no_environment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'reasoning_gym'"):
        resolve_environment("reasoning_gin:leg_counting")
    with pytest.raises(ValueError, match="nothing stands after the colon"):
        resolve_environment("reasoning_gym:")
    with pytest.raises(ValueError, match=r"does not take 'max_turn'.*did you mean 'max_turns'"):
        resolve_environment("environments_of_tests:Countdown", max_turn=3)
