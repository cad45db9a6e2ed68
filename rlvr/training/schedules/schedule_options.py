"""The options of each schedule: what `training.schedule: {name: ..., ...}` may hold, and what the schedule can do.

The schedules themselves are loaded when a run makes one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlvr.core.protocols import Feature
from rlvr.core.registry import load_path
from rlvr.core.variants import Section, Variant, setting


@dataclass(frozen=True)
class ScheduleOptions(Variant):
    """The options of a schedule. A new one is a class with the `path` of its `Schedule`, and its entry in `SCHEDULES`.

    What is declared here of a schedule decides what it may be combined with.
    """

    kind = "schedule"
    section = "training"

    path: ClassVar[str] = ""
    """`package.module:Class`: the schedule, made of a `Trainer` and the `Journal` of the run."""
    samples_ahead: ClassVar[bool] = True
    """The next prompts are drawn before a batch is sampled, and parts of a batch may be of different versions."""
    depends_on_time: ClassVar[bool] = False
    """The time that a completion takes decides when it is learned from: two runs of a config differ."""

    @property
    def max_lag(self) -> int:
        """The most steps by which a completion is older than the policy that learns from it."""
        return 0

    @property
    def minibatches(self) -> int:
        """How many forward-backward calls make the gradient of an optimizer step, each as soon as its groups are
        sampled."""
        return 1

    needs: ClassVar[tuple[Feature, ...]] = ()
    """The features that a client must have for this schedule."""

    def check_run(self, steps: int, curriculum: Any, evaluate_every: int) -> None:
        """ValueError for other settings of a run that contradict it."""

    def unread(self) -> Mapping[str, str]:
        """The options of the schedule that have no effect beside its other options, and why."""
        return {}

    def make(self, trainer: Any, journal: Any) -> Any:
        """The schedule of a run."""
        return load_path("training.schedule", self.path)(trainer, journal)


@dataclass(frozen=True)
class SyncOptions(ScheduleOptions):
    """Sample a batch, learn from it, repeat."""

    name = "sync"
    path = "rlvr.training.schedules.sync:Synchronous"
    samples_ahead = False


@dataclass(frozen=True)
class ReptileOptions(ScheduleOptions):
    """Reptile (arXiv:1803.02999): weights from which a few steps on a new family of tasks go far.

    `inner_steps` steps on one level of the environment lead from the weights W to W', and the outer step is
    W + `outer_rate` x (W' - W), with a fresh optimizer. Then comes another level, all of them in turn.
    """

    name = "reptile"
    path = "rlvr.training.schedules.reptile:Reptile"
    samples_ahead = False
    needs = (Feature.INTERPOLATION,)

    inner_steps: int = setting(5, low=1, expected="at least 1")
    outer_rate: float = setting(0.5, low=math.ulp(0.0), high=1, expected="above 0, at most 1")

    def check_run(self, steps: int, curriculum: Any, evaluate_every: int) -> None:
        for key, given in (("training.steps", steps), ("evaluation.every", evaluate_every)):
            if given % self.inner_steps:
                raise ValueError(
                    f"{key}={given} with schedule=reptile: a policy in the middle of an inner loop is adapted to one "
                    f"family; give a multiple of {self.key('inner_steps')}={self.inner_steps}"
                )
        if curriculum.by != "uniform" or curriculum.replay:
            given = f"curriculum.by={curriculum.by}" if curriculum.by != "uniform" else "curriculum.replay"
            raise ValueError(
                f"{given} with schedule=reptile: an inner loop takes new tasks of one level, and the levels come in "
                "turn; leave it out"
            )


@dataclass(frozen=True)
class SamplingAheadOptions(ScheduleOptions):
    """What the schedules that sample ahead have in common."""

    lag: int = setting(0, low=0, expected="at least 0", flat="max_steps_off_policy")
    num_minibatches: int = setting(1, low=1, expected="at least 1", flat="num_minibatches")

    @property
    def max_lag(self) -> int:
        return self.lag

    @property
    def minibatches(self) -> int:
        return self.num_minibatches


@dataclass(frozen=True)
class FixedLagOptions(SamplingAheadOptions):
    """Batch b is sampled by version max(0, b - `lag`), in order: a resumed run is the same to the bit.

    With `num_minibatches` above 1 every optimizer step adds up the gradients of that many forward-backward calls, each
    made as soon as its groups are sampled.
    """

    name = "fixed_lag"
    path = "rlvr.training.schedules.fixed_lag:FixedLag"


@dataclass(frozen=True)
class CompletionOrderOptions(SamplingAheadOptions):
    """What is sampled first is learned from first, and nothing is more than `lag` steps old.

    A group that would become too old is waited for (`stale=pace`) or discarded (`stale=discard`).
    """

    name = "completion"
    path = "rlvr.training.schedules.completion_order:CompletionOrder"
    depends_on_time = True

    stale: str = setting("pace", choices=("pace", "discard"), flat="stale")

    def unread(self) -> Mapping[str, str]:
        return {} if self.lag else {"stale": f"{self.key('lag')} is 0: every group is waited for"}


class ScheduleChoice(Section):
    """A schedule by name. Without one it is sync, or fixed_lag if one of its numbers is above its minimum."""

    def choose_name(self) -> str:
        named: str | None = getattr(self, self.tag)
        return named or (FixedLagOptions if self.list_numbers_above() else SyncOptions).name

    def list_numbers_above(self) -> dict[str, int]:
        """The options that ask for sampling ahead, by their keys."""
        least = SamplingAheadOptions()
        given = {option: getattr(self, option) for option in least.options}
        return {least.flat_names()[name]: value for name, value in given.items() if value > least.options[name]}

    def check(self) -> None:
        """ValueError for numbers that ask for sampling ahead, where the schedule that is named does none."""
        for key, value in () if self.variant.samples_ahead else self.list_numbers_above().items():
            raise ValueError(self.registry.about_other(key, value, type(self.variant)))
