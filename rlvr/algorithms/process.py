"""Process rewards: an advantage for every turn, from what the turns of an episode earned. Plain functions, no torch.

`Trajectory.turn_rewards` holds what each turn earned: what the environment gave after it (`StepResult.reward`), and
what a verifier says of it (`Score.turns`). The rest of the reward, less its penalties, counts at the episode's last
turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlvr.core.types import Trajectory, group_by, mean, std

EPSILON = 1e-6


@dataclass
class Turn:
    """A turn of the policy: its trajectory, where it begins and ends in the response, and what it earned."""

    trajectory: Trajectory
    start: int
    end: int
    value: float


def list_turns(parts: Sequence[Trajectory]) -> list[Turn]:
    """The turns of a rollout with the trajectories `parts`, in order; their values add up to its return."""
    turns: list[Turn] = []
    for t in parts:
        starts = t.turn_starts or [0]
        ends = [*starts[1:], len(t.response_tokens)]
        values = t.turn_rewards or [0.0] * len(starts)
        turns += [Turn(t, *turn) for turn in zip(starts, ends, values, strict=True)]
    last = parts[-1]
    assert last.reward is not None
    turns[-1].value += last.reward - last.penalty - math.fsum(value for t in parts for value in t.turn_rewards)
    return turns


def process_normalized(trajectories: Sequence[Trajectory]) -> None:
    """A of a turn is the sum of (r - mean_G(r)) / (std_G(r) + 1e-6) over it and the later turns of its episode.

    r is what a turn earned, with mean and std over all turns of the group. GRPO's process supervision,
    arXiv:2402.03300, section 4.1.3.
    """
    for group in group_by(trajectories, lambda t: t.group_id).values():
        rollouts: dict[str, list[Trajectory]] = {}
        for i, t in enumerate(group):
            t.advantage, t.token_advantages = 0.0, [0.0] * len(t.response_tokens)
            if t.reward is not None and not t.is_empty:
                rollouts.setdefault(t.rollout_id or f"#{i}", []).append(t)
        episodes = [list_turns(parts) for parts in rollouts.values()]
        values = sorted(turn.value for turns in episodes for turn in turns)  # in any order of the group the same bits
        centre, scale = mean(values), std(values) + EPSILON
        for turns in episodes:
            advantage = 0.0
            for turn in reversed(turns):
                advantage += (turn.value - centre) / scale
                t = turn.trajectory
                for place in range(turn.start, turn.end):
                    t.token_advantages[place] = advantage * t.action_mask[place]  # 0 where the environment wrote
        for t in (t for parts in rollouts.values() for t in parts):
            t.advantage = mean([a for a, acted in zip(t.token_advantages, t.action_mask, strict=True) if acted])
