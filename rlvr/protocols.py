"""What the floors say to each other: the messages of the four primitives, and the protocols that speak them.

Names, arguments and fields are those of the public `tinker` SDK, so that a recipe written for it runs in-process by
changing an import. A sampler and a trainer are two protocols because an OpenAI-compatible endpoint can sample and
cannot train. Every call returns a future with `.result()` that can also be awaited.

Left out on purpose: images, and any object that computes (clients live in `rlvr.clients`). No torch: a `TensorData`
holds a numpy array.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from rlvr.types import StopReason, Task, Trajectory

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class ModelInput:
    """Token ids a model reads. `ModelInput.from_ints([1, 2, 3]).to_ints() == [1, 2, 3]`."""

    tokens: list[int]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        return cls(list(tokens))

    def to_ints(self) -> list[int]:
        return list(self.tokens)

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class TensorData:
    """A numeric array on its way to or from an engine: float32 or int64, any shape."""

    data: np.ndarray

    @classmethod
    def of(cls, values: Any) -> TensorData:
        """From a list, a numpy array or anything array-like (a torch CPU tensor too)."""
        array = np.asarray(values)
        return cls(array.astype(np.int64 if array.dtype.kind in "iub" else np.float32))

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorData:
        return cls.of(array)

    @classmethod
    def from_torch(cls, tensor: Any) -> TensorData:
        return cls.of(tensor.detach().cpu().numpy())

    def to_numpy(self) -> np.ndarray:
        return self.data

    def to_torch(self) -> Any:
        import torch

        return torch.from_numpy(self.data.copy())  # pyright: ignore[reportUnknownMemberType]

    def tolist(self) -> list[Any]:
        return self.data.tolist()

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> str:
        return "int64" if self.data.dtype.kind == "i" else "float32"


@dataclass(frozen=True)
class Datum:
    """One row of training: `model_input` [T] and arrays of length T, e.g. `target_tokens`, `logprobs`, `advantages`."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]

    @classmethod
    def from_trajectory(
        cls, trajectory: Trajectory, weight: float = 1.0, *, advantages: Any = None, logprobs: Any = None, **inputs: Any
    ) -> Datum:
        """The training projection: inputs all but last, targets all but first, the rest shifted alike.

        `advantages` hold `trajectory.advantage * weight` where the policy acted and 0 elsewhere; `weight` is the
        reduction (1 / tokens in the batch, ...), which folds into the advantage because every loss is a sum. Given
        `advantages` [R] (still to be weighted), `logprobs` [R] and further `inputs` [R] take the place of the
        trajectory's own or stand beside them; they too are 0 where the policy did not act.
        """
        trajectory.require_trainable()
        tokens = trajectory.full_tokens
        lead = len(trajectory.prompt_tokens) - 1
        mask = np.concatenate([np.zeros(lead), np.asarray(trajectory.action_mask, dtype=np.float64)])

        def laid_out(values_R: Any) -> TensorData:
            return TensorData.of(np.concatenate([np.zeros(lead), np.asarray(values_R, dtype=np.float64)]) * mask)

        own = np.full(len(trajectory.response_tokens), trajectory.advantage)
        chosen = own if advantages is None else np.asarray(advantages, dtype=np.float64)
        return cls(
            ModelInput(tokens[:-1]),
            {
                "target_tokens": TensorData.of(tokens[1:]),
                "logprobs": laid_out(trajectory.logprobs if logprobs is None else logprobs),
                "advantages": laid_out(chosen * weight),
                **{name: laid_out(values) for name, values in inputs.items()},
            },
        )

    @classmethod
    def supervised(cls, prompt: Sequence[int], completion: Sequence[int], weight: float = 1.0) -> Datum:
        """A cross-entropy row: weight on every completion token, 0 on the prompt."""
        tokens = [*prompt, *completion]
        weights = [0.0] * (len(prompt) - 1) + [weight] * len(completion)
        return cls(
            ModelInput(tokens[:-1]),
            {"target_tokens": TensorData.of(tokens[1:]), "weights": TensorData.of(np.asarray(weights))},
        )


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `stop` None ends at the end-of-sequence token, [] never, else strings or token ids.

    `seed` makes every draw a function of (seed, sample index, token position); None lets the client choose one.
    Log-probs come back at `temperature`, before `top_k`, `top_p` and `min_p`; temperature 0 is greedy.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        rules = (
            (
                "max_tokens",
                self.max_tokens is None or self.max_tokens >= 1,
                "at least 1, or None for the whole context",
            ),
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number, at least 0"),
            ("top_k", self.top_k == -1 or self.top_k >= 1, "-1 (off) or at least 1"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
        )
        for name, fine, expected in rules:
            if not fine:
                raise ValueError(f"SamplingParams: {name}={getattr(self, name)!r}, expected {expected}")


@dataclass(frozen=True)
class SampledSequence:
    """One completion: sampled `tokens` [R], the stop token included, their `logprobs` [R] and why it ended.

    `end_tokens` of them, at the end, are a stop token and no part of the answer's text; None where the sampler does
    not say. A stop string stays in the text.
    """

    stop_reason: StopReason
    tokens: list[int]
    logprobs: list[float] | None = None
    end_tokens: int | None = None


@dataclass(frozen=True)
class SampleResponse:
    """The completions of one prompt. `prompt_logprobs` [P] starts with None. `fingerprint` names the weights."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    fingerprint: str = ""


@dataclass(frozen=True)
class AdamParams:
    """One AdamW step. `grad_clip_norm` 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        below_one = ("beta1", "beta2")
        for name, value in vars(self).items():
            if not 0 <= value < (1 if name in below_one else float("inf")):
                expected = "in [0, 1)" if name in below_one else "a finite number, at least 0"
                raise ValueError(f"AdamParams: {name}={value!r}, expected {expected}")


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """Per datum `{"logprobs": [T]}`, and metrics named `name:reduction`; `loss:sum` is always there."""

    loss_fn_outputs: list[dict[str, TensorData]]
    metrics: dict[str, float]
    loss_fn_output_type: str = "TensorDataRecord"


@dataclass(frozen=True)
class OptimStepResponse:
    """What the step reports, e.g. `grad_norm` before clipping."""

    metrics: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class SaveWeightsResponse:
    path: str


class NonFiniteError(RuntimeError):
    """A loss, log-prob or gradient was nan or infinite. `rows` are the datums it was first seen in (may be empty).

    The policy keeps its weights and the gradients it had accumulated before the call.
    """

    def __init__(self, what: str, rows: Sequence[int]) -> None:
        super().__init__(f"{what} is not finite" + (f" (first seen in rows {list(rows)[:8]})" if rows else ""))
        self.rows = list(rows)


class Future(Protocol[T_co]):
    """A result that may not be there yet: block with `.result()`, or await it."""

    def result(self, timeout: float | None = None) -> T_co: ...

    def __await__(self) -> Generator[Any, None, T_co]: ...


class LazyFuture(Generic[T]):
    """A future whose work happens on the thread that first asks for the result (once; an error is kept too).

    A `timeout` therefore bounds only the wait for another thread that is at work on it: then TimeoutError.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._lock = threading.Lock()
        self._value: T | None = None
        self._error: Exception | None = None

    @classmethod
    def done(cls, value: T) -> LazyFuture[T]:
        future = cls(lambda: value)
        future.result()
        return future

    def result(self, timeout: float | None = None) -> T:
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError(f"no result after {timeout} s: another thread is still computing it")
        try:
            if self._work is not None:
                try:
                    self._value = self._work()
                except Exception as error:
                    self._error = error
                # What the work holds on to may go now. (After a Ctrl-C in it, asking again tries again.)
                self._work = None
        finally:
            self._lock.release()
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.to_thread(self.result).__await__()


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


class Env(Protocol):
    """One episode of one task; single use, no reset. The contract is the Tinker cookbook's."""

    def initial_observation(self) -> Awaitable[tuple[ModelInput, Any]]: ...

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
