"""ECHO: the policy also learns to predict what the environment answers, beside the loss of its own tokens.

    L = L_policy(sampled tokens) + coefficient x L_env(observation tokens),   L_env a reduced sum of -log p(o_t)

Shrivastava et al. 2026, arXiv:2605.24517. Observation tokens are those of a response that the policy did not sample:
what the environment wrote, with the tokens that a chat template puts around it. They are reduced as the algorithm
reduces sampled tokens, counting observations alone: with `sequence_mean` each episode counts with the mean over its
observation tokens, as in the paper. Their log-probs come from the pass that the policy's loss needs anyway, and
episodes without an advantage learn from them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.algorithms.losses.loss import CROSS_ENTROPY_INPUT
from rlvr.algorithms.terms.term import Reduce, Row, Term, TrainedTokens
from rlvr.core.protocols import Feature
from rlvr.core.types import Trajectory
from rlvr.core.variants import setting


@dataclass(frozen=True)
class Observation(Term):
    """`coef` weighs the cross-entropy of the tokens that the environment wrote after the policy's turns, reduced over
    them as the reduction says (ECHO, arXiv:2605.24517, with 0.05). Episodes of equal rewards have a gradient by it.
    """

    name = "observation"
    switch = "coef"
    has_gradient = True
    why_not_given = "learns from what an environment answers, and given completions have no environment"

    coef: float = setting(low=0, expected="at least 0 (0.05 is usual)", flat="observation_coef")

    @property
    def needs(self) -> tuple[Feature, ...]:
        return (Feature.EXTRA_INPUTS,)

    def used_key(self) -> tuple[str, str]:
        return self.key_of_switch, "set it to 0"

    def check_turns(self, max_turns: int) -> None:
        if max_turns < 2:
            raise ValueError(
                f"{self.key(self.switch)}={self.coef:g} has no effect: episodes of this environment have one turn, so "
                "it writes no tokens after the policy's; leave it out, or choose an environment of several turns"
            )

    def weigh_step(self, selected: Sequence[Trajectory], weights: Sequence[float], reduce: Reduce) -> None:
        own = reduce(lambda t: t.num_observation_tokens)
        for t, weight, observed in zip(selected, weights, own, strict=True):
            t.observation_weight = observed / weight if weight and t.num_observation_tokens else 0.0

    def weigh(self, row: Row) -> None:
        weight = self.coef * row.weight * row.trajectory.observation_weight
        row.observed[CROSS_ENTROPY_INPUT] = weight * np.ones(len(row.logprobs))

    def measure(self, trained: TrainedTokens) -> tuple[float, np.ndarray | None]:
        if not len(trained.observed):
            return 0.0, None
        return -float((trained.observed_weight * trained.observed).sum()), -trained.observed

    def describe(self) -> str:
        return f"observations at {self.coef:g}"
