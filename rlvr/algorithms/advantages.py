"""Advantage estimators and reductions: plain functions over trajectories, no torch.

An estimator sets `advantage` on every trajectory whose reward is known. A baseline counts rollouts, not trajectories:
where a rewritten history made several trajectories of one rollout, the rollout counts once. A reward of None enters
no baseline and gets advantage 0.

Legend: r_i reward of rollout i, G its group, N rollouts in the batch, std is the population's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlvr.types import Trajectory, group_by, mean, std

Estimator = Callable[[Sequence[Trajectory]], None]
EPSILON = 1e-6  # TRL's and verl's addend to a standard deviation


def rollout_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The known reward of each rollout. A trajectory without `rollout_id` is a rollout of its own."""
    rewards: dict[str, float] = {}
    for i, trajectory in enumerate(trajectories):
        if trajectory.reward is not None:
            rewards[trajectory.rollout_id or f"#{i}"] = trajectory.reward
    return rewards


def _assign(trajectories: Sequence[Trajectory], baseline: float, scale: float = 1.0) -> None:
    for trajectory in trajectories:
        trajectory.advantage = 0.0 if trajectory.reward is None else (trajectory.reward - baseline) / scale


def group_mean(trajectories: Sequence[Trajectory]) -> None:
    """A_i = r_i - mean_G(r). Dr. GRPO, arXiv:2503.20783: no division by the group's std, which favours the extremes."""
    for group in group_by(trajectories, lambda t: t.group_id).values():
        _assign(group, mean(list(rollout_rewards(group).values())))


def group_normalized(trajectories: Sequence[Trajectory]) -> None:
    """A_i = (r_i - mean_G(r)) / (std_G(r) + 1e-6). GRPO, arXiv:2402.03300, section 4.1.2."""
    for group in group_by(trajectories, lambda t: t.group_id).values():
        rewards = list(rollout_rewards(group).values())
        _assign(group, mean(rewards), std(rewards) + EPSILON)


def batch_mean(trajectories: Sequence[Trajectory]) -> None:
    """A_i = r_i - mean over the batch. REINFORCE with a constant baseline, Williams 1992."""
    _assign(trajectories, mean(list(rollout_rewards(trajectories).values())))


def batch_normalized(trajectories: Sequence[Trajectory]) -> None:
    """A_i = (r_i - mean) / (std + 1e-6) over the batch: advantage normalisation as commonly done in PPO."""
    rewards = list(rollout_rewards(trajectories).values())
    _assign(trajectories, mean(rewards), std(rewards) + EPSILON)


ESTIMATORS: dict[str, Estimator] = {
    "group_mean": group_mean,
    "group_normalized": group_normalized,
    "batch_mean": batch_mean,
    "batch_normalized": batch_normalized,
}


def token_mean(trajectories: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """1 / T for T sampled tokens in the whole batch: every token counts alike. DAPO, arXiv:2503.14476, eq. 8."""
    total = sum(t.num_action_tokens for t in trajectories)
    return [1.0 / total if total else 0.0] * len(trajectories)


def sequence_mean(trajectories: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """1 / (N len_i): every answer counts alike, so tokens of short answers weigh more. GRPO, arXiv:2402.03300."""
    count = len(trajectories)
    return [1.0 / (count * t.num_action_tokens) if t.num_action_tokens else 0.0 for t in trajectories]


def constant(trajectories: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """1 / (N M) for a budget of M tokens: no length in it at all. Dr. GRPO, arXiv:2503.20783, appendix."""
    return [1.0 / (len(trajectories) * max_tokens)] * len(trajectories)


def sequence_sum(trajectories: Sequence[Trajectory], max_tokens: int) -> list[float]:
    """1 / N: the mean over answers of the summed token losses, the textbook policy gradient."""
    return [1.0 / len(trajectories)] * len(trajectories)


Reduction = Callable[[Sequence[Trajectory], int], list[float]]
REDUCTIONS: dict[str, Reduction] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
    "sequence_sum": sequence_sum,
}


def teaches(group: Sequence[Trajectory]) -> bool:
    """Whether a group's known rewards differ: with a group baseline, equal rewards give no gradient."""
    rewards = set(rollout_rewards(group).values())
    return len(rewards) > 1
