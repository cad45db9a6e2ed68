"""The records that training passes around: what a trainer is built from, and the batch of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.algorithms import Algorithm
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import TaskSource, TrainingClient
from rlvr.core.types import Trajectory, TrajectoryBatch
from rlvr.reward import Reward
from rlvr.training.curriculum import Curriculum
from rlvr.training.training_options import TrainingOptions


@dataclass(frozen=True)
class TrainerParts:
    """What reinforcement learning is made of. The verifiers in `watched` judge too, and change no reward.

    `teacher` is what distillation learns from: a sampling client, or another with its `compute_logprobs`.
    """

    client: TrainingClient
    source: TaskSource
    reward: Reward
    algorithm: Algorithm
    params: SamplingParams
    options: TrainingOptions
    curriculum: Curriculum
    seed: int
    watched: Sequence[Reward] = ()
    teacher: Any = None


@dataclass
class StepBatch:
    """A step's trajectories: `all` enter the statistics, `batch` the update. `waves` of prompts were sampled."""

    all: TrajectoryBatch
    batch: list[Trajectory]
    waves: int = 1
    seconds_sampling: float = 0.0
    seconds_scoring: float = 0.0
