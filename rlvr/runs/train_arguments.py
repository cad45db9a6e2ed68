"""The arguments of `rlvr.train` and `rlvr.evaluate` beside model, data and reward, for editors and type checkers.

A section is an object of its class, or a mapping of some of its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from rlvr.algorithms.advantages import Advantage
from rlvr.algorithms.losses.loss import Loss
from rlvr.algorithms.optimizers import Optimizer
from rlvr.algorithms.specs import Algorithm
from rlvr.clients.client_options import ClientOptions
from rlvr.clients.sampler_options import SamplerOptions
from rlvr.core.messages import SamplingParams
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.envs.agent.agent_run import Assignment
from rlvr.envs.prompt import PromptOptions
from rlvr.tracking.trackers import TrackerOptions
from rlvr.training.curriculum import LevelChoice
from rlvr.training.evaluate import EvaluationOptions
from rlvr.training.schedules.schedule_options import ScheduleOptions
from rlvr.training.sft import SftOptions
from rlvr.training.training_job import RunOptions
from rlvr.training.training_options import TrainingOptions

Keys = Mapping[str, Any]


class TrainArguments(TypedDict, total=False):
    # Short names, each of one key of a section.
    steps: int
    epochs: float
    prompts_per_step: int
    group_size: int
    learning_rate: float
    max_tokens: int
    temperature: float
    optimizer: Optimizer | Keys | str
    schedule: ScheduleOptions | Keys | str
    advantage: Advantage | Keys | str
    loss: Loss | Keys | str | Callable[..., Any]
    lora: LoraConfig | Keys | None
    tokenizer: str
    device: str
    dtype: str
    threads: int
    trackers: Sequence[TrackerOptions | Keys | str]
    agent: Callable[[Assignment], Any] | Sequence[str] | Keys | str
    callbacks: Sequence[Any]
    imports: Sequence[str]
    evaluate_every: int
    checkpoint_every: int
    name: str
    resume: bool
    seed: int
    # Sections.
    client: ClientOptions | Keys | str
    sampler: SamplerOptions | Keys | str
    algorithm: Algorithm | Keys | str
    prompt: PromptOptions | Keys
    rollout: SamplingParams | Keys
    training: TrainingOptions | Keys
    sft: SftOptions | Keys
    curriculum: LevelChoice | Keys | str
    teacher: Keys
    evaluation: EvaluationOptions | Keys
    engine: EngineLimits | Keys
    tracking: Keys
    run: RunOptions | Keys
    # Words of TRL.
    max_steps: int
    per_device_train_batch_size: int
    num_generations: int
    max_completion_length: int
    beta: float
    epsilon: float
    loss_type: str
    scale_rewards: str | bool


class EvaluateArguments(TypedDict, total=False):
    samples: int
    tasks: int
    seed: int
    temperature: float
    max_tokens: int
    device: str
    dtype: str
    threads: int
    evaluation: EvaluationOptions | Keys
    rollout: SamplingParams | Keys
    engine: EngineLimits | Keys
    prompt: PromptOptions | Keys
