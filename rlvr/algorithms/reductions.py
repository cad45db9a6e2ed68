"""Reductions: how much each trajectory counts in the loss of a batch. No torch.

A function of a user's is registered (`register_reduction`), or named by its path `package.module:function`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlvr.algorithms.returns import name_rollout
from rlvr.core.error_text import describe_raise
from rlvr.core.registry import Registry, load_path
from rlvr.core.types import Trajectory

Count = Callable[[Trajectory], int]
Reduction = Callable[..., list[float]]  # of trajectories, the budget of a completion, and what to count
OwnReduction = Callable[[list[int], int], Sequence[float]]


def count_sampled(trajectory: Trajectory) -> int:
    """The tokens that a loss of the policy counts."""
    return trajectory.num_action_tokens


def token_mean(trajectories: Sequence[Trajectory], max_tokens: int, count: Count = count_sampled) -> list[float]:
    """1 / T for T sampled tokens in the whole batch: every token counts alike. DAPO, arXiv:2503.14476, eq. 8."""
    total = sum(map(count, trajectories))
    return [1.0 / total if total else 0.0] * len(trajectories)


def sequence_mean(trajectories: Sequence[Trajectory], max_tokens: int, count: Count = count_sampled) -> list[float]:
    """1 / (N len_i): every completion counts alike, so tokens of short ones weigh more. GRPO, arXiv:2402.03300."""
    lengths: dict[str, int] = {}
    for i, t in enumerate(trajectories):
        lengths[name_rollout(i, t)] = lengths.get(name_rollout(i, t), 0) + count(t)
    own = [lengths[name_rollout(i, t)] for i, t in enumerate(trajectories)]
    return [1.0 / (len(lengths) * length) if length else 0.0 for length in own]


def constant(trajectories: Sequence[Trajectory], max_tokens: int, count: Count = count_sampled) -> list[float]:
    """1 / (N M) for a budget of M tokens: independent of lengths. Dr. GRPO, arXiv:2503.20783, appendix."""
    return [1.0 / (_count_rollouts(trajectories) * max_tokens)] * len(trajectories)


def sequence_sum(trajectories: Sequence[Trajectory], max_tokens: int, count: Count = count_sampled) -> list[float]:
    """1 / N: the mean over completions of the summed token losses, the textbook policy gradient."""
    return [1.0 / _count_rollouts(trajectories)] * len(trajectories)


def _count_rollouts(trajectories: Sequence[Trajectory]) -> int:
    """N: the number of rollouts, each counted once."""
    return len({name_rollout(i, t) for i, t in enumerate(trajectories)})


REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
    "sequence_sum": sequence_sum,
}
_WITHOUT_BUDGET = ("token_mean", "sequence_mean", "sequence_sum")
_known: Registry[Reduction] = Registry("algorithm.reduction")
for _name, _reduction in REDUCTIONS.items():
    _known.add(_name, _reduction, _reduction)


def register_reduction(name: str) -> Callable[[OwnReduction], OwnReduction]:
    """Register `function(lengths, max_tokens) -> weights` under `name`, for `algorithm.reduction=name`.

    It gets the number of sampled tokens of each completion of an optimizer step, and the budget of a completion. It
    gives the weight of each token of a completion: `[1 / sum(lengths)] * len(lengths)` is `token_mean`.
    """

    def register(function: OwnReduction) -> OwnReduction:
        _known.add(name, _adapt(name, function), function)
        return function

    return register


def find_reduction(name: object) -> Reduction:
    """The reduction of that name, or at the path `package.module:function`; ValueError if there is none."""
    if not isinstance(name, str):
        raise ValueError(f"algorithm.reduction={name!r:.80}, expected a name or a path 'package.module:function'")
    return _adapt(name, load_path("algorithm.reduction", name)) if ":" in name else _known.get(name)


def needs_budget(name: str) -> bool:
    """Whether a reduction reads the budget of a completion; those of users may."""
    return name not in _WITHOUT_BUDGET


def _adapt(name: str, function: OwnReduction) -> Reduction:
    """A function of lengths as one of trajectories: those of one rollout are one completion."""

    def reduce(trajectories: Sequence[Trajectory], max_tokens: int, count: Count = count_sampled) -> list[float]:
        rollouts = [name_rollout(i, t) for i, t in enumerate(trajectories)]
        lengths = dict.fromkeys(rollouts, 0)
        for rollout, t in zip(rollouts, trajectories, strict=True):
            lengths[rollout] += count(t)
        try:
            weights = [float(weight) for weight in function(list(lengths.values()), max_tokens)]
        except Exception as error:
            raise ValueError(
                f"algorithm.reduction={name} raised {describe_raise(error)}; correct the function"
            ) from error
        if len(weights) != len(lengths) or not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise ValueError(
                f"algorithm.reduction={name}: expected {len(lengths)} weights of at least 0, got {weights!r:.200}"
            )
        of_rollout = dict(zip(lengths, weights, strict=True))
        return [of_rollout[rollout] for rollout in rollouts]

    return reduce
