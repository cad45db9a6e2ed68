"""The protocols between the layers: samplers, trainers, environments and task sources.

Method and argument names are those of the public `tinker` SDK; what they carry is in `rlvr.core.messages`. A sampler
and a trainer are two protocols because an OpenAI-compatible endpoint can sample and cannot train. Every call returns a
`rlvr.core.futures.Future`. Left out on purpose: any object that computes (clients live in `rlvr.clients`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.futures import Future
from rlvr.core.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
)
from rlvr.core.types import Task


class Tokenizer(Protocol):
    """The part of a `transformers` tokenizer that the loops use. `eos_token_id` ends a completion."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = ...) -> str: ...


class Feature(str, Enum):
    """What some options of an algorithm need of a training client besides a named loss. Messages use the values."""

    EXTRA_INPUTS = "inputs beside those of the named loss"  # kl_weights, beta_weights: `rlvr.clients.custom_loss`
    FULL_LOGITS = "full logits"
    REFERENCE = "log-probs under reference weights"
    STEPPERS = "optimizers besides AdamW"  # `AdamParams.stepper`
    OWN_LOSS = "a loss of the user's (`forward_backward_custom`)"
    CRITIC = "a critic (`create_critic`)"
    INTERPOLATION = "steps from saved weights towards the present ones (`interpolate`)"


@dataclass(frozen=True)
class ClientCapabilities:
    """What a training client can do, declared once by its class and read by every part above it.

    - `name` is the client's name in a config (`client=local`), for messages.
    - `losses` are the named losses of `forward_backward`, `features` what else an algorithm's options may need.
    - `scores_at_temperature`: `loss_fn_config={"temperature": T}` is taken; without it log-probs are at temperature 1.
    - `can_overlap`: sampling goes on while a step is made, because the model is not in this process.
    - `runs_in_process`: the model computes here, so its threads share the cores with the sandbox's workers.
    - `is_remote`: a server keeps the weights, and a checkpoint is their path there.
    - `clips_gradients`: `AdamParams.grad_clip_norm` is taken.
    - `accumulates`: an optimizer step may add up several forward-backward calls.
    - `world_size`: how many processes share one optimizer step.
    """

    name: str
    losses: Set[str]
    features: frozenset[Feature] = frozenset()
    scores_at_temperature: bool = False
    can_overlap: bool = False
    runs_in_process: bool = False
    is_remote: bool = False
    clips_gradients: bool = True
    accumulates: bool = True
    world_size: int = 1

    def check_optimizer(self, params: AdamParams) -> None:
        """ValueError if a step with these parameters needs what the client's optimizer does not have."""
        if params.stepper and Feature.STEPPERS not in self.features:
            raise ValueError(
                f"optim_step: client={self.name} has no {params.title}, its optimizer is AdamW; use AdamParams"
            )
        if params.grad_clip_norm and not self.clips_gradients:
            raise ValueError(
                f"optim_step: grad_clip_norm={params.grad_clip_norm:g}, but client={self.name} does not bound the norm "
                "of a gradient; give 0"
            )


@runtime_checkable
class SamplingClient(Protocol):
    """Samples from one immutable set of weights."""

    @property
    def fingerprint(self) -> str:
        """Names the weights; "" where the client cannot know them."""
        ...

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        """`num_samples` completions of the prompt; with `include_prompt_logprobs` also the log-probs [P] of its tokens.

        ValueError for a prompt that is empty or leaves no room in the context.
        """
        ...

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        """The log-prob of every token given those before it, [P] in nats; None for the first."""
        ...

    def get_tokenizer(self) -> Tokenizer: ...


CustomLoss = Callable[[list[Datum], list[Any]], tuple[Any, dict[str, float]]]


@runtime_checkable
class TrainingClient(Protocol):
    """Trains one policy. Gradients accumulate over `forward_backward` calls until `optim_step`; losses are sums.

    Saved weights are at the `path` of the response, which the methods that load take.
    """

    @property
    def capabilities(self) -> ClientCapabilities: ...

    @property
    def fingerprint(self) -> str:
        """Names the weights as they are now, as a sampler of them does."""
        ...

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of the summed loss over all data to the policy's; returns the log-probs of the targets.

        ValueError for an unknown loss, setting or input, NonFiniteError for a loss that is nan or infinite.
        """
        ...

    def forward(
        self, data: list[Datum], loss_fn: str = ..., loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """`forward_backward` without adding a gradient."""
        ...

    def forward_backward_custom(
        self, data: list[Datum], loss_fn: CustomLoss, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """The gradient of any function `loss_fn(data, [logprobs [T] of each]) -> (loss, metrics)` in torch."""
        ...

    def optim_step(self, adam_params: AdamParams) -> Future[OptimStepResponse]:
        """One step with the accumulated gradients, which are gone afterwards. ValueError if there are none."""
        ...

    def save_state(self, name: str) -> Future[SaveWeightsResponse]:
        """Save weights and optimizer."""
        ...

    def load_state(self, path: str) -> Future[None]:
        """Load the weights of a saved state, with a fresh optimizer."""
        ...

    def load_state_with_optimizer(self, path: str) -> Future[None]:
        """Go on from a saved state as if training had never stopped."""
        ...

    def save_weights_for_sampler(self, name: str) -> Future[SaveWeightsResponse]:
        """Save the weights alone."""
        ...

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """A sampler of the weights as they are now; with a name they are saved too."""
        ...

    def create_sampling_client(self, model_path: str | None = None) -> SamplingClient:
        """A sampler of the weights as they are now, or of those saved at `model_path`."""
        ...

    def create_critic(self) -> TrainingClient:
        """A client for a critic, which begins with these weights as they are now and V = 0.

        Its loss is `value`; where a policy's outputs have `logprobs`, its have `values` [T], of the place after each
        input token. It samples nothing. ValueError without `Feature.CRITIC`.
        """
        ...

    def get_tokenizer(self) -> Tokenizer: ...

    def weights_sha256(self) -> str:
        """A hash of the weights; "" if they are on a server."""
        ...

    def describe_environment(self) -> dict[str, str | int]:
        """What the bits of a run depend on beside its config: versions, threads, device."""
        ...

    def close(self) -> None:
        """End the session at a server; elsewhere this does nothing."""
        ...


@runtime_checkable
class InterpolatingClient(TrainingClient, Protocol):
    """A training client that can interpolate between saved and present weights (`Feature.INTERPOLATION`)."""

    def interpolate(self, path: str, share: float) -> Future[None]:
        """Go from the weights saved at `path` that share of the way to the present ones, with a fresh optimizer."""
        ...


@dataclass(frozen=True)
class ChatTurn:
    """A turn as chat messages, for people: those that the policy `read`, and what it `said`, calls of tools apart."""

    read: Sequence[dict[str, Any]]
    said: dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """What an environment answers to an action. `next_observation` is None exactly when the episode is done.

    If it begins with what the policy has seen so far, the episode stays one trajectory; else a new one begins.
    `next_stop_condition` are stop strings or token ids of the next turn, None for those of the turn before. `metrics`
    are averaged over the batch and logged as `env/all/NAME`. At the end of an episode, `answer` is what verifiers
    judge (None: the policy's last turn), and an `error` says why there is nothing to judge: no reward then, and no
    zero. `chat` is the turn as people read it; None where an environment has no messages.
    """

    reward: float
    episode_done: bool
    next_observation: ModelInput | None = None
    next_stop_condition: Sequence[str] | Sequence[int] | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    logs: dict[str, Any] = field(default_factory=dict[str, Any])
    answer: str | None = None
    error: str = ""
    chat: ChatTurn | None = None


@dataclass(frozen=True)
class InitialObservationOverflow:
    """What an environment gives for a first observation that does not fit its budget: an episode that is over at once.

    Its `reward` counts in its group; there is nothing to learn from in it. `answer` and `error` are as in `StepResult`.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    logs: dict[str, Any] = field(default_factory=dict[str, Any])
    answer: str | None = None
    error: str = ""


class Env(Protocol):
    """One episode of one task; single use, no reset. The contract is the Tinker cookbook's."""

    def initial_observation(self) -> Awaitable[tuple[ModelInput, Any] | InitialObservationOverflow]:
        """The prompt, and the stop strings or token ids of the first turn (None: the end token)."""
        ...

    def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> Awaitable[StepResult]:
        """Take the token ids of a completion, its stop token included; `extra["stop_reason"]` says why it ended."""
        ...


@runtime_checkable
class ClosableEnv(Protocol):
    """An episode that holds something to give back: a session, a process."""

    def close(self) -> Awaitable[None]:
        """Called once the rollout is over, also after an error."""
        ...


@runtime_checkable
class SlottedEnv(Protocol):
    """An episode of which not any number runs at the same time."""

    slots: EpisodeSlots | None


class ExternalEnv(ABC):
    """An episode that a program outside plays: it decides what the policy reads next, and when the episode is over.

    An observation may go on from any earlier turn: the turns are a tree, and each of its ends a trajectory. Turns that
    two of them share are trained once. It takes the place of an `Env`; `take` is its `step`.
    """

    turn_limit: int | None = None
    """The most tokens that the program takes for the next turn; None: as many as the run samples."""
    prompt_limit: int | None = None
    """The most tokens that the policy may read before a turn; None: as many as fit its context."""
    is_parallel: bool = False
    """Whether calls of the program may come at the same time: then what is drawn for a turn follows from what it reads,
    and not from its number, which would depend on the order in which they arrive."""
    slots: EpisodeSlots | None = None
    """How many such episodes run at the same time; None: as many as there are."""
    role: str = ""
    """The role whose turn is next, of an episode with several: a turn goes on from turns of its own role alone."""
    player: SamplingClient | None = None
    """Who takes the next turn; None: the policy. What others say is no turn of the episode, and is not trained."""

    @abstractmethod
    async def initial_observation(self) -> tuple[ModelInput, Any] | InitialObservationOverflow:
        """Begin, and wait for the program's first call. Episodes of a step begin at the same time."""
        ...

    @abstractmethod
    async def take(self, answer: SampledSequence) -> StepResult:
        """Give the program the policy's turn, and wait for its next call or its end."""
        ...

    def dropped_turns(self) -> Collection[int]:
        """The turns, numbered as they were sampled, that are left out unless a later one goes on from them."""
        return ()

    def final_turn(self) -> int | None:
        """The turn that is judged; None: that of the last branch."""
        return None

    def turn_ids(self) -> Sequence[str]:
        """The id of each turn's answer, as the program knows it; empty if it knows none."""
        return ()

    def branch_rewards(self) -> Mapping[int, float]:
        """What the program gives for branches, by a turn of each: of several in a branch the latest counts."""
        return {}

    async def close(self) -> None:
        """End what still runs. Always called, also after an error."""
        return


class TaskSource(Protocol):
    """Where tasks come from and how an episode of one runs.

    Inherit from it to have the defaults of the optional members; a class with the six required members alone becomes a
    task source when it is resolved by name (`rlvr.envs.resolve_environment`).
    """

    levels: tuple[str, ...]
    """The difficulties, easiest first; one level "" if there are none."""
    reward: str
    """The name of the reward that judges the tasks unless the config names another."""

    environment_weight: float | None = None
    """The weight of the rewards that its episodes give, beside `reward`; None: the config says it if they give any."""
    vocabulary: Sequence[str] | None = None
    """Every word of the tasks, to build a small tokenizer or a table policy from."""
    end_word: str | None = None
    """The word of `vocabulary` that ends a completion; None: `<end>`."""
    pad_word: str | None = None
    """The padding word of `vocabulary`; None: `<pad>`."""
    max_turns: int = 1
    """The most completions in an episode; each may use the whole token budget."""
    size: Callable[[str], int] | None = None
    """`size(level)`: the number of training tasks of a level; None if tasks are generated."""
    leave_out: Callable[[Collection[str]], None] | None = None
    """`leave_out(ids)`: yield the tasks of these ids no more, neither for training nor held out; None if tasks are
    generated."""
    prompt_limit: int | None = None
    """The most tokens of a prompt that the model reads: of a longer one it reads the end. None: it reads all."""
    roles: Sequence[str] = ()
    """The roles that the policy plays, each with rewards of its own; () if an episode has one."""
    writes_tasks: bool = False
    """Whether the policy writes the tasks that it is trained on, in one of its roles; held-out ones are asked alone."""
    opponent: str = ""
    """A run, or one of its checkpoints, that plays the other roles, for `seat`; "" if there is none."""
    owns_prompts: bool = False
    """Whether its episodes write what the model reads, so that the config's section `prompt` has no say."""
    group_builder: Callable[[Task, Any, int], Any] | None = None
    """`group_builder(task, tokenizer, size)`: makes the episodes of a group together; None: `env` makes each of them.
    See `rlvr.rollout`."""

    @abstractmethod
    def train(self, seed: int, index: int, level: str) -> Task:
        """The index-th training task of a level. A pure function: a resumed run sees the same tasks."""
        ...

    @abstractmethod
    def heldout(self, count: int | None) -> list[Task]:
        """The same evaluation tasks every time, at most `count`; `train` never yields one of them."""
        ...

    @abstractmethod
    def env(self, task: Task, tokenizer: Any) -> Env:
        """A new episode of the task."""
        ...

    @abstractmethod
    def demonstration(self, task: Task, key: int) -> str | list[str] | None:
        """A completion to imitate in supervised fine-tuning, without end token; None if there is none.

        An episode of several turns is a list: what the model says, what the environment adds, what the model says, and
        so on. An end token follows each turn of the model, and only these turns have a loss.
        """
        ...

    def complete_prompt(self, task: Task, tokenizer: Any) -> Task:
        """The task with the prompt that its episode begins with: with a list of tools, for example."""
        return task

    def extra_heldout(self, count: int) -> dict[str, list[Task]]:
        """Further held-out sets of `count` tasks each, by name. They are evaluated and reported; no decision uses them.

        `{"held-out families": [...]}`, for example.
        """
        return {}

    def seat(self, player: SamplingClient) -> None:
        """Let a sampler of the weights `opponent` play the roles that the policy does not."""

    def chat_messages(self, task: Task) -> list[dict[str, str]]:
        """The chat messages that a chat model reads instead of a text prompt; by default one message of the user."""
        assert isinstance(task.prompt, str)
        return [{"role": "user", "content": task.prompt}]

    def example_prompt(self, task: Task) -> str | list[dict[str, str]]:
        """The prompt of a task where it is an example before other prompts (`prompt.examples`), as the model reads it.

        By default its `model_prompt`. A source that writes examples into its prompts leaves them out here.
        """
        return task.model_prompt

    def parse_task(self, text: str) -> Task | None:
        """The task that a text typed by a user states; None if it states none."""
        return None

    def describe_task(self, task: Task) -> Mapping[str, str]:
        """Properties that the task shares with others, known without a completion: `{"shape": "n n o"}`.

        `rlvr doctor` groups failing tasks by them, so they should have few values. The level is added by itself.
        """
        return {}

    def describe_data(self) -> str:
        """The rows that the tasks come from, for the plan of a run; "" if they are generated."""
        return ""

    def advice(self) -> list[str]:
        """Warnings about the tasks, shown when a run starts."""
        return []
