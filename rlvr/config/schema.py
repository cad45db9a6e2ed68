"""What can be configured: the sections of a run's config, checked as dataclasses of the parts they configure.

The defaults are those of the parts, in the lower layers; this file restates none. `rlvr.config.build_config` turns
composed values into a `RunConfig`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rlvr.algorithms.registry import find_algorithm, resolve_algorithm
from rlvr.algorithms.specs import Algorithm
from rlvr.clients.client_options import ClientOptions, ModelOptions
from rlvr.clients.registry import check_client
from rlvr.clients.sampler_options import SamplerOptions
from rlvr.clients.teacher import TeacherOptions
from rlvr.config.choices import FLAT, choose_client, list_given, make_client_section
from rlvr.core.messages import SamplingParams
from rlvr.engine.engine_options import EngineLimits
from rlvr.envs.prompt import PromptOptions
from rlvr.tracking import TrackingOptions
from rlvr.training.callbacks import CallbackOptions
from rlvr.training.curriculum import CurriculumOptions
from rlvr.training.evaluate import EvaluationOptions
from rlvr.training.schedules import SCHEDULES
from rlvr.training.sft import SftOptions
from rlvr.training.training_job import RunOptions
from rlvr.training.training_options import TrainingOptions

if TYPE_CHECKING:  # they are made of the variants that there are
    AdvantageOptions = LossOptions = TermOptions = ClientSection = SamplerSection = Any
else:
    from rlvr.config.choices import AdvantageOptions, ClientSection, LossOptions, SamplerSection, TermOptions


@dataclass(frozen=True)
class EnvOptions:
    """A registered environment or `package.module:factory`, and its arguments."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class RewardOptions:
    """A registered reward or `package.module:function`, and its arguments; None takes the environment's own.

    `environment_weight` times the rewards that the environment's episodes give (`StepResult.reward`) is added to the
    verifier's; 0 leaves them out, and the reward `environment` takes them alone. None: the environment's own choice
    with its own verifier; without one an episode that gives a reward is an error. `watch` names verifiers that judge
    every completion and reward none: their means show whether a rising reward is earned or hacked.
    """

    type: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    environment_weight: float | None = None
    watch: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        if self.environment_weight is not None and not math.isfinite(self.environment_weight):
            raise ValueError(f"reward.environment_weight={self.environment_weight}, expected a finite number, or null")


@dataclass(frozen=True)
class AlgorithmOptions:
    """An algorithm spec by name; what else is given takes the place of that part of the spec.

    `advantage` and `loss` are another variant, by `name`, or other options of the spec's own. A term of `terms` is
    added if its switch, the option that the table lists first, is given, and taken away if that is 0.

    `for_tasks` are other algorithms for some tasks, `{code: dapo, chat: {kl_coef: 0.01}}`: by the value that a task has
    under `task_key` in its `meta` (or by its `level`) the name of a spec, or keys of this section in their short form,
    which change the spec that they name, or this one.
    """

    name: str = "grpo"
    advantage: AdvantageOptions = field(default_factory=AdvantageOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    reduction: str | None = None
    terms: TermOptions = field(default_factory=TermOptions)
    drop_equal_groups: bool | None = None
    equal_by: str | None = None
    mask_truncated: bool | None = None
    task_key: str = "source"
    for_tasks: dict[str, Any] = field(default_factory=dict[str, Any])

    def resolve(self) -> Algorithm:
        own = {key: value for key, value in list_given(self).items() if key not in ("name", "task_key", "for_tasks")}
        flat = {_FLAT_OF.get(key, key.removesuffix(".name")): value for key, value in own.items()}
        spec = resolve_algorithm(self.name, **flat)
        others = tuple((str(value), _resolve_other(spec, value, other)) for value, other in self.for_tasks.items())
        return replace(spec, task_key=self.task_key, for_tasks=others) if others else spec


def _resolve_other(spec: Algorithm, value: str, given: Any) -> Algorithm:
    """The spec that an entry of `algorithm.for_tasks` names or changes."""
    options = {"name": given} if isinstance(given, str) else given
    if not isinstance(options, dict) or not options:
        raise ValueError(
            f"algorithm.for_tasks.{value}={given!r}: expected the name of an algorithm, or its keys: {{kl_coef: 0.01}}"
        )
    changes = dict[str, Any](options)
    try:
        base = find_algorithm(str(changes.pop("name"))) if "name" in changes else spec
        return base.with_flat(changes)
    except ValueError as error:
        raise ValueError(f"algorithm.for_tasks.{value}: {error}") from None


_FLAT_OF = {key.partition(".")[2]: flat.partition(".")[2] for flat, key in FLAT.items()}


@dataclass(frozen=True)
class RunConfig:
    """Everything that can be set. Defaults are those of the parts.

    `client` learns, and samples unless `sampler` names others. `callbacks` are called at points of the run
    (`rlvr.training.callbacks`), named like trackers. `imports` are modules that are imported before names are looked up
    (`rlvr.core.plugins`).
    """

    env: EnvOptions
    model: ModelOptions = field(default_factory=ModelOptions)
    client: ClientSection = field(default_factory=ClientSection)
    sampler: SamplerSection = field(default_factory=SamplerSection)
    seed: int = 42
    prompt: PromptOptions = field(default_factory=PromptOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    algorithm: AlgorithmOptions = field(default_factory=AlgorithmOptions)
    teacher: TeacherOptions = field(default_factory=TeacherOptions)
    rollout: SamplingParams = field(default_factory=SamplingParams)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    sft: SftOptions = field(default_factory=SftOptions)
    curriculum: CurriculumOptions = field(default_factory=CurriculumOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    engine: EngineLimits = field(default_factory=EngineLimits)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)
    run: RunOptions = field(default_factory=RunOptions)
    callbacks: list[CallbackOptions | str] = field(default_factory=list[Any])
    imports: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            shown = str(self.seed) if abs(self.seed) < 10**30 else "a number of more than 30 digits"
            raise ValueError(f"seed={shown}; expected a whole number from 0 to 2**63 - 1")
        chooses = self.training.until or self.training.patience or self.sft.until or self.evaluation.report == "best"
        if self.evaluation.interim_tasks is None and chooses:
            raise ValueError(
                "evaluation.interim_tasks=null evaluates the reported tasks between steps, and a run that stops or "
                "chooses its policy by them (training.until, training.patience, sft.until, evaluation.report=best) "
                "would overstate its result; give a number, or leave these out"
            )
        if self.evaluation.report == "best" and not self.run.keep_best:
            raise ValueError("evaluation.report=best needs the best checkpoint; leave run.keep_best=false out")
        if self.curriculum.replay and self.training.order.depends_on_time:
            in_order = [schedule.name for schedule in SCHEDULES.classes() if not schedule.depends_on_time]
            raise ValueError(
                f"curriculum.replay={self.curriculum.replay:g} with training.schedule={self.training.order.name}: "
                f"which tasks are unsolved would depend on time; use schedule={' or '.join(in_order)}"
            )
        if self.training.mode == "rlvr":
            self.training.order.check_run(self.training.steps, self.curriculum, self.evaluation.every)
        given: Any = self.client
        if isinstance(given, str):
            object.__setattr__(self, "client", make_client_section(given))
        check_client(self.client.name)
        options = self.client_options
        sampler = self.sampler_options
        if sampler.needs_folders and not options.writes_folders:
            raise ValueError(
                f"sampler.name={sampler.name} with client={self.client.name}: the servers are given folders of "
                "weights, which that client does not write; use client=local"
            )
        sampler.check_sampling(self.rollout)
        options.check_model(self.model)

    @property
    def client_options(self) -> ClientOptions:
        """The options of the client that is chosen."""
        return choose_client(self.client)

    @property
    def sampler_options(self) -> SamplerOptions:
        """The options of the sampler that is chosen."""
        return self.sampler.variant
