"""Held-out prompts that nearly equal a training prompt, what does not count, and how many are compared."""

from __future__ import annotations

from typing import Any

from rlvr.core.types import Task
from rlvr.envs.near_duplicates import choose_heldout_to_compare, find_near_duplicates

LONG = "Ann has {} red pens and buys {} more at the shop near her school. How many pens does she have now?"


ANIMALS = "ape bee cat dog eel fox gnu hen ibis jay koi lynx"


def tasks(prefix: str, *prompts: str) -> list[Task]:
    return [Task(f"{prefix}{i}", prompt) for i, prompt in enumerate(prompts)]


def test_a_prompt_with_other_punctuation_or_one_other_word_is_a_near_duplicate() -> None:
    first = LONG.format(3, 4)
    train = tasks("t", "Something else entirely, about a dog and a cat in a garden.", first)
    for again in (first.upper(), first.replace("?", " ..."), first + " Answer.", first.replace("Ann", "Eva")):
        (near,) = find_near_duplicates(tasks("h", again), train)
        assert (near.heldout.id, near.train.id) == ("h0", "t1") and near.share >= 0.8
    assert find_near_duplicates(tasks("h", LONG.format(5, 6)), train) == []  # the numbers are the task


def test_the_share_counts_sequences_of_eight_words() -> None:
    """Ten words are three sequences: a b .. h, b .. i, c .. j. Another last word leaves two of three."""
    words = "a b c d e f g h i j"
    assert find_near_duplicates(tasks("h", words), tasks("t", words))[0].share == 1.0
    assert find_near_duplicates(tasks("h", words), tasks("t", words.replace("j", "k"))) == []
    assert find_near_duplicates(tasks("h", words), tasks("t", f"x {words} y"))[0].share == 1.0


def test_short_prompts_have_to_be_equal_and_operators_count() -> None:
    train = tasks("t", "3 + 5 =", "What is the capital of France?")
    assert find_near_duplicates(tasks("h", "3 - 5 =", "What is the capital of Spain?", "?"), train) == []
    assert len(find_near_duplicates(tasks("h", "what is the capital of france", "3+5="), train)) == 2


def test_the_words_of_a_template_do_not_count() -> None:
    shared = "You are given a question of general knowledge. Think about it, then give the answer in one word. "
    train = tasks("t", *(f"{shared}{word}" for word in ANIMALS.split()))
    assert find_near_duplicates(tasks("h", f"{shared}mole", f"{shared}newt"), train) == []
    assert [near.heldout.id for near in find_near_duplicates(tasks("h", f"{shared}mole", f"{shared}Dog!"), train)] == [
        "h1"
    ]


def test_of_large_data_sets_a_part_is_looked_at() -> None:
    heldout, train = tasks("h", "three", "two"), tasks("t", "one", "two", "three")
    assert [near.heldout.id for near in find_near_duplicates(heldout, train)] == ["h0", "h1"]
    assert [near.heldout.id for near in find_near_duplicates(heldout, train, most_words=1)] == ["h1"]
    assert [near.heldout.id for near in find_near_duplicates(heldout, train, most_heldout=1)] == ["h0"]
    heldout = tasks("h", "one two", "one three", "one")
    assert [task.id for task in choose_heldout_to_compare(heldout, most_words=3)] == ["h0", "h1"]
    assert find_near_duplicates(heldout, tasks("t", "one"), most_words=3) == []


def test_a_message_of_the_user_nearly_repeats_its_text() -> None:
    chat = Task("h0", [{"role": "user", "content": "3 + 5 = ?"}])
    assert [near.train.id for near in find_near_duplicates([chat], tasks("t", "3 + 5 ="))] == ["t0"]
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "3 + 5 ="}]}]  # from a source of one's own
    assert find_near_duplicates([Task("h0", parts)], tasks("t", "3 + 5 =")) == []


def test_signs_are_words_too() -> None:
    """Programs of the tokens A#, #A, B# and #B differ where their letters are the same."""
    texts = ["#A B# A# #B B# A# #B A#", "A# #B A# B# #B A# B# A#"]
    one, other = (Task(text, text) for text in texts)
    assert [text.replace("#", "") for text in texts] == ["A B A B B A B A"] * 2
    assert not find_near_duplicates([one], [other]) and find_near_duplicates([one], [one])
