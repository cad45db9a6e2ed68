"""What a session of the service is asked for, and how the service learns from sessions: plain options and defaults.

`TrainingConfig` can be set by YAML and by environment (`rlvr.service.settings`). tests/test_service_settings.py
exercises it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TrainingConfig:
    """How sessions run and what is learned from them.

    `max_iterations` and `min_confidence` are what a request that does not say gets. `convergence_threshold` ends a
    session whose reward changes by less, where no verifier knows what is right. `learning_rate`, `entropy_coefficient`
    and `policy_coefficient` are those of the policy that learns: the weights of an engine, which makes a step of
    `batch_size` episodes or more, or the choice among refinement strategies where the weights are out of reach. That
    policy learns `batch_size` replayed experiences at a time, from `min_experiences_for_training` on, with a value
    baseline of weight `value_coefficient`; an engine's baseline is the mean of a session's own answers, and neither of
    the two means anything to it. The buffer holds the newest `experience_buffer_size`.
    """

    max_iterations: int = 10
    min_confidence: float = 0.8
    batch_size: int = 32
    learning_rate: float = 0.001
    entropy_coefficient: float = 0.01
    value_coefficient: float = 0.5
    policy_coefficient: float = 1.0
    experience_buffer_size: int = 1000
    min_experiences_for_training: int = 50
    convergence_threshold: float = 0.01


@dataclass(frozen=True)
class Request:
    """One task to work on: the body of /train and of /evaluate once it was accepted.

    `tests` (asserts, or {input, output} pairs), `setup` and `entry_point` make code of it, `answer` mathematics;
    `verifiers` are (registered name, weight, options) to use instead of what these suggest. `samples` episodes run at
    once: an engine's setting where it is None, else one.
    """

    task_id: str
    prompt: str
    context: str = ""
    max_iterations: int | None = None
    min_confidence: float | None = None
    answer: str | None = None
    tests: tuple[Any, ...] = ()
    setup: str = ""
    entry_point: str = ""
    verifiers: tuple[tuple[str, float, dict[str, Any]], ...] = ()
    samples: int | None = None
    seed: int | None = None
    learn: bool = True  # False: nothing is learned from this session (an evaluation)
