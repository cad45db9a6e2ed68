"""What is taken off a reward: the overlong penalty and a KL, by hand; who pays, and that the reward stays."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.penalties import penalize
from rlvr.algorithms.sampler_logprobs import fill_reference_logprobs
from rlvr.algorithms.terms.kl import token_kl
from rlvr.algorithms.terms.overlong import longest_turn, overlong_share
from rlvr.clients.mock.mock_client import MockSamplingClient, TablePolicy
from rlvr.core.types import Trajectory

LN2 = math.log(2.0)


def answer(length: int, reward: float | None = 1.0, rollout: str = "", **more: Any) -> Trajectory:
    tokens = [2] * length
    return Trajectory("p", [1], "r", tokens, [-1.0] * length, reward=reward, rollout_id=rollout, **more)


@pytest.mark.parametrize(
    ("tokens", "share"),
    [(0, 0.0), (11, 0.0), (12, 0.0), (13, 0.25), (14, 0.5), (16, 1.0), (17, 1.0), (400, 1.0)],
)
def test_the_overlong_penalty_by_hand(tokens: int, share: float) -> None:
    """Budget 16, buffer 4: free up to 12, a quarter more with every token to 16, and never more than the whole."""
    assert overlong_share(tokens, 16, 4) == share


def test_a_buffer_as_long_as_the_budget_counts_from_the_first_token() -> None:
    assert [overlong_share(n, 4, 4) for n in (0, 1, 4)] == [0.0, 0.25, 1.0]


def test_the_penalty_is_kept_apart_from_the_reward() -> None:
    """Weight 0.5: 14 of 16 tokens cost 0.25. The reward stays what the verifiers said; written tokens cost nothing."""
    items = [answer(14), answer(14, action_mask=[1] * 12 + [0] * 2), answer(16, 0.0)]
    penalize(items, resolve_algorithm("dapo", overlong_buffer=4, overlong_penalty=0.5), 16)
    assert [t.penalty for t in items] == [0.25, 0.0, 0.5]
    assert [t.reward for t in items] == [1.0, 1.0, 0.0]


def test_a_rollout_of_several_parts_pays_once_and_for_all() -> None:
    """Overlong by its longest part (14 of 16 tokens: a half); its KL is summed over its parts. All of them carry it."""
    items = [answer(3, rollout="a"), answer(14, rollout="a"), answer(2, rollout="b")]
    for t in items:
        t.reference_logprobs = [-1.5] * len(t.logprobs)  # k1 = log p - log ref = 0.5 a token
    row = resolve_algorithm("grpo_original", overlong_buffer=4, kl_coef=0.1)
    penalize(items, row, 16)
    assert [t.penalty for t in items] == pytest.approx([0.5 + 0.1 * 0.5 * 17] * 2 + [0.1 * 0.5 * 2])
    row.select(items)
    earned = [1 - 1.35, 1 - 0.1]
    centre, spread = sum(earned) / 2, abs(earned[0] - earned[1]) / 2 + 1e-6
    expected = [(earned[0] - centre) / spread] * 2 + [(earned[1] - centre) / spread]
    assert [t.advantage for t in items] == pytest.approx(expected)


def test_an_unknown_reward_pays_nothing_and_is_not_asked_about() -> None:
    """Its answer may have no tokens at all."""
    items = [answer(16), Trajectory("p", [], "r", [], reward=None)]
    sampler = MockSamplingClient(TablePolicy(["a"]))
    fill_reference_logprobs(items, sampler, 1.0)
    penalize(items, resolve_algorithm("dapo", overlong_buffer=4, kl_coef=0.1), 16)
    assert items[0].penalty > 0 and items[1].penalty == 0.0 and items[1].reference_logprobs == []


def test_penalties_are_made_anew_each_time() -> None:
    """A batch that is used again under another algorithm keeps nothing of the first."""
    items = [answer(16), answer(16)]
    penalize(items, resolve_algorithm("dapo", overlong_buffer=4), 16)
    items[1].reward = None
    penalize(items, resolve_algorithm("dapo"), 16)
    assert [t.penalty for t in items] == [0.0, 0.0]


@pytest.mark.parametrize(("estimator", "one"), [("k1", -LN2), ("k2", LN2**2 / 2), ("k3", 1 - LN2)])
def test_the_kl_of_an_answer_by_hand(estimator: str, one: float) -> None:
    """Two sampled tokens with log ref - log p = ln 2, one with 0, and a written one that does not count."""
    t = answer(4, action_mask=[1, 1, 1, 0])
    t.logprobs, t.reference_logprobs = [-1.0, -2.0, -1.0, 0.0], [-1.0 + LN2, -2.0 + LN2, -1.0, -7.0]
    assert token_kl(t, estimator).sum() == pytest.approx(2 * one)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_reference_is_asked_at_the_temperature_of_sampling(temperature: float) -> None:
    """The divergence of a policy from itself is nothing, at any temperature, for every estimator."""
    policy = TablePolicy(["a", "b", "c"], seed=1, spread=3.0)
    sampler = MockSamplingClient(policy)
    items = [answer(3)]
    items[0].response_tokens = [2, 3, 4]
    items[0].logprobs = copy.deepcopy(policy).logprobs(temperature)[[2, 3, 4]].tolist()
    fill_reference_logprobs(items, sampler, temperature)
    assert items[0].reference_logprobs == pytest.approx(items[0].logprobs)
    assert [token_kl(items[0], k).sum() for k in ("k1", "k2", "k3")] == pytest.approx([0.0] * 3, abs=1e-12)
    if temperature != 1.0:
        fill_reference_logprobs(items, sampler, 1.0)
        assert token_kl(items[0], "k3").sum() > 0.01


def test_all_answers_are_asked_about_before_one_is_read() -> None:
    """So that a client may compute them together."""
    order: list[str] = []

    class RecordedResult:
        def __init__(self, length: int) -> None:
            self.length = length

        def result(self) -> list[float | None]:
            order.append("read")
            return [None, *[-1.0] * (self.length - 1)]

    class Reference:
        def compute_logprobs(self, prompt: Any, temperature: float = 1.0) -> RecordedResult:
            order.append("ask")
            return RecordedResult(prompt.length)

    fill_reference_logprobs([answer(1), answer(2), answer(3)], Reference(), 1.0)
    assert order == ["ask"] * 3 + ["read"] * 3


def test_the_budget_bounds_a_turn_not_the_turns_together() -> None:
    """Two turns of 40 tokens with 3 of the environment between them: 40 of a budget of 64 are no overlong answer."""
    mask = [1] * 40 + [0] * 3 + [1] * 40
    turns = Trajectory("p", [1], "r", [2] * 83, [-1.0] * 83, action_mask=mask, reward=1.0)
    assert longest_turn(turns) == 40
    penalize([turns], resolve_algorithm("ppo", overlong_buffer=16), 64)
    assert turns.penalty == 0.0
    penalize([turns], resolve_algorithm("ppo", overlong_buffer=32), 64)
    assert turns.penalty == 0.25


def test_with_the_trainers_log_probs_the_divergence_is_the_trained_policys() -> None:
    """k1 by hand: -(ref - old) summed, the sampler's own log-probs aside."""
    t = Trajectory("p", [1], "r", [2, 3], [-1.0, -1.0], reward=1.0, reference_logprobs=[-2.0, -3.0])
    assert token_kl(t, "k1").sum() == 3.0 and token_kl(t, "k1", [-1.5, -2.5]).sum() == 1.0
    penalize([t], resolve_algorithm("ppo", kl_coef=0.5), 8, lambda trajectory: [-1.5, -2.5])
    assert t.penalty == 0.5
