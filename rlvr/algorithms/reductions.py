"""Reductions: how much each trajectory counts in the loss of a batch. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlvr.algorithms.returns import name_rollout
from rlvr.core.types import Trajectory

Count = Callable[[Trajectory], int]


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


Reduction = Callable[..., list[float]]  # of trajectories, the budget of a completion, and what to count
REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
    "sequence_sum": sequence_sum,
}
DIVIDE_BY_BUDGET = frozenset({"constant"})  # of these, those that need the budget of a completion
