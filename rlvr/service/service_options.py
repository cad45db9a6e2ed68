"""What a session is requested with, and how the service learns from sessions: plain options, ranges and defaults.

`rlvr.service.settings` reads `TrainingConfig` from YAML and the environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

Share = Annotated[float, Field(ge=0, le=1)]
Coefficient = Annotated[float, Field(ge=0, allow_inf_nan=False)]
BufferSize = Annotated[int, Field(ge=1, le=10_000_000)]


@dataclass(frozen=True)
class TrainingConfig:
    """How sessions run and what is learned from them.

    `max_iterations` and `min_confidence` are the defaults of a request. `convergence_threshold` ends a session whose
    reward changes by less, if no verifier knows the truth. With an engine its weights learn, by `learning_rate`,
    `entropy_coefficient` and `policy_coefficient`: a step has `batch_size` episodes or more, and the baseline is the
    mean of a session's own answers. With an endpoint the choice of strategy learns, and uses none of these four: it
    follows what its answers are evidence for, from `min_experiences_for_training` answers on, and `value_coefficient`
    is how fast the baseline of a task follows its gains (an engine uses neither of these two). The buffer holds the
    newest `experience_buffer_size` experiences.
    """

    max_iterations: Annotated[int, Field(ge=1, le=100)] = 10
    min_confidence: Share = 0.8
    batch_size: Annotated[int, Field(ge=1, le=100_000)] = 32
    learning_rate: Share = 0.001
    entropy_coefficient: Coefficient = 0.01
    value_coefficient: Coefficient = 0.5
    policy_coefficient: Coefficient = 1.0
    experience_buffer_size: BufferSize = 1000
    min_experiences_for_training: BufferSize = 50
    convergence_threshold: Annotated[float, Field(ge=0, le=2)] = 0.01


@dataclass(frozen=True)
class SessionRequest:
    """One task to work on: an accepted body of /train or /evaluate.

    `tests` (asserts, or {input, output} pairs), `setup`, `entry_point` and `answer_names` (names that answers define)
    are for code, `answer` for mathematics; `verifiers` (registered name, weight, options) or a `grader` with its `item`
    replace the default ones. `samples` episodes run at once; None is the engine's default, and one with an endpoint.
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
    answer_names: tuple[str, ...] = ()
    verifiers: tuple[tuple[str, float, dict[str, Any]], ...] = ()
    grader: dict[str, Any] | None = None
    item: dict[str, Any] = field(default_factory=dict[str, Any])
    samples: int | None = None
    seed: int | None = None
    learn: bool = True  # False for an evaluation

    @property
    def kind(self) -> str:
        return "train" if self.learn else "evaluate"
