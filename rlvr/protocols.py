"""What the floors ask of each other: samplers, trainers, environments and task sources, as protocols.

Method and argument names are those of the public `tinker` SDK; what they carry is in `rlvr.messages`. A sampler and a
trainer are two protocols because an OpenAI-compatible endpoint can sample and cannot train. Every call returns a
`rlvr.futures.Future`. Left out on purpose: any object that computes (clients live in `rlvr.clients`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rlvr.futures import Future
from rlvr.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
)
from rlvr.types import Task


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that the loops use."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str: ...


@runtime_checkable
class SamplingClient(Protocol):
    """Samples from one immutable set of weights."""

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]: ...

    def compute_logprobs(self, prompt: ModelInput) -> Future[list[float | None]]: ...

    def get_tokenizer(self) -> Tokenizer: ...


CustomLoss = Callable[[list[Datum], list[Any]], tuple[Any, dict[str, float]]]


@runtime_checkable
class TrainingClient(Protocol):
    """Trains one policy. Gradients accumulate over `forward_backward` calls until `optim_step`; losses are sums."""

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]: ...

    def forward(
        self, data: list[Datum], loss_fn: str = ..., loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]: ...

    def forward_backward_custom(self, data: list[Datum], loss_fn: CustomLoss) -> Future[ForwardBackwardOutput]: ...

    def optim_step(self, adam_params: AdamParams) -> Future[OptimStepResponse]: ...

    def save_state(self, name: str) -> Future[SaveWeightsResponse]: ...

    def load_state(self, path: str) -> Future[None]: ...

    def load_state_with_optimizer(self, path: str) -> Future[None]: ...

    def save_weights_for_sampler(self, name: str) -> Future[SaveWeightsResponse]: ...

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient: ...

    def create_sampling_client(self, model_path: str) -> SamplingClient: ...

    def get_tokenizer(self) -> Tokenizer: ...


@dataclass(frozen=True)
class StepResult:
    """What an environment answers to an action. `next_observation` is None exactly when the episode is done."""

    reward: float
    episode_done: bool
    next_observation: ModelInput | None = None
    next_stop_condition: Sequence[str] | Sequence[int] | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    logs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class InitialObservationOverflow:
    """What an environment gives for a first observation that does not fit its budget: an episode that is over at once.

    Its `reward` counts in its group; there is nothing to learn from in it.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    logs: dict[str, Any] = field(default_factory=dict[str, Any])


class Env(Protocol):
    """One episode of one task; single use, no reset. The contract is the Tinker cookbook's."""

    def initial_observation(self) -> Awaitable[tuple[ModelInput, Any] | InitialObservationOverflow]: ...

    def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> Awaitable[StepResult]: ...


class TaskSource(Protocol):
    """Where tasks come from. `levels` are the difficulties, easiest first; one level "" where there are none.

    `train(seed, index, level)` is the index-th training task of that level: a pure function, so that a resumed run
    sees the same tasks. `heldout(count)` gives the same evaluation tasks every time, none of which `train` ever
    yields. `env(task, tokenizer)` opens a fresh episode. `demonstration(task, key)` is a completion to imitate in
    the supervised warm-up (without end token), or None where the source has none.

    A source may also have `beside(count)`: further held-out sets of `count` tasks each, by name, such as
    `{"held-out families": [...]}`. They are evaluated before and after and reported beside the others, and nothing is
    decided by them.
    """

    levels: tuple[str, ...]
    reward: str

    def train(self, seed: int, index: int, level: str) -> Task: ...

    def heldout(self, count: int | None) -> list[Task]: ...

    def env(self, task: Task, tokenizer: Any) -> Env: ...

    def demonstration(self, task: Task, key: int) -> str | None: ...
