"""Returns of rollouts: reward minus penalties, where branches have rewards of their own each of them. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.core.types import Trajectory


def name_rollout(index: int, trajectory: Trajectory) -> str:
    """The rollout of a trajectory at this place of a batch; without an id it is a rollout of its own."""
    return trajectory.rollout_id or f"#{index}"


def rollout_values(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The return of each rollout, reward minus penalty, or of each of its branches that have rewards of their own. A
    trajectory without `rollout_id` is a rollout of its own."""
    return {
        f"{name_rollout(i, t)}#{i}" if t.turn_credits else name_rollout(i, t): read_reward(t) - t.penalty
        for i, t in enumerate(trajectories)
        if t.reward is not None
    }


def read_reward(t: Trajectory) -> float:
    """The reward of a trajectory's branch, which its last turn alone has, or of its rollout."""
    assert t.reward is not None
    return t.turn_credits[-1] if t.turn_credits else t.reward


def has_mixed_returns(group: Sequence[Trajectory]) -> bool:
    """Whether a group's known rewards, less what overlong completions cost, differ. A KL does not count."""
    return len({read_reward(t) - t.length_penalty for t in group if t.reward is not None}) > 1


def has_mixed_rewards(group: Sequence[Trajectory]) -> bool:
    """Whether a group's known rewards differ, as the verifiers gave them: penalties do not count.

    What an algorithm can learn from a group is `Algorithm.has_signal`.
    """
    return len({read_reward(t) for t in group if t.reward is not None}) > 1
