"""`Trajectory`: what a rollout creates, verifiers score, algorithms weigh and the engine learns from.

A `Trajectory` gains fields as it goes (tokens and log-probs from the rollout, `scores` and `reward` from the
verifiers, `advantage` from the algorithm); nothing else travels between the layers. Token ids are the truth, text is
a view of them: what the policy sampled is never decoded and encoded again.

No torch here, and no knowledge of environments, rewards or engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


class StopReason(str, Enum):
    """Why the sampler ended a completion. Set by the sampler, never guessed from the text."""

    STOP = "stop"  # a stop token or stop string was produced
    LENGTH = "length"  # the token budget or the context ran out: the answer is truncated


class Outcome(str, Enum):
    """What a verifier says happened. `ERROR` and `INVALID` are not wrong answers and carry no value."""

    PASSED = "passed"
    FAILED = "failed"
    TIMEOUT = "timeout"  # the answer took too long: rewarded like a failure
    ERROR = "error"  # the verifier broke or ran out of its own time
    INVALID = "invalid"  # the task is broken: its answers cannot be judged


@dataclass(frozen=True)
class Score:
    """One verifier's verdict on one answer.

    `value` is the reward, None exactly when the outcome is `error` or `invalid`. `reason` is a short code to group by
    (`no_answer`, `wrong_value`, ...); `parts` are named components, e.g. `{"boxed": 1.0, "correct": 0.0}`. `detail`
    holds a traceback or a message for people. `turns` are the parts of `value` that single turns earned, one for each
    turn of the episode, where a verifier scores them; `branches` is what each branch of an agent's episode is trained
    with in place of `value`, in the order of `Trajectory.branches`.
    """

    value: float | None
    outcome: Outcome
    reason: str = ""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    detail: str = ""
    turns: tuple[float, ...] = ()
    branches: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        has_no_value = self.outcome in (Outcome.ERROR, Outcome.INVALID)
        if has_no_value != (self.value is None):
            raise ValueError(
                f"Score: outcome {self.outcome.value!r} with value {self.value}; a value is None exactly when the "
                "outcome is 'error' or 'invalid'"
            )
        # Plain floats: what a verifier computed with numpy must still be JSON.
        object.__setattr__(self, "value", None if self.value is None else float(self.value))
        object.__setattr__(self, "parts", {name: float(part) for name, part in self.parts.items()})
        object.__setattr__(self, "turns", tuple(float(turn) for turn in self.turns))
        object.__setattr__(self, "branches", tuple(float(branch) for branch in self.branches))
        for name, values in (("value", [self.value or 0.0]), ("turns", self.turns), ("branches", self.branches)):
            for value in values:
                if not math.isfinite(value):
                    raise ValueError(f"Score: {name} {value} is not finite; return an 'error' outcome instead")


@dataclass(frozen=True)
class Task:
    """One task: `prompt` is text or chat messages, `meta` what the verifiers need (`{"answer": "7"}`).

    `level` is the difficulty a curriculum chooses by ("1", "2", ...; "" if there is none). `shown_prompt` is what the
    model reads instead of `prompt`: text with examples before it, or chat messages, which the tokenizer's template
    renders with `template_arguments` (`rlvr.envs.prompt`). `hint` are tokens that it reads after the prompt, as the
    beginning of its answer (`rlvr.training.hints`). Verifiers are given `prompt` all the same.
    """

    id: str
    prompt: str | list[dict[str, str]]
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    level: str = ""
    shown_prompt: str | list[dict[str, str]] | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    hint: tuple[int, ...] = ()

    @property
    def model_prompt(self) -> str | list[dict[str, str]]:
        """What the model reads: text as it stands, or chat messages through the tokenizer's template."""
        return self.prompt if self.shown_prompt is None else self.shown_prompt

    def value_of(self, key: str) -> str | None:
        """The task's `level`, or the value of another key of its `meta` as text; None if the task has none."""
        value = self.level if key == "level" else self.meta.get(key)
        return None if value is None else str(value)

    @property
    def prompt_text(self) -> str:
        """The prompt as text; chat messages become `role: content` lines (a view, never what is tokenized)."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in self.prompt)


@dataclass(frozen=True)
class Branch:
    """One way through the turns of an episode, from a beginning to an end: a history, or that of a sub-agent.

    `turns` are the numbers of its turns in the episode; branches share those that they have in common. `id` is that of
    the answer to its last call, as the agent got it ("" if no agent plays). `prompt` is all that the policy read before
    its last turn, and `answer` that turn. `reward` is what the agent or the game gave for the branch, None if it gave
    nothing. `role` is the role that played it, "" in an episode with one.
    """

    turns: list[int]
    prompt: str
    answer: str
    id: str = ""
    reward: float | None = None
    role: str = ""


@dataclass
class Trajectory:
    """One rollout of the policy on one task.

    Example: `Trajectory(prompt="2+2?", prompt_tokens=[1, 2], response="4", response_tokens=[5, 6],
    logprobs=[-0.5, -0.1], attention_mask=[1, 1, 1, 1], reward=1.0)`.

    Shapes: `prompt_tokens` [P], `response_tokens`, `logprobs` and `action_mask` [R], `attention_mask` [P + R].
    `action_mask` is 1 where the policy sampled the token and 0 where the environment wrote it (an empty mask given to
    the constructor means all ones); `logprobs` are nats at the sampling temperature, 0 where the mask is 0.
    `answer` is what verifiers judge: the policy's last turn if an environment spoke in between, hint and response after
    a hint, None for the whole response. `penalty` is what an algorithm subtracts from the reward before the advantage
    (a KL penalty, an overlong one), `length_penalty` the overlong part, `token_penalties` [R] what single tokens cost
    where they differ; `reward` stays as the verifiers gave it. `reference_logprobs` [R] are those under a reference
    policy and `teacher_logprobs` [R] those under a teacher, where asked for. `values` [R + 1] are a critic's, before
    each response token and after the last, `returns` [R] what it learns. `token_advantages` [R]
    are the advantages of single tokens where they differ, else empty. `turn_starts` are the places in the response
    where the policy began to speak, `reports` what the environment measured, a mapping a turn.
    `turn_rewards` is the part of `reward` that each turn earned, empty if none did. `reward_parts` are the weight and
    the value of each reward that `reward` is the sum of, by name, empty if it is one. `branches` are those of the whole
    episode, on the trajectory that is judged; where they have rewards of their own, `turn_credits` is what each turn is
    trained with in place of `reward`: the mean over the branches that have it. `messages` is the conversation for
    people, where the environment has one: `turn` is in those that the policy said, of which the last are this
    trajectory's own turns. `observation_weight` is how much a token of the environment counts beside a sampled one, if
    those are learned from. `reward` is 0.0 until scored and None after a verifier error or an invalid task: then the
    trajectory enters no statistic and no gradient. A text-only endpoint leaves the token fields empty; such a
    trajectory cannot train. `rendered_prompt` is the text of `prompt_tokens` where it is not `prompt`: after a chat
    template, or in an episode that writes its prompts anew.

    `role` is the role whose turns these are, "" in an episode with one. Each role has trajectories of its own.
    `scores` are the verdicts by verifier. `group_id` names the group that a baseline is taken over, `rollout_id` the
    episode: an episode that writes its history anew has several trajectories. `temperature` (of sampling),
    `policy_version` (optimizer steps before it) and `policy_fingerprint` say which policy sampled; `metadata` is free.
    """

    prompt: str
    prompt_tokens: list[int]
    response: str
    response_tokens: list[int]
    logprobs: list[float] = field(default_factory=list[float])
    attention_mask: list[int] = field(default_factory=list[int])
    reward: float | None = 0.0
    advantage: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    action_mask: list[int] = field(default_factory=list[int])
    group_id: str = ""
    rollout_id: str = ""
    task: Task | None = None
    scores: dict[str, Score] = field(default_factory=dict[str, Score])
    stop_reason: StopReason | None = None
    temperature: float = 1.0
    policy_version: int = 0
    policy_fingerprint: str = ""
    penalty: float = 0.0
    reference_logprobs: list[float] = field(default_factory=list[float])
    answer: str | None = None
    turn_starts: list[int] = field(default_factory=list[int])
    reports: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    rendered_prompt: str = ""
    teacher_logprobs: list[float] = field(default_factory=list[float])
    turn_rewards: list[float] = field(default_factory=list[float])
    values: list[float] = field(default_factory=list[float])
    returns: list[float] = field(default_factory=list[float])
    token_advantages: list[float] = field(default_factory=list[float])
    token_penalties: list[float] = field(default_factory=list[float])
    length_penalty: float = 0.0
    branches: list[Branch] = field(default_factory=list[Branch])
    turn_credits: list[float] = field(default_factory=list[float])
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    reward_parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    observation_weight: float = 0.0
    role: str = ""

    def __post_init__(self) -> None:
        n = len(self.response_tokens)
        self.action_mask = self.action_mask or [1] * n
        self.attention_mask = self.attention_mask or [1] * (len(self.prompt_tokens) + n)
        for name, given, expected in (
            ("logprobs", len(self.logprobs), n if self.logprobs else 0),
            ("action_mask", len(self.action_mask), n),
            ("attention_mask", len(self.attention_mask), len(self.prompt_tokens) + n),
        ):
            if given != expected:
                raise ValueError(
                    f"Trajectory: {name} has {given} entries, expected {expected} "
                    f"({len(self.prompt_tokens)} prompt and {n} response tokens)"
                )

    @property
    def read_prompt(self) -> str:
        """The prompt as the model read it."""
        return self.rendered_prompt or self.prompt

    @property
    def full_tokens(self) -> list[int]:
        """Prompt then response, [P + R]."""
        return self.prompt_tokens + self.response_tokens

    @property
    def num_response_tokens(self) -> int:
        return len(self.response_tokens)

    @property
    def num_action_tokens(self) -> int:
        """Tokens the policy sampled: what a loss may count."""
        return sum(self.action_mask)

    @property
    def num_observation_tokens(self) -> int:
        """Tokens of the response that the environment wrote."""
        return len(self.action_mask) - sum(self.action_mask)

    @property
    def total_logprob(self) -> float:
        """Sum of the log-probs of the sampled tokens, in nats."""
        return math.fsum(self.logprobs)

    @property
    def mean_logprob(self) -> float:
        """`total_logprob` over the number of sampled tokens; 0.0 for an empty response."""
        return self.total_logprob / self.num_action_tokens if self.num_action_tokens else 0.0

    @property
    def is_empty(self) -> bool:
        """Whether the episode ended before the policy sampled anything: it may have a reward, but no tokens."""
        return not self.prompt_tokens and not self.response_tokens and not self.response

    @property
    def response_advantages(self) -> list[float]:
        """The advantage of each response token, [R]."""
        return self.token_advantages or [self.advantage] * len(self.response_tokens)

    @property
    def has_advantage(self) -> bool:
        """Whether the advantage of some token is not 0."""
        return any(self.token_advantages) if self.token_advantages else self.advantage != 0.0

    @property
    def truncated(self) -> bool:
        return self.stop_reason is StopReason.LENGTH

    def require_trainable(self) -> None:
        """Raise ValueError, saying why, if this trajectory has no tokens or log-probs to learn from."""
        if not self.prompt_tokens or not self.response_tokens:
            raise ValueError(
                f"trajectory {self.rollout_id or self.prompt[:40]!r} has no token ids (a text-only endpoint made it?): "
                "it can be scored but cannot train; sample it with a client that returns tokens"
            )
        if len(self.logprobs) != len(self.response_tokens):
            raise ValueError(
                f"trajectory {self.rollout_id or self.prompt[:40]!r} carries no sampling log-probs; sample it with a "
                "client that returns them"
            )


@dataclass
class TrajectoryBatch:
    """A list of trajectories with statistics. Rewards that are None are left out of all of them."""

    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __getitem__(self, index: int) -> Trajectory:
        return self.trajectories[index]

    @property
    def rewards(self) -> list[float]:
        return [t.reward for t in self.trajectories if t.reward is not None]

    @property
    def mean_reward(self) -> float:
        return mean(self.rewards)

    @property
    def std_reward(self) -> float:
        """Population standard deviation."""
        return std(self.rewards)

    @property
    def min_reward(self) -> float:
        return min(self.rewards, default=0.0)

    @property
    def max_reward(self) -> float:
        return max(self.rewards, default=0.0)

    @property
    def total_tokens(self) -> int:
        return sum(len(t.prompt_tokens) + len(t.response_tokens) for t in self.trajectories)

    @property
    def mean_response_length(self) -> float:
        return mean([t.num_response_tokens for t in self.trajectories])

    def compute_advantages(self, baseline: float | None = None, normalize: bool = False) -> list[float]:
        """Set `advantage = reward - baseline` on every trajectory and return the list.

        `baseline` None means the batch mean. `normalize` then centres and divides by the population standard
        deviation of the advantages plus 1e-8, so a constant batch gets zeros. A reward of None gets 0.0.
        """
        if baseline is None:
            baseline = self.mean_reward
        known = [t for t in self.trajectories if t.reward is not None]
        raw = [t.reward - baseline for t in known if t.reward is not None]
        if normalize:
            centre, scale = mean(raw), std(raw) + 1e-8
            raw = [(a - centre) / scale for a in raw]
        for trajectory in self.trajectories:
            trajectory.advantage = 0.0
        for trajectory, advantage in zip(known, raw, strict=True):
            trajectory.advantage = advantage
        return [t.advantage for t in self.trajectories]

    def groups(self) -> dict[str, list[Trajectory]]:
        """Trajectories by `group_id`, in order of first appearance."""
        return group_by(self.trajectories, lambda t: t.group_id)


def group_by(items: Iterable[T], of: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(of(item), []).append(item)
    return groups


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean by exact summation; 0.0 for no values. Exactly the value where all are equal."""
    if not values or all(v == values[0] for v in values):
        return values[0] if values else 0.0
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum is beyond a float, and the mean is not
        largest = max(map(abs, values))
        return largest * (math.fsum(v / largest for v in values) / len(values))


def std(values: Sequence[float]) -> float:
    """Population standard deviation; 0.0 for no values. Exactly 0.0 where all values are equal."""
    if not values or all(v == values[0] for v in values):
        return 0.0
    centre = mean(values)
    try:
        return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / len(values))
    except OverflowError:  # a square is beyond a float, and the deviation is not
        largest = max(map(abs, values))
        return largest * std([v / largest for v in values])
