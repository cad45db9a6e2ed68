"""Penalties subtracted from a reward before the advantage: a KL penalty, and one for overlong completions.

`Trajectory.penalty` holds the sum; `reward` stays as the verifiers gave it. A rollout of several trajectories is
penalized once for all of them. Exercised by `python -m pytest tests/test_shaping.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlvr.algorithms.loss_specs import MAX_LOG_RATIO
from rlvr.algorithms.specs import Algorithm
from rlvr.core.messages import ModelInput
from rlvr.core.types import Trajectory

# d = log reference - log policy of sampled tokens. http://joschu.net/blog/kl-approx.html
KL_TERMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda d: -d,
    "k2": lambda d: 0.5 * d * d,
    "k3": lambda d: np.exp(np.minimum(d, MAX_LOG_RATIO)) - 1.0 - d,
}


def fill_reference_logprobs(trajectories: Sequence[Trajectory], reference: Any, temperature: float) -> None:
    """Fill `reference_logprobs` by the sampling client `reference`, at the temperature the answers were sampled at."""
    scored = [t for t in trajectories if t.reward is not None and not t.is_empty]
    for t, logprobs in zip(scored, compute_sampler_logprobs(scored, reference, temperature), strict=True):
        t.reference_logprobs = logprobs


def compute_sampler_logprobs(trajectories: Sequence[Trajectory], sampler: Any, temperature: float) -> list[list[float]]:
    """The log-probs [R] of every completion under a sampling client.

    All are requested before one is read, so that a client may compute them together.
    """
    for t in trajectories:
        t.require_trainable()
    futures = [sampler.compute_logprobs(ModelInput(t.full_tokens), temperature) for t in trajectories]
    pairs = zip(trajectories, futures, strict=True)
    return [[float(x) for x in future.result()[len(t.prompt_tokens) :]] for t, future in pairs]


def token_kl(trajectory: Trajectory, estimator: str, old: Sequence[float] | None = None) -> np.ndarray:
    """The k [R] of every sampled token, 0 elsewhere, between the policy that sampled (or the trainer's, `old` [R]) and
    the reference."""
    policy = np.asarray(trajectory.logprobs if old is None else old)
    d = np.asarray(trajectory.reference_logprobs) - policy
    return KL_TERMS[estimator](d) * np.asarray(trajectory.action_mask)


def overlong_share(tokens: int, budget: int, buffer: int) -> float:
    """0 up to `budget - buffer` tokens, then linearly up to 1 at the budget. DAPO, arXiv:2503.14476, eq. 13."""
    return min(1.0, max(0.0, (tokens - (budget - buffer)) / buffer))


def longest_turn(trajectory: Trajectory) -> int:
    """The number of tokens in the longest turn of the policy, which is what the budget `max_tokens` bounds."""
    longest = run = 0
    for acted in trajectory.action_mask:
        run = run + 1 if acted else 0
        longest = max(longest, run)
    return longest


def penalize_length(trajectories: Sequence[Trajectory], algorithm: Algorithm, max_tokens: int) -> None:
    """Set every `penalty` to that of an overlong completion, which is known as soon as it was judged."""
    for parts in _group_rollouts(trajectories):
        penalty = 0.0
        if algorithm.overlong_buffer and parts[0].reward is not None:
            longest = max(longest_turn(t) for t in parts)
            penalty = algorithm.overlong_penalty * overlong_share(longest, max_tokens, algorithm.overlong_buffer)
        for t in parts:
            t.penalty = t.length_penalty = penalty
            t.token_penalties = []


def _group_rollouts(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    rollouts: dict[str, list[Trajectory]] = {}
    for index, t in enumerate(trajectories):
        rollouts.setdefault(t.rollout_id or f"#{index}", []).append(t)
    return list(rollouts.values())


def penalize(
    trajectories: Sequence[Trajectory],
    algorithm: Algorithm,
    max_tokens: int,
    old_logprobs: Callable[[Trajectory], Sequence[float] | None] = lambda trajectory: None,
) -> None:
    """Set every `penalty`: kl_coef x sum of k, if the KL goes into the reward, plus the overlong penalty.

    With a critic each token pays for its own k (`token_penalties`), as in InstructGPT, arXiv:2203.02155, and so it does
    in REINFORCE++, arXiv:2501.03262.
    `old_logprobs` gives the trainer's log-probs [R] of a trajectory before the step, if there are any.
    """
    penalize_length(trajectories, algorithm, max_tokens)
    if not (algorithm.kl_coef and algorithm.kl_in == "reward"):
        return
    for parts in _group_rollouts([t for t in trajectories if t.reward is not None]):
        kl = [algorithm.kl_coef * token_kl(t, algorithm.kl_estimator, old_logprobs(t)) for t in parts]
        total = sum(float(k.sum()) for k in kl)
        for t, k in zip(parts, kl, strict=True):
            t.penalty += total
            t.token_penalties = k.tolist() if algorithm.has_token_penalties else []
