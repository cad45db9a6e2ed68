"""Penalties subtracted from a reward before the advantage.

`Trajectory.penalty` holds the sum; `reward` stays as the verifiers gave it. A rollout of several trajectories is
penalized once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.algorithms.specs import Algorithm
from rlvr.algorithms.terms.term import Logprobs
from rlvr.core.types import Trajectory


def penalize(
    trajectories: Sequence[Trajectory],
    algorithm: Algorithm,
    max_tokens: int,
    old_logprobs: Logprobs = lambda trajectory: None,
) -> None:
    """Set every `penalty`: the sum of those of the algorithm's terms.

    `old_logprobs` gives the trainer's log-probs [R] of a trajectory before the step, if there are any.
    """
    penalize_length(trajectories, algorithm, max_tokens)
    for term in algorithm.terms:
        if not term.is_known_when_judged:
            term.penalize(trajectories, algorithm, max_tokens, old_logprobs)


def penalize_length(trajectories: Sequence[Trajectory], algorithm: Algorithm, max_tokens: int) -> None:
    """Set every `penalty` to what is known of it as soon as a completion was judged: that of its length."""
    for t in trajectories:
        t.penalty = t.length_penalty = 0.0
        t.token_penalties = []
    for one, part in algorithm.split(trajectories):
        for term in one.terms:
            if term.is_known_when_judged:
                term.penalize(part, one, max_tokens, lambda trajectory: None)
