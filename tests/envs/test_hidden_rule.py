"""Rules that are found within an episode: what is shown, what is paid, and that no held-out rule is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Task, Trajectory
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.envs.gym.hidden_rule import HiddenRule
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score


def play(source: HiddenRule, task: Task, turns: Sequence[str]) -> tuple[Trajectory, str]:
    """The episode, and its words."""
    words = build_tokenizer("words", source.vocabulary, end=source.end_word, pad=source.pad_word)
    script = iter([words.encode(f"{turn} <end>", add_special_tokens=False) for turn in turns])
    sampler = ScriptedSamplingClient(words, lambda i: next(script))
    (t,) = rollout(open_groups(source, [task], 1, words, "g"), sampler, SamplingParams(max_tokens=2), seed=1)
    score([t], resolve_reward("environment"))
    return t, words.decode([*t.prompt_tokens, *t.response_tokens])


TASK = Task("by hand", "b", {"rule": "312", "asked": "bcaabc"})  # a is 3, b is 1, c is 2


def test_later_rounds_are_paid() -> None:
    source = HiddenRule(letters=3)
    t, text = play(source, TASK, ["1", "3", "1", "3", "1", "3"])
    assert text == "b 1 <end> b 1 c 3 <end> c 2 a 1 <end> a 3 a 3 <end> a 3 b 1 <end> b 1 c 3 <end>"
    assert t.reward == pytest.approx(2 / 3)
    assert t.metadata["first_round"] == pytest.approx(1 / 3) and t.metadata["later_rounds"] == pytest.approx(2 / 3)
    assert t.scores["environment"].outcome is Outcome.FAILED
    t, _ = play(source, TASK, ["2", "2 2", "a", "3", "1", "2"])
    assert (t.reward, t.scores["environment"].outcome) == (pytest.approx(1.0), Outcome.PASSED)


def test_a_teacher_without_flaw_is_right_in_every_later_round() -> None:
    source = HiddenRule(letters=4, rounds=3, flaw=0.0)
    for task in [source.train(1, index, "") for index in range(5)]:
        shown = source.demonstration(task, 7)
        t, text = play(source, task, shown[::2])
        assert t.reward == pytest.approx(1.0)
        demonstrated = [f"{part} <end>" if place % 2 == 0 else part for place, part in enumerate(shown)]
        assert text.split() == " ".join([task.prompt, *demonstrated]).split(), "the episode reads as it is shown"


def test_no_heldout_rule_is_trained_on() -> None:
    source = HiddenRule()
    heldout = {task.meta["rule"] for task in source.heldout(None)}
    trained = {source.train(3, index, "").meta["rule"] for index in range(2000)}
    assert len(source.heldout(None)) == 200 and len({task.id for task in source.heldout(None)}) == 200
    assert not heldout & trained and len(heldout | trained) == 120, "5! rules, each on one side"
    assert {HiddenRule(same_rule=True).train(3, index, "").meta["rule"] for index in range(50)} < trained
    assert all(sorted(task.meta["asked"][:5]) == list("abcde") for task in source.heldout(20))


@pytest.mark.parametrize(
    "options", [{"letters": 2}, {"letters": 9}, {"rounds": 1}, {"flaw": 1.5}, {"flaw": "0.5"}, {"same_rule": "false"}]
)
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"hidden_rule: {next(iter(options))}"):
        HiddenRule(**options)  # type: ignore[arg-type]
