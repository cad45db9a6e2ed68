"""Generalised advantage estimation over the tokens that the policy sampled. Schulman et al. 2016, arXiv:1506.02438.

    delta_t = r_t + gamma V(s_t+1) - V(s_t)        A_t = delta_t + gamma lambda A_t+1

An action is a sampled token, and time runs over the actions of a whole episode: what an environment writes between two
turns is part of the next state, and so is a rewritten history. What a turn earned (`rlvr.algorithms.process`) counts at
its last token, and a KL penalty (`kl_in=reward`) at each token; the rest of the reward, less other penalties, counts at
the episode's last token. After that token the value is 0; where the token budget cut the episode off, it is the
critic's, since the episode was not over (arXiv:1712.00378), unless `algorithm.bootstrap_truncated` is false. Plain
functions, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlvr.algorithms.process import list_turns
from rlvr.core.types import Trajectory, mean


def compute_gae(
    rewards_T: Sequence[float], values_T: Sequence[float], last_value: float, gamma: float, lam: float
) -> np.ndarray:
    """The advantages [T] of T actions in a row; `last_value` is the value of the state after the last one."""
    return compute_returns(rewards_T, values_T, last_value, gamma, lam) - values_T


def compute_returns(
    rewards_T: Sequence[float], values_T: Sequence[float], last_value: float, gamma: float, lam: float
) -> np.ndarray:
    """The returns A_t + V_t [T], by G_t = r_t + gamma ((1 - lambda) V_t+1 + lambda G_t+1), G_T = V_T = `last_value`.

    With lambda 1 no other value enters, not even by rounding: equal rewards give equal returns.
    """
    returns_T, next_return, next_value = np.zeros(len(rewards_T)), last_value, last_value
    for t in range(len(rewards_T) - 1, -1, -1):
        next_return = rewards_T[t] + gamma * ((1 - lam) * next_value + lam * next_return)
        returns_T[t], next_value = next_return, values_T[t]
    return returns_T


def split_reward(parts: Sequence[Trajectory]) -> list[float]:
    """The reward of each sampled token of a rollout with the trajectories `parts`, in order; the sum is its return."""
    rewards = [[0.0] * t.num_action_tokens for t in parts]
    own = {id(t): of_tokens for t, of_tokens in zip(parts, rewards, strict=True)}
    for turn in list_turns(parts):
        own[id(turn.trajectory)][max(0, sum(turn.trajectory.action_mask[: turn.end]) - 1)] += turn.value
    for t in parts:  # `list_turns` takes all penalties off the last turn: move those of single tokens to their tokens
        costs = [cost for cost, acted in zip(t.token_penalties, t.action_mask, strict=False) if acted]
        for place, cost in enumerate(costs):
            own[id(t)][place] -= cost
        rewards[-1][-1] += math.fsum(costs)
    return [reward for of_tokens in rewards for reward in of_tokens]


def gae(
    trajectories: Sequence[Trajectory],
    gamma: float = 1.0,
    lam: float = 1.0,
    bootstrap_truncated: bool = True,
    critic_lam: float = 1.0,
) -> None:
    """A_t = sum_k (gamma lambda)^k delta_t+k over the sampled tokens of an episode, delta_t = r_t + gamma V_t+1 - V_t.

    V are the values of a critic. Schulman et al. 2016, arXiv:1506.02438. With gamma = lambda = 1 it is
    the sum of the remaining rewards minus the value. The critic learns A_t + V_t with the lambda `critic_lambda`
    (arXiv:2503.01491).
    """
    rollouts: dict[str, list[Trajectory]] = {}
    for i, t in enumerate(trajectories):
        t.advantage, t.token_advantages, t.returns = 0.0, [0.0] * len(t.response_tokens), [0.0] * len(t.response_tokens)
        if t.reward is not None and t.num_action_tokens:
            rollouts.setdefault(t.rollout_id or f"#{i}", []).append(t)
    for parts in rollouts.values():
        if any(len(t.values) != len(t.response_tokens) + 1 for t in parts):
            raise ValueError("algorithm.advantage=gae needs the values of a critic: give UpdateInputs(critic=...)")
        actions = [(t, i) for t in parts for i, acted in enumerate(t.action_mask) if acted]
        last_value = parts[-1].values[-1] if bootstrap_truncated and parts[-1].truncated else 0.0
        values = [t.values[i] for t, i in actions]
        rewards = split_reward(parts)
        advantages = compute_gae(rewards, values, last_value, gamma, lam)
        returns = compute_returns(rewards, values, last_value, gamma, critic_lam)
        for (t, i), advantage, earned in zip(actions, advantages.tolist(), returns.tolist(), strict=True):
            t.token_advantages[i], t.returns[i] = advantage, earned
        for t in parts:
            t.advantage = mean([a for a, acted in zip(t.token_advantages, t.action_mask, strict=True) if acted])
