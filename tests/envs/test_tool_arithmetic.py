"""Arithmetic with a tool: demonstrations are episodes that the environment itself plays, with and without the tool."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.chat.turns import join_turns
from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.envs.tools.tool_arithmetic import ToolArithmetic
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score


def tokenizer_of(source: ToolArithmetic) -> Any:
    return build_tokenizer("words", source.vocabulary, end=source.end_word, pad=source.pad_word)


def test_by_hand() -> None:
    source = ToolArithmetic(flaw=0.0)
    task = source._task("57 * 83 + 12", "2")  # 57 x 83 = 4731 = 48 x 97 + 75; 75 + 12 = 87
    assert (task.prompt, task.meta["answer"]) == ("<boe> 57 * 83 + 12", "87")
    assert source.demonstration(task, 0) == [
        "<call> calculate 57 * 83 </call>",
        "<result> 75 </result>",
        "<call> calculate 75 + 12 </call>",
        "<result> 87 </result>",
        "= 87",
    ]
    assert ToolArithmetic(flaw=0.0, with_tool=False).demonstration(task, 0) == "= 75 + 12 = 87"
    assert source.calculate(3, "-", 5) == 95


@pytest.mark.parametrize("with_tool", [True, False])
def test_an_episode_of_the_demonstration_passes(with_tool: bool) -> None:
    source = ToolArithmetic(with_tool=with_tool, flaw=0.0)
    words = tokenizer_of(source)
    for level in source.levels:
        task = source.train(1, 3, level)
        shown = source.demonstration(task, 0)
        turns, text = [shown] if isinstance(shown, str) else shown[::2], join_turns(shown, source.end_word)
        script = iter([words.encode(f"{turn} <eoe>", add_special_tokens=False) for turn in turns])
        sampler = ScriptedSamplingClient(words, lambda i, script=script: next(script))
        (t,) = rollout(open_groups(source, [task], 1, words, "g"), sampler, SamplingParams(max_tokens=16), seed=1)
        score([t], resolve_reward("correct"))
        assert t.reward == 1.0
        assert words.decode(t.response_tokens).split() == f"{text} <eoe>".split(), "as the demonstration has it"
        assert t.metadata.get("tool_calls", 0) == (int(level) if with_tool else 0)


def test_a_wrong_call_is_one_word_and_the_episode_goes_on() -> None:
    source = ToolArithmetic()
    words = tokenizer_of(source)
    turns = ["<call> calculate 5 </call> <eoe>", "<call> 5 + 5 </call> <eoe>", "= 10 <eoe>"]
    script = iter([words.encode(turn, add_special_tokens=False) for turn in turns])
    sampler = ScriptedSamplingClient(words, lambda i: next(script))
    task = source._task("5 + 5", "1")
    (t,) = rollout(open_groups(source, [task], 1, words, "g"), sampler, SamplingParams(max_tokens=16), seed=1)
    assert words.decode(t.response_tokens).split().count("<error>") == 2 and t.metadata["tool_errors"] == 2


def test_a_teacher_errs_as_often_as_it_is_told() -> None:
    for with_tool in (True, False):
        source = ToolArithmetic(operations=(1, 1), with_tool=with_tool, flaw=0.3)
        tasks = [source.train(1, i, "1") for i in range(2_000)]
        shown = [join_turns(source.demonstration(task, i), None) for i, task in enumerate(tasks)]
        right = [text.split()[-1] == task.meta["answer"] for text, task in zip(shown, tasks, strict=True)]
        # Another operator can have the same result: 0 + 5 = 5 - 0.
        assert 0.66 < sum(right) / len(right) < 0.75


def test_no_problem_is_on_both_sides() -> None:
    source = ToolArithmetic()
    held = {task.id for task in source.heldout(300)}
    assert len(held) == 300 and held == {task.id for task in source.heldout(300)}
    assert not held & {source.train(1, i, level).id for level in source.levels for i in range(500)}


@pytest.mark.parametrize("wrong", [{"p": 1}, {"operations": [0, 2]}, {"operations": [3, 1]}, {"flaw": 2}])
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tool_arithmetic: "):
        ToolArithmetic(**wrong)
