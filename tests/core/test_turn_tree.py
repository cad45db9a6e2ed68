"""Turns as a tree: where a turn goes on from, and which branches there are, by hand and by a plain search."""

from __future__ import annotations

import itertools
import random

import pytest

from rlvr.core.turn_tree import (
    find_parent,
    find_reward,
    find_unused,
    list_path,
    share_credit,
    split_branches,
)


@pytest.mark.parametrize(
    ("prompt", "parent"),
    [
        ([1, 2, 3, 9], 1),  # the longest
        ([1, 2, 9], 0),
        ([1, 2], 0),  # nothing new was said
        ([1], None),
        ([2, 1, 3], None),
        ([7, 8, 5], 3),  # of equal turns the last
    ],
)
def test_the_turn_that_a_prompt_goes_on_from(prompt: list[int], parent: int | None) -> None:
    turns = [(0, [1], [2]), (1, [1, 2], [3]), (2, [7], [8]), (3, [7], [8])]
    assert find_parent(prompt, turns) == parent


@pytest.mark.parametrize(
    ("parents", "dropped", "branches"),
    [
        ([None], [], [[0]]),
        ([None], [0], []),
        ([None, 0, 1], [], [[0, 1, 2]]),
        ([None, 0, 0], [], [[0, 1], [2]]),  # a fork: the shared turn is in the first branch
        ([None, None, 1], [], [[0], [1, 2]]),  # the history was written anew
        ([None, None, 0], [], [[1], [0, 2]]),  # another program called in between
        ([None, 0, 0], [1], [[0, 2]]),  # asked again
        ([None, 0, 0, 1], [1], [[0, 2], [1, 3]]),  # dropped, and gone on from all the same
    ],
)
def test_the_branches_of_a_tree(parents: list[int | None], dropped: list[int], branches: list[list[int]]) -> None:
    assert split_branches(parents, dropped) == branches


def test_every_kept_turn_is_in_one_branch_and_every_branch_is_a_chain() -> None:
    draw = random.Random(3)
    for _ in range(300):
        size = draw.randrange(1, 12)
        parents = [draw.choice([None, *range(turn)]) for turn in range(size)]
        dropped = {turn for turn in range(size) if draw.random() < 0.3}
        branches = split_branches(parents, dropped)
        turns = [turn for branch in branches for turn in branch]
        assert len(turns) == len(set(turns))
        for branch in branches:
            assert all(parents[later] == earlier for earlier, later in itertools.pairwise(branch))

        def is_needed(turn: int, parents: list[int | None] = parents, dropped: set[int] = dropped) -> bool:
            later = [other for other, parent in enumerate(parents) if parent == turn]
            return turn not in dropped or any(is_needed(other) for other in later)

        assert set(turns) == {turn for turn in range(size) if is_needed(turn)}


@pytest.mark.parametrize(
    ("calls", "prompts", "parents", "unused"),
    [
        ([0, 1], [[1], [2]], [None, None], set()),
        ([0, 1], [[1], [1]], [None, None], {0}),  # asked again: the last counts
        ([0, 0, 0], [[1], [1], [1]], [None] * 3, {1, 2}),  # choices of one call: the first counts
        ([0, 0, 1], [[1], [1], [1, 5, 2]], [None, None, 1], {0}),  # or the one that is gone on from
        ([0, 1, 2], [[1], [1], [1, 5, 2]], [None, None, 0], {1}),  # asked again, and the first answer used
        ([0, 1, 1], [[1], [1], [1]], [None] * 3, {0, 2}),
    ],
)
def test_the_turns_that_a_program_did_not_use(
    calls: list[int], prompts: list[list[int]], parents: list[int | None], unused: set[int]
) -> None:
    assert find_unused(calls, prompts, parents) == unused


def test_a_history_that_only_grows_is_compared_with_its_last_turn_alone() -> None:
    class Counting(list[int]):
        looks = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            self.looks += 1
            return super().__getitem__(place)

    turns = [(turn, list(range(2 * turn)), [2 * turn]) for turn in range(200)]
    prompt = Counting(range(500))
    assert find_parent(prompt, turns) == 199 and prompt.looks == 2


def test_the_credit_of_a_shared_turn_is_the_mean_of_its_branches() -> None:
    #      0 - 1 - 2
    #        \   \ 3      and 5, which begins anew
    #          4
    parents = [None, 0, 1, 1, 0, None]
    paths = [list_path(end, parents) for end in (2, 3, 4, 5)]
    assert paths == [[0, 1, 2], [0, 1, 3], [0, 4], [5]]
    # 0 is in three branches, (1 + 0.5 + 0) / 3; 1 is in two, (1 + 0.5) / 2.
    assert share_credit([0, 1, 2, 3, 4, 5], paths, [1.0, 0.5, 0.0, -1.0]) == [0.5, 0.75, 1.0, 0.5, 0.0, -1.0]


def test_the_latest_reward_of_a_branch_counts() -> None:
    assert [find_reward(path, {0: 0.25, 2: 1.0}) for path in ([0, 1, 2], [0, 4], [5])] == [1.0, 0.25, None]
