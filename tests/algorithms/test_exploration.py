"""The advantage of the best of k, by hand and by all sets of k; a temperature that changes over a run."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.algorithms import resolve_algorithm
from rlvr.clients.mock.mock_client import MockTrainingClient
from rlvr.core.types import mean
from rlvr.training.schedules.sync import Synchronous
from tests.kit.advantage_batch import groups_of
from tests.kit.table_trainer import make_trainer


def advantages(rewards: list[float | None], k: int) -> list[float]:
    items = groups_of([rewards])
    resolve_algorithm("pass_at_k", pass_k=k).select(items)
    return [t.advantage for t in items]


def test_the_advantage_of_the_best_of_k_by_hand() -> None:
    """Rewards 1, 0, 0, 1, k 2: a right one adds 1 beside two of three others, so 2 x 2/3; a wrong one nothing."""
    assert advantages([1.0, 0.0, 0.0, 1.0], 2) == pytest.approx([4 / 3, 0.0, 0.0, 4 / 3])
    assert advantages([1.0, 0.0, 0.0, 1.0], 3) == pytest.approx([1.0, 0.0, 0.0, 1.0])  # 3 x 1 of 3 sets
    assert advantages([1.0, 0.0, 0.0, 1.0], 4) == [0.0] * 4, "the best of 4 is 1 without either"
    assert advantages([1.0, 0.5, 0.0, None], 2) == pytest.approx([2 * (0.5 + 1.0) / 2, 2 * 0.5 / 2, 0.0, 0.0])
    assert advantages([1.0, 0.0, None], 3) == [0.0] * 3, "too few known rewards"


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=6), st.integers(2, 6))
def test_it_is_what_each_adds_to_the_best_of_every_set_of_k(rewards: list[float], k: int) -> None:
    """n x the mean over all sets of k of max(set) - max(set without it), 0 for those outside."""
    n = len(rewards)
    expected = [0.0] * n
    for chosen in itertools.combinations(range(n), k):
        for i in chosen:
            others = [rewards[j] for j in chosen if j != i]
            expected[i] += n * (max(rewards[i], *others) - max(others)) / math.comb(n, k)
    assert advantages([*rewards], k) == pytest.approx(expected)


def test_its_gradient_is_that_of_the_best_of_k_on_average() -> None:
    """Two outcomes, right with p: E[A_i d log p_i] over all groups of 3 is d (1 - (1 - p)^2) / d logit, k 2."""
    p = 0.3
    total = 0.0
    for group in itertools.product((1.0, 0.0), repeat=3):
        chance = math.prod(p if r else 1 - p for r in group)
        slopes = [(1 - p) if r else -p for r in group]  # d log prob / d logit
        total += chance * mean([a * s for a, s in zip(advantages([*group], 2), slopes, strict=True)])
    assert total == pytest.approx(2 * (1 - p) * p * (1 - p))


def test_the_default_spec_has_the_gradient_of_the_best_of_k_whatever_the_lengths() -> None:
    """A policy over four answers of 1, 2, 3 and 5 tokens, two of them right: the expectation, over all groups of three,
    of the weighted advantages x d log p is the gradient of 1 - (1 - P(right))^2 by the logits."""
    lengths, right, chances = (1, 2, 3, 5), (1.0, 0.0, 0.0, 1.0), (0.1, 0.2, 0.3, 0.4)
    spec, found = resolve_algorithm("pass_at_k", pass_k=2), [0.0] * 4
    for drawn in itertools.product(range(4), repeat=3):
        items = groups_of([[right[a] for a in drawn]])
        for t, a in zip(items, drawn, strict=True):
            t.response_tokens, t.logprobs, t.action_mask = [2] * lengths[a], [-1.0] * lengths[a], [1] * lengths[a]
        answer_of = {id(t): a for t, a in zip(items, drawn, strict=True)}
        for t, weight in spec.weigh(spec.select(items), 8):
            for b in range(4):  # d log p_a / d logit_b
                slope = float(answer_of[id(t)] == b) - chances[b]
                found[b] += math.prod(chances[a] for a in drawn) * weight * t.advantage * slope
    passes = 0.5  # 0.1 + 0.4
    expected = [2 * (1 - passes) * p * (r - passes) for p, r in zip(chances, right, strict=True)]
    assert found == pytest.approx(expected)


class Recorder(MockTrainingClient):
    """Writes down the temperature of every pass."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.temperatures: list[float] = []

    def forward_backward(self, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        self.temperatures.append((loss_fn_config or {})["temperature"])
        return super().forward_backward(data, loss_fn, loss_fn_config)


def test_the_temperature_goes_from_its_beginning_to_its_end() -> None:
    """Three steps from 1 to 2: sampled and learned from at 1, 1.5 and 2; the log-probs of both agree."""
    client = Recorder(make_trainer().parts.client.policy)
    trainer = make_trainer(client, algorithm="reinforce", steps=3, temperature_end=2.0)
    schedule = Synchronous(trainer)
    rows = [schedule.learn(step) for step in range(3)]
    assert client.temperatures == [1.0, 1.5, 2.0]
    assert [row[0]["rollout/temperature"] for row in rows] == [1.0, 1.5, 2.0]
    assert [row[1].batch[0].temperature for row in rows] == [1.0, 1.5, 2.0]
    assert max(row[0]["sampling/sampling_logp_difference/max"] for row in rows) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature_end": 0.0}, r"training.temperature_end=0.0, expected a number above 0"),
        ({"temperature_end": 1.0}, "is rollout.temperature too, so nothing changes"),
        ({"temperature_end": 2.0, "schedule": "fixed_lag"}, "use schedule=sync"),
        ({"algorithm": "pass_at_k", "group_size": 3}, r"group_size=3 has no signal.*pass_at_k.* >= 4"),
    ],
)
def test_what_cannot_explore_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**options)
