"""Tasks without rows: which seed the episode of an index has, epoch after epoch."""

from __future__ import annotations

import pytest

from rlvr.envs.seeds import SeedSource


def seeds_of(source: SeedSource, seed: int, first: int, count: int) -> list[int]:
    return [source.train(seed, first + i, "").meta["seed"] for i in range(count)]


def test_an_epoch_has_every_seed_once_in_an_order_of_its_own() -> None:
    source = SeedSource(tasks=20, heldout=3)
    first, second, other = seeds_of(source, 7, 0, 20), seeds_of(source, 7, 20, 20), seeds_of(source, 8, 0, 20)
    assert sorted(first) == sorted(second) == sorted(other) == list(range(20))
    assert len({tuple(order) for order in (first, second, other, range(20))}) == 4
    assert seeds_of(source, 7, 5, 3) == first[5:8], "another order was asked for meanwhile"


def test_seeds_without_a_number_follow_the_index_and_none_is_held_out_too() -> None:
    source = SeedSource(heldout=3)
    drawn = seeds_of(source, 7, 0, 50)
    assert drawn == seeds_of(SeedSource(), 7, 0, 50) != seeds_of(source, 8, 0, 50)
    held_out = [task.meta["seed"] for task in source.heldout(None)]
    assert len(held_out) == 3 and not {*held_out} & {*drawn, *range(20)}
    assert [task.meta["seed"] for task in source.heldout(2)] == held_out[:2]


def test_no_task_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="tasks"):
        SeedSource(tasks=0)
