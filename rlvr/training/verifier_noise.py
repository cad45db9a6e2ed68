"""Wrong verdicts on purpose: what false positives and false negatives of a verifier do to learning.

`training.false_positives` is the chance that a completion which did not pass is rewarded like one that did (1), and
`false_negatives` that one which passed is not (0). The same completion of a task is always judged alike, as by a real
verifier. With `noise_correction` every reward r becomes (r - fp) / (1 - fp - fn), whose mean over the noise is the true
reward of 0 or 1 (Natarajan et al. 2013, "Learning with noisy labels"). It shifts and scales all rewards alike. A
baseline takes the shift away, and a standard deviation or AdamW the scale (docs/train/learning-signals.md). The
verdicts in metrics and evaluations stay true.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.core import rng
from rlvr.core.types import Outcome, Trajectory
from rlvr.training.training_options import TrainingOptions


def add_noise(trajectories: Sequence[Trajectory], reward: str, options: TrainingOptions, seed: int) -> None:
    """Change the reward of every judged rollout by the rates of the options; `reward` is the verifier's name."""
    judged = {t.rollout_id: t for t in trajectories}  # the last trajectory of each rollout
    noisy = {id: _judge(t, reward, options, seed) for id, t in judged.items()}
    for t in trajectories:
        t.reward, t.turn_rewards, t.turn_credits, t.reward_parts = noisy[t.rollout_id], [], [], {}


def _judge(trajectory: Trajectory, reward: str, options: TrainingOptions, seed: int) -> float | None:
    value, positives, negatives = trajectory.reward, options.false_positives, options.false_negatives
    if value is None:
        return None
    passed = trajectory.scores[reward].outcome is Outcome.PASSED
    task = trajectory.task.id if trajectory.task else trajectory.prompt
    key = rng.key("verifier noise", seed, task, trajectory.response)
    if rng.uniform(key) < (negatives if passed else positives):
        value = float(not passed)
    return (value - positives) / (1 - positives - negatives) if options.noise_correction else value
