"""Generalised advantage estimation: an episode by hand, TRL's and verl's formulas, turns, parts and truncated ends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.gae import compute_gae, compute_returns, gae, split_reward
from rlvr.algorithms.penalties import penalize
from rlvr.core.types import StopReason, Trajectory


def episode(reward: float | None, values: list[float], mask: list[int] | None = None, **more: Any) -> Trajectory:
    """A trajectory of a prompt token and one response token for every value but the last."""
    length = len(values) - 1
    return Trajectory(
        "p", [1], "r", [2] * length, [-0.5] * length, reward=reward, values=values, action_mask=mask or [], **more
    )


def test_an_episode_by_hand() -> None:
    """Rewards 0, 0, 1, values 0.5, 0.4, 0.8, gamma 0.9, lambda 0.5.

    delta_2 = 1 - 0.8 = 0.2; delta_1 = 0.9 x 0.8 - 0.4 = 0.32; delta_0 = 0.9 x 0.4 - 0.5 = -0.14.
    A_2 = 0.2; A_1 = 0.32 + 0.45 x 0.2 = 0.41; A_0 = -0.14 + 0.45 x 0.41 = 0.0445.
    """
    t = episode(1.0, [0.5, 0.4, 0.8, 9.0])
    gae([t], gamma=0.9, lam=0.5)
    assert t.token_advantages == pytest.approx([0.0445, 0.41, 0.2], abs=1e-15)
    assert t.advantage == pytest.approx((0.0445 + 0.41 + 0.2) / 3)
    assert t.returns == pytest.approx([0.81, 0.9, 1.0]), "what was earned, discounted"
    gae([t], gamma=0.9, lam=0.5, critic_lam=0.5)
    assert t.token_advantages == pytest.approx([0.0445, 0.41, 0.2])
    assert t.returns == pytest.approx([0.5445, 0.81, 1.0]), "advantage and value"


def test_a_truncated_end_goes_on_with_the_critics_value() -> None:
    """The same episode out of tokens, value 0.5 after it: delta_2 = 0.9 x 0.5 + 1 - 0.8 = 0.65; A_1 = 0.32 + 0.45 x
    0.65 = 0.6125; A_0 = -0.14 + 0.45 x 0.6125 = 0.135625. Without the option it ends like any other."""
    t = episode(1.0, [0.5, 0.4, 0.8, 0.5], stop_reason=StopReason.LENGTH)
    gae([t], gamma=0.9, lam=0.5)
    assert t.token_advantages == pytest.approx([0.135625, 0.6125, 0.65], abs=1e-15)
    assert t.returns == pytest.approx([0.81 * 1.45, 0.9 * 1.45, 1.45]), "1 + 0.9 x 0.5 at the end"
    gae([t], gamma=0.9, lam=0.5, bootstrap_truncated=False)
    assert t.token_advantages == pytest.approx([0.0445, 0.41, 0.2], abs=1e-15)
    assert t.returns == pytest.approx([0.81, 0.9, 1.0])


def test_turns_earn_at_their_last_token_and_written_tokens_are_no_time() -> None:
    """Two turns of two tokens with two written tokens between; 0.25 after the first turn, the rest at the end.

    gamma 1, lambda 0: A_t = r_t + V_t+1 - V_t over the sampled tokens, whose values are 0.1, 0.2, 0.3, 0.4.
    """
    t = episode(
        1.0, [0.1, 0.2, 9.0, 9.0, 0.3, 0.4, 9.0], [1, 1, 0, 0, 1, 1], turn_starts=[0, 4], turn_rewards=[0.25, 0.5]
    )
    assert split_reward([t]) == [
        0.0,
        0.25,
        0.0,
        0.75,
    ]  # 1 in all; the second turn's 0.5 and the verifier's 0.25 at the end
    gae([t], gamma=1.0, lam=0.0)
    assert t.token_advantages == pytest.approx([0.1, 0.35, 0.0, 0.0, 0.1, 0.35], abs=1e-15)


def test_a_rollout_of_several_trajectories_is_one_episode() -> None:
    """A history written anew after the first turn: the last value of the first part is that of the next part's first
    token. The penalty counts at the end, once."""
    first = episode(1.0, [0.5, 9.0], rollout_id="r", turn_starts=[0], turn_rewards=[0.25], penalty=0.5)
    second = episode(1.0, [0.7, 0.1, 9.0], rollout_id="r", turn_starts=[0], turn_rewards=[0.0], penalty=0.5)
    assert split_reward([first, second]) == [0.25, 0.0, 0.25]
    gae([first, second], gamma=1.0, lam=0.0)
    assert first.token_advantages == pytest.approx([0.25 + 0.7 - 0.5])
    assert second.token_advantages == pytest.approx([0.1 - 0.7, 0.25 - 0.1])
    first.stop_reason, first.values[-1], second.values[-1] = StopReason.LENGTH, 8.0, 0.5
    gae([first, second], gamma=1.0, lam=0.0)
    assert second.token_advantages[-1] == pytest.approx(0.25 - 0.1), "the episode went on after its first part"
    second.stop_reason = StopReason.LENGTH
    gae([first, second], gamma=1.0, lam=0.0)
    assert second.token_advantages[-1] == pytest.approx(0.25 + 0.5 - 0.1), "the value after the last part"


def test_an_unknown_reward_has_advantage_zero_and_needs_no_values() -> None:
    unknown, known = episode(None, [0.0] * 3), episode(1.0, [0.25, 0.0])
    unknown.values = []
    spec = resolve_algorithm("ppo_critic")
    assert spec.select([unknown, known]) == [known]
    assert (unknown.token_advantages, known.token_advantages) == ([0.0, 0.0], [0.75])
    known.values = []
    with pytest.raises(ValueError, match=r"needs the values of a critic: give UpdateInputs\(critic="):
        spec.select([known])


NUMBERS = st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.booleans()), min_size=1, max_size=12)


@given(NUMBERS)
def test_gamma_and_lambda_of_one_give_the_return_less_the_value(rows: list[tuple[float, float, bool]]) -> None:
    rewards, values = [r for r, _, _ in rows], [v for _, v, _ in rows]
    to_come = [math.fsum(rewards[t:]) for t in range(len(rewards))]
    expected = [g - v for g, v in zip(to_come, values, strict=True)]
    assert compute_gae(rewards, values, 0.0, 1.0, 1.0) == pytest.approx(expected, abs=1e-12)


@given(NUMBERS, st.floats(0, 1), st.floats(0, 1))
def test_it_is_the_sum_of_the_paper(rows: list[tuple[float, float, bool]], gamma: float, lam: float) -> None:
    """arXiv:1506.02438, eq. 16: sum over l of (gamma lambda)^l delta_t+l."""
    rewards, values = [r for r, _, _ in rows], [v for _, v, _ in rows]
    following = [*values[1:], 0.5]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    expected = [sum((gamma * lam) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(deltas))]
    assert compute_gae(rewards, values, 0.5, gamma, lam) == pytest.approx(expected, abs=1e-12)


@given(NUMBERS, st.floats(0, 1), st.floats(0, 1))
def test_returns_are_advantages_and_values_and_equal_rewards_give_equal_ones(
    rows: list[tuple[float, float, bool]], gamma: float, lam: float
) -> None:
    """The policy's recursion of delta_t once more, plus V_t. With lambda 1 a reward at the end alone, undiscounted, is
    every return to the bit, whatever the values."""
    rewards, values = [r for r, _, _ in rows], [v for _, v, _ in rows]
    advantages = advantages_of_trl(np.array(rewards), np.array(values), gamma, lam)
    assert compute_returns(rewards, values, 0.0, gamma, lam) == pytest.approx(advantages + values, abs=1e-12)
    at_end = [*[0.0] * (len(rows) - 1), rewards[-1]]
    assert compute_returns(at_end, values, 0.0, 1.0, 1.0).tolist() == [rewards[-1]] * len(rows)


def advantages_of_trl(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """TRL's former PPO trainer, derived once more: all tokens are actions, and after the last one the value is 0."""
    result, last = np.zeros(len(rewards)), 0.0
    for t in reversed(range(len(rewards))):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        last = (rewards[t] + gamma * after - values[t]) + gamma * lam * last
        result[t] = last
    return result


def advantages_of_verl(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """verl's estimator, derived once more: a token outside the mask hands on what came after it."""
    result, last, after = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            last = (rewards[t] + gamma * after - values[t]) + gamma * lam * last
            after = values[t]
        result[t] = last
    return result


@given(NUMBERS, st.floats(0, 1), st.floats(0, 1))
def test_advantages_are_those_of_trl_and_verl(rows: list[tuple[float, float, bool]], gamma: float, lam: float) -> None:
    """TRL's where every token is an action; verl's on the sampled tokens where some are written by an environment."""
    values = np.array([v for _, v, _ in rows])
    reward = rows[-1][0]
    for mask in (np.ones(len(rows), int), np.array([*(int(m) for _, _, m in rows[:-1]), 1])):
        t = episode(reward, [*values, 7.0], mask.tolist())
        gae([t], gamma=gamma, lam=lam)
        at_end = np.zeros(len(rows))
        at_end[-1] = reward
        verl = advantages_of_verl(at_end, values, mask, gamma, lam)
        assert np.array(t.token_advantages)[mask == 1] == pytest.approx(verl[mask == 1], abs=1e-12)
        if mask.all():
            assert t.token_advantages == pytest.approx(advantages_of_trl(at_end, values, gamma, lam), abs=1e-12)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"gamma": 1.5}, "algorithm.gamma=1.5, expected 0 to 1"),
        ({"gamma": math.nan}, "algorithm.gamma=nan"),
        ({"critic_lambda": 1.1}, "algorithm.critic_lambda=1.1, expected 0 to 1"),
        ({"gae_lambda": -0.1}, "algorithm.gae_lambda=-0.1, expected 0 to 1"),
        ({"mask_truncated": True, "bootstrap_truncated": False}, "bootstrap_truncated=false has no effect with mask"),
        ({"drop_equal_groups": True}, "algorithm.drop_equal_groups=true with the advantage 'gae'"),
    ],
)
def test_options_out_of_range_are_refused(cells: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_algorithm("ppo_critic", **cells)


def test_with_a_kl_in_the_reward_each_token_pays_for_its_own() -> None:
    """k1 = log policy - log reference: 0.5 and -1, coefficient 0.1; the reward 1 and the overlong 0.25 at the end.

    r = (-0.05, 0.1 + 1 - 0.25); gamma 0.9, lambda 0.5, values 0.5, 0.4: delta_1 = 0.85 - 0.4 = 0.45,
    delta_0 = -0.05 + 0.36 - 0.5 = -0.19, A_0 = -0.19 + 0.45 x 0.45. The critic learns 0.85 and -0.05 + 0.9 x 0.85.
    """
    t = episode(1.0, [0.5, 9.0, 0.4, 9.0], [1, 0, 1], reference_logprobs=[-1.0, 0.0, 0.5])
    spec = resolve_algorithm(
        "ppo_critic", kl_coef=0.1, gamma=0.9, gae_lambda=0.5, overlong_buffer=2, overlong_penalty=0.5
    )
    t.logprobs = [-0.5, 0.0, -0.5]
    penalize([t], spec, max_tokens=2)
    assert t.token_penalties == pytest.approx([0.05, 0.0, -0.1])
    assert t.penalty == pytest.approx(-0.05 + 0.5 * 0.5)
    assert split_reward([t]) == pytest.approx([-0.05, 0.85])
    spec.select([t])
    assert t.token_advantages == pytest.approx([0.0125, 0.0, 0.45], abs=1e-12)
    assert t.returns == pytest.approx([0.715, 0.0, 0.85])
    penalize([t], resolve_algorithm("ppo_critic"), max_tokens=2)
    assert (t.penalty, t.token_penalties) == (0.0, []), "nothing stays of an earlier update"


def test_a_rollout_of_several_trajectories_pays_where_its_tokens_are() -> None:
    """The penalty 0.3 - 0.1 is that of both parts; the reward less it is the sum of what the tokens get."""
    parts = [
        episode(1.0, [0.0, 0.0], rollout_id="r", penalty=0.2, token_penalties=[0.3]),
        episode(1.0, [0.0, 0.0, 0.0], rollout_id="r", penalty=0.2, token_penalties=[0.0, -0.1]),
    ]
    assert split_reward(parts) == pytest.approx([-0.3, 0.0, 1.1])


def test_without_a_critic_a_completion_pays_the_sum() -> None:
    t = episode(1.0, [0.0, 0.0, 0.0], reference_logprobs=[-1.0, 0.5])
    penalize([t], resolve_algorithm("reinforce", kl_coef=0.1), max_tokens=2)
    assert t.penalty == pytest.approx(0.1 * (0.5 - 1.0)) and t.token_penalties == []
