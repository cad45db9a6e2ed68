"""What a term is: one thing that an algorithm adds to its loss, its rewards or its advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rlvr.algorithms.part import Part, SpecView
from rlvr.core.protocols import Feature
from rlvr.core.types import Task, Trajectory

Reduce = Callable[[Callable[[Trajectory], int]], list[float]]
"""The weights of an algorithm's reduction for the rows of a step, with the tokens that a function counts."""
Logprobs = Callable[[Trajectory], Sequence[float] | None]


@dataclass
class Preparation:
    """What the terms of one update are given before it, and what they find out for each other.

    `compute_logprobs` gives the trainer's log-probs [R] of trajectories; `old` are those of before the step, where a
    term asked for them. `fingerprint` names the trainer's weights, and `prompts` writes those of a teacher that reads
    more than the task.
    """

    temperature: float = 1.0
    key: int = 0
    reference: Any = None
    teacher: Any = None
    compute_logprobs: Callable[[Sequence[Trajectory]], list[list[float]]] = lambda rows: []
    old: dict[int, tuple[Trajectory, list[float]]] = field(default_factory=dict[int, tuple[Trajectory, list[float]]])
    measured: dict[str, float] = field(default_factory=dict[str, float])
    fingerprint: str = ""
    prompts: Any = None

    def is_current(self, trajectory: Trajectory) -> bool:
        """Whether the weights that sampled are known to be the trainer's."""
        return bool(self.fingerprint) and trajectory.policy_fingerprint == self.fingerprint

    def old_logprobs(self, trajectory: Trajectory) -> Sequence[float] | None:
        """The trainer's log-probs [R] before the step, or None if no term compares with them."""
        found = self.old.get(id(trajectory))  # the trajectory is kept beside them, so no other object gets its id
        return None if found is None else found[1]


def group_rollouts(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The trajectories of each rollout: several where a history was rewritten."""
    rollouts: dict[str, list[Trajectory]] = {}
    for index, t in enumerate(trajectories):
        rollouts.setdefault(t.rollout_id or f"#{index}", []).append(t)
    return list(rollouts.values())


@dataclass
class Row:
    """One row of training while terms weigh it: `advantages` [R] and the other `inputs` of its datum, and those
    [R] that count where the policy did not act (`observed`).

    `weight` is the reduction; `logprobs` [R] are the sampler's, `old` [R] the trainer's before the step, if any.
    """

    trajectory: Trajectory
    weight: float
    logprobs: np.ndarray
    advantages: np.ndarray
    old: np.ndarray | None
    inputs: dict[str, Any]
    observed: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class TrainedTokens:
    """The sampled tokens of some rows after a forward-backward pass, end to end: log-probs now, when sampled and under
    the reference (if it was asked), the reduction's weights, and the metrics that the client gave. `observed` and
    `observed_weight` are those of the environment's tokens that are learned from."""

    now: np.ndarray
    sampled: np.ndarray
    reference: np.ndarray | None
    weight: np.ndarray
    metrics: Mapping[str, float]
    observed: np.ndarray
    observed_weight: np.ndarray


@dataclass(frozen=True)
class Term(Part):
    """A term of an algorithm. A new one is a class in a file of this folder and its entry in `TERMS`.

    An update calls `prepare` before rewards become advantages, then `penalize`, `adjust` with what is learned from,
    `weigh_step` with the rows of an optimizer step, `weigh` for each row, and `measure` after each forward-backward
    pass. `switch` is the option without which the term is not there.
    """

    kind = "term"
    switch: ClassVar[str] = ""

    has_gradient: ClassVar[bool] = False
    """A group of equal rewards has a gradient by it."""
    changes_gradient: ClassVar[bool] = True
    """It changes the gradient beside the reward, which a loss without advantages does not read."""
    needs_whole_batch: ClassVar[bool] = False
    """It cannot be applied to a batch that is still arriving."""
    is_known_when_judged: ClassVar[bool] = False
    """Its penalty follows from the completion alone."""
    needs_budget: ClassVar[bool] = False
    """It needs the budget of a completion."""
    bounds_ratio: ClassVar[bool] = False
    """It bounds the importance weights of a loss that does not."""
    compares_with_start: ClassVar[bool] = False
    """It compares with the policy before the first optimizer step of a batch."""
    why_not_given: ClassVar[str] = ""
    """Why it cannot go with judged completions that the policy did not sample; "" if it can."""
    teaches: ClassVar[bool] = False
    """The policy learns from a teacher by it, whatever the advantage is."""
    needs_teacher: ClassVar[bool] = False
    """It needs another model as the teacher."""
    needs_prompts: ClassVar[bool] = False
    """It needs prompts that tell the policy more than a task does, and the trainer's log-probs behind them."""

    @classmethod
    def place(cls) -> str:
        return f"terms.{cls.name}"

    @property
    def key_of_switch(self) -> str:
        """The key of the switch in the section `algorithm`."""
        return self.flat_names()[self.switch]

    @property
    def strength(self) -> Any:
        """The value of the switch."""
        return getattr(self, self.switch)

    @property
    def has_gradient_at_zero(self) -> bool:
        """Whether a trajectory with advantage 0 may have a gradient by it."""
        return False

    @property
    def needs(self) -> tuple[Feature, ...]:
        """The features that a client must have for this term."""
        return ()

    def used_key(self) -> tuple[str, str]:
        """How it is set, and what to use instead with a client that does not have what it needs."""
        return self.key_of_switch, ""

    @property
    def needs_reference(self) -> bool:
        """Whether the term compares with the policy as reinforcement learning began."""
        return False

    @property
    def reads_reward(self) -> bool:
        """Whether the term follows from rewards, even with an advantage that reads none."""
        return False

    @property
    def shows_verdict(self) -> bool:
        """Whether the policy learns what the verifier says, beside the reward."""
        return False

    @property
    def is_penalty(self) -> bool:
        """Whether the term is subtracted from the reward."""
        return False

    def check_budget(self, max_tokens: int) -> None:
        """ValueError for options that do not fit a budget of `max_tokens` per completion."""

    def check_turns(self, max_turns: int) -> None:
        """ValueError for options that do not fit episodes of at most `max_turns` turns."""

    def check_prompts(self, prompts: Any, task: Task) -> None:
        """ValueError if `prompts` cannot write what it tells the policy of such a task."""

    def advice(self, algorithm: SpecView) -> str:
        """A warning about settings that run and are known to disappoint, or ""."""
        return ""

    def config(self) -> dict[str, float]:
        """Settings for the call of the loss (`loss_fn_config`)."""
        return {}

    def prepare(self, batch: Sequence[Trajectory], prepared: Preparation) -> None:
        """Fill what the trajectories need before rewards become advantages."""

    def penalize(
        self, batch: Sequence[Trajectory], algorithm: SpecView, max_tokens: int, old_logprobs: Logprobs
    ) -> None:
        """Add to `penalty` of every trajectory."""

    def adjust(self, selected: Sequence[Trajectory], prepared: Preparation) -> None:
        """Change the advantages of what is learned from."""

    def weigh_step(self, selected: Sequence[Trajectory], weights: Sequence[float], reduce: Reduce) -> None:
        """See all rows of an optimizer step with the reduction's weights before each is weighed."""

    def weigh(self, row: Row) -> None:
        """Change a row's advantages, or give it inputs."""

    def measure(self, trained: TrainedTokens) -> tuple[float, np.ndarray | None]:
        """What it added to the loss of a pass, and values [T] whose mean is its metric, if it has one."""
        return 0.0, None

    def measure_batch(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        """Metrics of the batch after the update."""
        return {}

    def describe(self) -> str:
        """The words of the term in a run's plan, "" for none."""
        return ""
