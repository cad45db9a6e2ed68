"""Covariance clipping (Clip-Cov): the tokens that would lower the policy's entropy most are not learned from.

    cov_t = (log p_t - mean log p) (A_t - mean A)        means over all T sampled tokens a step learns from

To first order a policy gradient lowers the entropy by the covariance of log-prob and advantage, and a few tokens make
most of it. Of those with lb < cov_t < ub, floor(ratio x T), at least one, are drawn at random. Their advantage becomes
0. Cui et al. 2025, arXiv:2505.22617.

The draw is over the whole batch of a step, before it is cut into optimizer steps, micro-batches or ranks, and from the
log-probs of before the step: so it depends on none of these. (verl draws in each micro-batch, from the log-probs at
that moment; in the first optimizer step they are the same.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.algorithms.part import SpecView
from rlvr.algorithms.terms.term import Logprobs, Preparation, Term
from rlvr.core import rng
from rlvr.core.types import Trajectory
from rlvr.core.variants import setting


@dataclass(frozen=True)
class ClipCovariance(Term):
    """`ratio`: that share of the step's sampled tokens has advantage 0, drawn among those whose covariance of log-prob
    and advantage is above `low` and below `high`. The bounds fit advantages of deviation 1, as `group_normalized`
    gives.
    """

    name = "clip_cov"
    switch = "ratio"
    needs_whole_batch = True

    ratio: float = setting(
        low=0, high=1, expected="a share of the tokens, 0 to 1 (0.0002 is usual)", flat="clip_cov_ratio"
    )
    low: float = setting(1.0, expected="a number", flat="clip_cov_lb")
    high: float = setting(5.0, expected="a number", flat="clip_cov_ub")

    def check(self, algorithm: SpecView) -> None:
        if not self.low < self.high:
            raise ValueError(f"algorithm: clip_cov_lb={self.low:g}, clip_cov_ub={self.high:g}; expected lb < ub")
        if algorithm.advantage.is_never_negative and not any(term.teaches for term in algorithm.terms):
            raise ValueError(
                f"algorithm.clip_cov_ratio={self.ratio:g} has no effect with the advantage "
                f"{algorithm.advantage.name!r}: all advantages are 1, so no token has a covariance; leave it out"
            )

    def adjust(self, selected: Sequence[Trajectory], prepared: Preparation) -> None:
        share = clip_covariance(selected, self, prepared.key, prepared.old_logprobs)
        prepared.measured["clip_ratio/cov_mean"] = share


def compute_covariances(logprobs_T: np.ndarray, advantages_T: np.ndarray) -> np.ndarray:
    """The product [T] of what each token's log-prob and advantage differ from their means."""
    return (logprobs_T - logprobs_T.mean()) * (advantages_T - advantages_T.mean())


def clip_covariance(
    trajectories: Sequence[Trajectory],
    term: ClipCovariance,
    key: int,
    old_logprobs: Logprobs = lambda trajectory: None,
) -> float:
    """Set the advantage of the drawn tokens to 0, in `token_advantages`; their share of the sampled tokens.

    `key` is the randomness of the draw. `old_logprobs` gives the trainer's log-probs [R] before the step, if there are
    any: they take the sampler's place.
    """
    rows = [t for t in trajectories if t.num_action_tokens]
    if not rows:
        return 0.0
    masks = [np.asarray(t.action_mask, dtype=bool) for t in rows]
    advantages = [np.asarray(t.response_advantages) for t in rows]
    logprobs = [np.asarray(t.logprobs if (old := old_logprobs(t)) is None else old) for t in rows]
    logprobs_T, advantages_T = (
        np.concatenate([values[mask] for values, mask in zip(of_rows, masks, strict=True)])
        for of_rows in (logprobs, advantages)
    )
    covariances_T = compute_covariances(logprobs_T, advantages_T)
    candidates = np.flatnonzero((covariances_T > term.low) & (covariances_T < term.high))
    count = max(1, int(term.ratio * len(covariances_T)))
    drawn = np.zeros(len(covariances_T), dtype=bool)
    drawn[candidates[rng.permutation(len(candidates), rng.key("clip_cov", key))[:count]]] = True
    parts = np.split(drawn, np.cumsum([mask.sum() for mask in masks])[:-1])
    for t, mask, values, part in zip(rows, masks, advantages, parts, strict=True):
        if part.any():
            values[np.flatnonzero(mask)[part]] = 0.0
            t.token_advantages = values.tolist()
    return float(drawn.mean())
