"""What an algorithm takes off a reward before the advantage: a KL penalty, and a penalty for overlong answers.

`Trajectory.penalty` holds it, beside the reward as the verifiers gave it. A rollout of several trajectories pays once,
for all of them. Exercised by `python -m pytest tests/test_shaping.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlvr.algorithms.rows import Algorithm
from rlvr.messages import ModelInput
from rlvr.types import Trajectory

# d = log reference - log policy of tokens that the policy sampled. http://joschu.net/blog/kl-approx.html
KL_TERMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * d * d,
    "k3": lambda d: np.exp(d) - 1.0 - d,
}


def compare_with_reference(trajectories: Sequence[Trajectory], reference: Any, temperature: float) -> None:
    """Fill `reference_logprobs` by the sampling client `reference`, at the temperature the answers were sampled at.

    All are asked for before one is read, so that a client may compute them together.
    """
    asked = [t for t in trajectories if t.reward is not None and not t.over_at_once]
    for t in asked:
        t.require_trainable()
    how = {} if temperature == 1.0 else {"temperature": temperature}
    futures = [reference.compute_logprobs(ModelInput(t.full_tokens), **how) for t in asked]
    for t, future in zip(asked, futures, strict=True):
        t.reference_logprobs = [float(x) for x in future.result()[len(t.prompt_tokens) :]]


def kl_of(trajectory: Trajectory, estimator: str, old: Sequence[float] | None = None) -> float:
    """The sum over sampled tokens of k, between the policy and the reference.

    The policy is the one that sampled; with `old` [R], the trainer's own log-probs, the one that is trained.
    """
    policy = np.asarray(trajectory.logprobs if old is None else old)
    d = np.asarray(trajectory.reference_logprobs) - policy
    return float((KL_TERMS[estimator](d) * np.asarray(trajectory.action_mask)).sum())


def overlong(tokens: int, budget: int, buffer: int) -> float:
    """0 up to `budget - buffer` tokens, then linearly up to 1 at the budget. DAPO, arXiv:2503.14476, eq. 13."""
    return min(1.0, max(0.0, (tokens - (budget - buffer)) / buffer))


def longest_turn(trajectory: Trajectory) -> int:
    """Tokens of the longest stretch that the policy sampled without a break: what the budget of an answer bounds."""
    longest = run = 0
    for acted in trajectory.action_mask:
        run = run + 1 if acted else 0
        longest = max(longest, run)
    return longest


def penalize(
    trajectories: Sequence[Trajectory],
    algorithm: Algorithm,
    max_tokens: int,
    before: Mapping[int, Sequence[float]] | None = None,
) -> None:
    """Set every `penalty`: kl_coef x sum of k, where the KL goes into the reward, plus the overlong penalty.

    `before` holds the trainer's log-probs [R] by the trajectory's id(), where there are any.
    """
    in_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
    rollouts: dict[str, list[Trajectory]] = {}
    for index, t in enumerate(trajectories):
        t.penalty = 0.0
        if t.reward is not None:
            rollouts.setdefault(t.rollout_id or f"#{index}", []).append(t)
    for parts in rollouts.values():
        penalty = 0.0
        if in_reward:
            old = before or {}
            penalty += algorithm.kl_coef * sum(kl_of(t, algorithm.kl_estimator, old.get(id(t))) for t in parts)
        if algorithm.overlong_buffer:
            longest = max(longest_turn(t) for t in parts)
            penalty += algorithm.overlong_penalty * overlong(longest, max_tokens, algorithm.overlong_buffer)
        for t in parts:
            t.penalty = penalty
