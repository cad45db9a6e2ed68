"""The environment's own reward, alone or beside a verifier's: what is added is always declared.

    resolve_reward("environment")                            # what the environment gave, and nothing else
    resolve_reward("exact_match").plus_environment(0.5)      # a verifier's value + 0.5 x what the environment gave

In a config: `reward.type=environment`, or `reward.environment_weight=0.5`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlvr.core.types import Outcome, Score, Trajectory
from rlvr.reward.registry import Reward, register_reward, resolve_reward

NAME = "environment"


@register_reward(NAME, batched=True)
def environment(
    prompts: Sequence[str],
    responses: Sequence[str],
    metas: Sequence[Any] | None = None,
    trajectories: Sequence[Trajectory | None] | None = None,
) -> list[Score]:
    """What the environment gave: the sum over the turns, and the reward of a group; a text alone cannot be judged.

    Passed where the environment's metric `correct` is at least 0.5, and without one where its reward is above 0.
    """
    return [_read(trajectory) for trajectory in trajectories or [None] * len(responses)]


def _read(trajectory: Trajectory | None) -> Score:
    if trajectory is None:
        return Score(None, Outcome.INVALID, "no_episode")
    correct, reward = trajectory.metadata.get("correct"), trajectory.reward
    if reward is None or not math.isfinite(reward):
        return Score(None, Outcome.ERROR, "no_reward", detail=f"the environment gave the reward {reward}")
    passed = reward > 0 if correct is None else float(correct) >= 0.5
    branches = [branch.reward for branch in trajectory.branches]
    rewards = () if all(one is None for one in branches) else [reward if one is None else one for one in branches]
    outcome, reason = (Outcome.PASSED, "") if passed else (Outcome.FAILED, NAME)
    return Score(reward, outcome, reason, branches=tuple(rewards))


def combine(trajectory: Trajectory, reward: Reward) -> float | None:
    """The reward of a rollout's last trajectory, judged by `reward`; its `reward` is still what the environment gave.

    A declared environment's part is kept in `scores["environment"]`; where that is no number there is no reward.
    ValueError for a part that is not declared.
    """
    verified, weight = trajectory.scores[reward.name].value, reward.environment_weight
    if verified is None or reward.name == NAME:
        return verified
    if weight is None:
        given = [trajectory.reward, *(branch.reward for branch in trajectory.branches)]
        task = trajectory.task.id if trajectory.task else ""
        check_declared(reward, next((one for one in given if one), 0.0), task)
        return verified
    [given] = resolve_reward(NAME).score([trajectory])
    trajectory.scores[NAME] = given
    if weight == 0:
        return verified
    return None if given.value is None else verified + weight * given.value


def split_reward(trajectory: Trajectory, reward: Reward) -> dict[str, list[float]]:
    """The weight and the value of each reward that `combine` added up, by name; empty where it is one, or none."""
    verdict, weight = trajectory.scores[reward.name], reward.environment_weight
    if verdict.value is None or trajectory.reward is None:
        return {}
    parts = {name: [share, verdict.parts[name]] for name, share in reward.weights.items()}
    if weight:
        parts = parts or {reward.name: [1.0, verdict.value]}
        parts[f"{NAME}#2" if NAME in parts else NAME] = [weight, trajectory.scores[NAME].value or 0.0]
    return parts


def check_declared(reward: Reward, given: float, task: str) -> None:
    """ValueError if an environment gives a reward beside a verifier's, and nothing says what counts."""
    if given and reward.environment_weight is None:
        raise ValueError(
            f"task {task!r}: the environment gave a reward of {given:g}, and the verifier {reward.name!r} gives one "
            "too. Say what counts: reward.environment_weight=1 (or another weight) adds the environment's to the "
            "verifier's, reward.environment_weight=0 leaves it out, reward.type=environment takes it alone"
        )
