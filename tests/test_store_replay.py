"""Replay draws the newest experiences by their priorities, every task as often, and says how to correct for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.core import rng
from rlvr.store import Experience, ExperienceStore, Session, open_store
from rlvr.store.replay import ReplayBuffer, draw_stratified, probabilities


@pytest.fixture
def store(store_url: str) -> Iterator[ExperienceStore]:
    store = open_store(store_url, buffer_size=5)
    store.add_session(Session("s", "a", "p"))
    yield store
    store.close()


def add(store: ExperienceStore, *iterations: int, **how: Any) -> list[int]:
    given = {"task_id": "a", "prompt": "p", "generated_output": "o", "gain": 0.1}
    return store.add_experiences([Experience("s", iteration=i, **{**given, **how}) for i in iterations])


def test_an_empty_buffer_gives_nothing(store: ExperienceStore):
    assert store.sample(4, seed=1) == [] and store.buffer() == ReplayBuffer(0, 5, 0)


def test_the_buffer_holds_the_newest_answers_of_sessions(store: ExperienceStore):
    """Older ones stay in the history; a training run's are no part of it; without a gain there is nothing to learn."""
    old = add(store, 1, 2)
    new = add(store, 3, 4, 5)
    add(store, 6, step=1)
    waiting = add(store, 7, gain=None)
    assert store.buffer() == ReplayBuffer(5, 5, 4) and store.buffer().utilization == 1.0
    drawn = {e.id for seed in range(40) for e, _ in store.sample(4, seed)}
    assert drawn == {old[1], *new} and store.count() == 7
    store.set_gains({waiting[0]: 0.5})
    assert store.buffer().ready == 5


def test_draws_follow_the_priorities_to_the_power_of_alpha(store: ExperienceStore):
    ids = add(store, 1, 2, 3, 4)
    store.set_priorities(dict(zip(ids, [0.0, 1.0, 4.0, 9.0], strict=True)))
    drawn = [pair for seed in range(250) for pair in store.sample(8, seed, alpha=0.5)]
    expected = dict(zip(ids, np.array([0.0, 1.0, 2.0, 3.0]) / 6, strict=True))
    for e, p in drawn:
        assert p == pytest.approx(4 * expected[e.id or 0], abs=4e-3)  # to a draw from four alike
    shares = Counter(e.id for e, _ in drawn)
    for id, share in expected.items():  # 2000 draws; a standard error is at most 0.011, stratification makes it less
        assert shares[id] / len(drawn) == pytest.approx(share, abs=0.03)


def test_without_alpha_and_without_any_priority_draws_are_uniform(store: ExperienceStore):
    ids = add(store, 1, 2, 3, 4)
    store.set_priorities(dict(zip(ids, [0.0, 1.0, 4.0, 9.0], strict=True)))
    assert {p for _, p in store.sample(8, 1, alpha=0.0)} == {1.0}
    store.set_priorities(dict.fromkeys(ids, 0.0))
    assert {p for _, p in store.sample(8, 1)} == {1.0}


def test_every_task_has_the_same_share_and_the_weights_leave_it_that(store: ExperienceStore):
    """A task of one answer is half of every minibatch; weighed by 1 / p the answers of the other count alike, whatever
    their priorities, and together as much as the one."""
    often = add(store, 1, 2, 3, 4)
    [rare] = add(store, 5, task_id="b")
    store.set_priorities(dict(zip([*often, rare], [1.0, 2.0, 4.0, 8.0, 0.001], strict=True)))
    drawn = [pair for seed in range(500) for pair in store.sample(8, seed)]
    assert sum(e.id == rare for e, _ in drawn) == len(drawn) / 2
    weights = {id: sum(1 / p for e, p in drawn if e.id == id) for id in (*often, rare)}
    assert [weights[id] / weights[rare] for id in often] == pytest.approx([0.25] * 4, rel=0.1)


def test_the_same_seed_draws_the_same(store: ExperienceStore):
    add(store, 1, 2, 3, 4, 5)
    first, again, other = ([e.id for e, _ in store.sample(16, seed)] for seed in (3, 3, 4))
    assert first == again != other


def test_priorities_must_be_numbers_to_draw_by(store: ExperienceStore):
    with pytest.raises(ValueError, match="expected finite numbers, not negative"):
        store.set_priorities({1: -1.0})
    store.set_priorities({99: 1.0})  # pruned meanwhile: nothing to do
    store.set_priorities({})


@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=50), st.floats(0, 2))
def test_probabilities_are_a_distribution_in_the_order_of_the_priorities(priorities: list[float], alpha: float):
    p = probabilities(np.array(priorities), alpha)
    assert p.sum() == pytest.approx(1.0) and (p > 0).all()
    order = np.argsort(priorities)
    assert (np.diff(p[order]) >= -1e-15).all()


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=20), st.integers(1, 64), st.integers(0, 1000))
def test_each_is_drawn_as_often_as_its_probability_says_within_one(weights: list[float], n: int, seed: int):
    """One draw from each of n equal ranges: n P(i) draws of i, give or take the two ranges at its ends."""
    p = np.array(weights) / sum(weights)
    drawn = Counter(draw_stratified(p, [rng.uniform(rng.key("test", seed), k) for k in range(n)]))
    assert sum(drawn.values()) == n
    for i, share in enumerate(p):
        assert abs(drawn[i] - n * share) < 2 + 1e-9
