"""Digits to sort: every sequence is on one side, and each right answer passes."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.envs import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case


def test_every_sequence_is_trained_on_or_held_out_and_its_words_are_in_the_vocabulary() -> None:
    source: Any = resolve_environment("sorting", digits=2)
    train = {str(source.train(1, index, "").prompt) for index in range(source.size(""))}
    heldout = {str(task.prompt) for task in source.heldout(None)}
    assert len(train) + len(heldout) == 100 == len(train | heldout) and 5 < len(heldout) < 40
    assert {word for prompt in train | heldout for word in prompt.split()} < set(source.vocabulary)


def test_the_sorted_digits_pass_and_others_earn_their_share() -> None:
    source = resolve_environment("sorting")
    task = next(task for task in source.heldout(None) if task.meta["answer"] == "0 1 9")
    reward = resolve_reward(source.reward)
    answers = ["0 1 9", "0 1 8", "9 1 0", "0 1", "0 1 9 9", ""]
    scores = reward.judge_all([Case(str(task.prompt), text, task.meta) for text in answers])
    assert [score.value for score in scores] == pytest.approx([1, 2 / 3, 1 / 3, 2 / 3, 3 / 4, 0])
    assert [score.outcome.value for score in scores] == ["passed", *["failed"] * 5]
    assert source.demonstration(task, 0) == "0 1 9"


@pytest.mark.parametrize("digits", [1, 7, 2.0, True])
def test_a_number_of_digits_out_of_range_is_refused(digits: Any) -> None:
    with pytest.raises(ValueError, match=r"digits=.*expected a whole number from 2 to 6"):
        resolve_environment("sorting", digits=digits)


def test_families_sort_by_orders_of_their_own_and_share_their_prompts() -> None:
    """Family 0 is the usual order. Of another one the answers to all pairs are one order of the ten digits."""
    source: Any = resolve_environment("sorting", digits=2, orders=[0, 7])
    usual: Any = resolve_environment("sorting", digits=2)
    assert source.levels == ("0", "7") and source.size("7") == usual.size("") == source.size("0")
    tasks = source.heldout(None)
    answers = {(task.level, str(task.prompt)): task.meta["answer"] for task in tasks}
    held = {str(task.prompt): task.meta["answer"] for task in usual.heldout(None)}
    assert {prompt: answer for (level, prompt), answer in answers.items() if level == "0"} == held
    tasks += [source.train(0, index, "7") for index in range(source.size("7"))]
    pairs = {tuple(task.meta["answer"].split()) for task in tasks if task.level == "7"}
    wins = {digit: sum(first == digit != second for first, second in pairs) for digit in "0123456789"}
    assert sorted(wins.values()) == list(range(10))  # each digit before as many others as no other one is
    assert sorted(wins, key=wins.__getitem__, reverse=True) != list("0123456789")


@pytest.mark.parametrize("orders", [[], [1, 1], 3, [-1], [True, 2], ["a"]])
def test_orders_that_are_no_list_of_numbers_are_refused(orders: Any) -> None:
    with pytest.raises(ValueError, match=r"sorting: orders=.*expected"):
        resolve_environment("sorting", orders=orders)
