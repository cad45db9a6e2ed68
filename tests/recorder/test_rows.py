"""Rows out of recorded calls: branches, answers that were asked for again, choices, rewards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlvr.core.types import StopReason
from rlvr.recorder.recording import RecordedCall, RecordedChoice, RecordedRollout
from rlvr.recorder.rows import list_branches, list_turns, make_rows


def call(prompt: list[int], *answers: list[int], finish: str = "stop", **settings: Any) -> RecordedCall:
    choices = [RecordedChoice(a, [-0.5] * len(a), finish, {"role": "assistant", "content": str(a)}) for a in answers]
    return RecordedCall("c", "r", "g", "chat", f"p{len(prompt)}", prompt, choices, {}, settings)


def rows(*calls: RecordedCall, **options: Any) -> list[tuple[list[int], list[int]]]:
    """(tokens, mask of the response) of each row."""
    return [(row.full_tokens, row.action_mask) for row in make_rows(RecordedRollout("r", "g", list(calls)), **options)]


def test_turns_that_go_on_are_one_row() -> None:
    calls = [call([1, 2], [3, 4]), call([1, 2, 3, 4, 5], [6], finish="length", temperature=1.0)]
    (row,) = make_rows(RecordedRollout("r", "g", calls, 0.5))
    assert (row.prompt_tokens, row.response_tokens, row.action_mask) == ([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])
    assert row.logprobs == [-0.5, -0.5, 0.0, -0.5] and row.turn_starts == [0, 3]
    assert (row.reward, row.group_id, row.rollout_id, row.answer) == (0.5, "g", "r", "[6]")
    assert row.stop_reason is StopReason.LENGTH and row.policy_fingerprint == "p2+p5"
    row.require_trainable()


def test_a_history_that_was_rewritten_is_a_branch_and_what_two_share_is_trained_once() -> None:
    root, left, right = call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 5], [6])
    assert rows(root, left, call([9], [8]), right) == [
        ([1, 2, 3, 4], [1, 0, 1]),
        ([9, 8], [1]),
        ([1, 2, 5, 6], [1]),
    ]


def test_an_answer_that_was_asked_for_again_is_left_out_unless_it_was_gone_on_from() -> None:
    first, again = call([1], [2]), call([1], [3])
    assert rows(first, again) == [([1, 3], [1])]
    assert rows(first, again, keep_retried=True) == [([1, 2], [1]), ([1, 3], [1])]
    assert rows(first, again, call([1, 2, 5], [6])) == [([1, 2, 5, 6], [1, 0, 1])], "the first was used"


def test_of_several_choices_those_are_trained_that_were_gone_on_from_or_the_first() -> None:
    choices = call([1], [2], [3], [4])
    assert rows(choices) == [([1, 2], [1])]
    assert rows(choices, call([1, 3, 5], [6])) == [([1, 3, 5, 6], [1, 0, 1])]
    assert len(rows(choices, keep_retried=True)) == 3


def test_a_mask_says_what_is_trained() -> None:
    first, again = call([1], [2, 3]), call([1], [4, 5])
    first.choices[0].mask.extend([0, 1])
    assert rows(first, again) == [([1, 2, 3], [0, 1]), ([1, 4, 5], [1, 1])]
    assert make_rows(RecordedRollout("r", "g", [first]))[0].logprobs == [0.0, -0.5]
    first.choices[0].mask[:] = [0, 0]
    assert rows(first, again) == [([1, 4, 5], [1, 1])]
    assert rows(first) == [], "nothing of it is trained"


def test_without_a_reward_or_a_group() -> None:
    (row,) = make_rows(RecordedRollout("r", "", [call([1], [2])]))
    assert row.reward is None and row.group_id == "r" and row.prompt == row.response == ""
    assert make_rows(RecordedRollout("r")) == [] and list_branches(list_turns(RecordedRollout("r"))) == []


def test_a_row_has_one_temperature() -> None:
    cold = call([1], [2], temperature=0.5)
    assert make_rows(RecordedRollout("r", "", [cold]))[0].temperature == 0.5
    assert len(rows(cold, call([9], [4]))) == 2


def test_a_branch_of_two_temperatures_is_a_row_for_each() -> None:
    """The turns of the other one are read: no log-prob is taken for that of another distribution."""
    calls = [call([1], [2], temperature=0.5), call([1, 2, 3], [4]), call([1, 2, 3, 4, 5], [6], temperature=0.5)]
    cold, warm = make_rows(RecordedRollout("r", "g", calls, 0.5))
    assert (cold.temperature, warm.temperature) == (0.5, 1.0)
    assert cold.full_tokens == warm.full_tokens == [1, 2, 3, 4, 5, 6]
    assert (cold.action_mask, warm.action_mask) == ([1, 0, 0, 0, 1], [0, 0, 1, 0, 0])
    assert [bool(one) for one in cold.logprobs] == [bool(one) for one in cold.action_mask]
    assert {row.reward for row in (cold, warm)} == {0.5}


def test_branches_are_trained_with_their_own_rewards() -> None:
    root, left, right = (
        replace(call(p, a), id=id) for p, a, id in (([1], [2], "a"), ([1, 2, 3], [4], "b"), ([1, 2, 5], [6], "c"))
    )
    calls = [root, left, right]
    first, second = make_rows(RecordedRollout("r", "g", calls, 0.5, {"c": 1.0}))
    assert (first.turn_credits, second.turn_credits) == ([0.75, 0.5], [1.0])  # what both share: (0.5 + 1) / 2
    assert first.reward == second.reward == 0.5
    first, second = make_rows(RecordedRollout("r", "g", calls, None, {"c": 1.0}))
    assert (first.reward, second.reward, second.turn_credits) == (None, 1.0, [1.0]), "the other branch has no reward"
    first, second = make_rows(RecordedRollout("r", "g", calls, None, {"a": 0.25, "b": 1.0}))
    assert (first.turn_credits, second.turn_credits) == ([0.625, 1.0], [0.25]), "the latest call of a branch counts"
