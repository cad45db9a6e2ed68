"""The options of RL training: sizes, limits, the schedule of sampling, and the learning rate.

Three sizes are easily confused. A step's batch is cut into `num_substeps` optimizer steps; each of these may be made of
the schedule's `num_minibatches` forward-backward calls, as their groups arrive; and the batch is used `ppo_epochs`
times. What these options may not be combined with is in `rlvr.training.compatibility`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rlvr.algorithms.optimizers import CriticOptimizerSection, OptimizerSection
from rlvr.training.schedules import ScheduleSection
from rlvr.training.schedules.schedule_options import ScheduleOptions

CONTROLS = ("none", "random_reward", "equal_rewards")
LONG_PROMPTS = ("filter", "truncate_left", "error")


def scaled_learning_rate(base: float, base_batch: int, batch: int) -> float:
    """Scale a learning rate from batches of `base_batch` completions to `batch`: with the square root of the size.

    The noise of a gradient falls as 1 / sqrt(batch), and Adam divides by it (arXiv:2205.10287).
    """
    if not base > 0 or base_batch < 1 or batch < 1:
        raise ValueError(
            f"scaled_learning_rate: base={base}, base_batch={base_batch}, batch={batch}; expected a rate above 0 and "
            "batches of at least 1"
        )
    return base * math.sqrt(batch / base_batch)


@dataclass(frozen=True)
class CriticOptions:
    """The critic of an algorithm with one (`algorithm.advantage=gae`): a second adapter, or a second model.

    It begins with the policy's weights as RL begins and a zero-initialised value head (V = 0), and learns from the same
    batches in as many optimizer steps. In the first `warmup_steps` steps of RL it learns alone, while the schedule of
    the policy's learning rate goes on. `value_clip` bounds how far a value may move from the one before the update;
    null: no bound. It has its own `optimizer`.
    """

    warmup_steps: int = 0
    value_clip: float | None = 0.2
    optimizer: CriticOptimizerSection = field(default_factory=CriticOptimizerSection)

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", CriticOptimizerSection.of(self.optimizer))
        if self.warmup_steps < 0:
            raise ValueError(f"training.critic.warmup_steps={self.warmup_steps}, expected at least 0")
        if self.value_clip is not None and not 0 < self.value_clip < math.inf:
            raise ValueError(f"training.critic.value_clip={self.value_clip}, expected above 0, or null for no clip")


@dataclass(frozen=True)
class TrainingOptions:
    """Sizes and safety limits of RL training. `mode` is rlvr, or sft for supervised fine-tuning alone.

    With `until` training ends as soon as an interim evaluation (`evaluation.every`) reaches that pass rate; 0 means all
    `steps`. With `patience` it also ends after that many interim evaluations in a row without a new best beyond noise,
    that is, by more than one standard error; 0 means never. A step samples `prompts_per_step` groups of `group_size`
    completions; groups with equal rewards may be replaced by up to `dynamic_sampling` further waves of prompts (DAPO).
    The batch is used `ppo_epochs` times in `num_substeps` optimizer steps each; once the policy is further than
    `target_kl` (0: no limit) from the sampler, the other updates of the step are skipped. The first step that ends
    further than `kl_warn` from it, measured on a sixteenth of the completions, is a warning. `gap_warn` and `gap_stop`
    bound the mean absolute difference between the log-probs of sampler and trainer; `error_budget` is the share of
    completions whose verifier may fail before the run stops.

    With `epochs` the number of steps follows from the number of training tasks: `steps` = epochs x tasks /
    `prompts_per_step`, rounded up. A prompt of more than `max_prompt_tokens` (None: what fits the model together with
    `rollout.max_tokens`) is left out of training and evaluation (`long_prompts=filter`), loses its beginning
    (`truncate_left`), or is an error before the run starts (`error`). Of an agent each call with more is refused.

    With a `schedule` that samples ahead a completion may be some steps older than the policy that learns from it, so
    sampling never waits for training: sync (sample a batch, learn from it), fixed_lag or completion, each with options
    of its own (`rlvr.training.schedules`). Without a name it is sync, or fixed_lag if `lag` is above 0 or
    `num_minibatches` above 1.

    With `completions=given` nothing is sampled: a group is what its task brings along. For dpo and ipo that is a pair
    of completions (`meta["chosen"]` and `meta["rejected"]`), for kto one with a label (`meta["completion"]` and
    `meta["label"]`; `rlvr.training.given_completions`).

    With `temperature_end` the temperature of sampling goes from `rollout.temperature` to it, in equal steps from the
    first step to the last. Evaluations keep `rollout.temperature`.

    `false_positives` and `false_negatives` are the chances that a completion which fails is rewarded like one that
    passes (1), and one that passes like one that fails (0), the same completion of a task always alike;
    `noise_correction` undoes the two rates on average (`rlvr.training.verifier_noise`). What is said of `control` holds
    for such a run too.

    `control=random_reward` trains on coin flips instead of verdicts, which shows the gain without any signal
    (arXiv:2506.10947). Rewards in the training metrics are then the coins; pass rates and evaluations stay true, but
    neither `until`, `patience` nor a curriculum uses them. `control=equal_rewards` pays 1 for every completion: an
    algorithm with a baseline then has nothing to learn from.
    """

    mode: str = "rlvr"
    steps: int = 100
    epochs: float | None = None
    until: float = 0.0
    patience: int = 0
    prompts_per_step: int = 32
    group_size: int = 8
    dynamic_sampling: int = 0
    num_substeps: int = 1
    ppo_epochs: int = 1
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    target_kl: float = 0.0
    max_prompt_tokens: int | None = None
    long_prompts: str = "filter"
    completions: str = "sampled"
    temperature_end: float | None = None
    control: str = "none"
    false_positives: float = 0.0
    false_negatives: float = 0.0
    noise_correction: bool = False
    kl_warn: float = 0.1
    gap_warn: float = 0.01
    gap_stop: float = 0.1
    error_budget: float = 0.05
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    critic: CriticOptions = field(default_factory=CriticOptions)

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", OptimizerSection.of(self.optimizer))
        object.__setattr__(self, "schedule", ScheduleSection.of(self.schedule))
        choices: dict[str, tuple[str | None, ...]] = {
            "mode": ("rlvr", "sft"),
            "completions": ("sampled", "given"),
            "control": CONTROLS,
            "long_prompts": LONG_PROMPTS,
        }
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                *others, last = ("null" if k is None else k for k in known)
                raise ValueError(f"training.{name}={value!r}; expected {', '.join(others)} or {last}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"training.max_prompt_tokens={self.max_prompt_tokens}, expected at least 1, or null")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"training.epochs={self.epochs}, expected a number above 0, or null for training.steps")
        if not self.kl_warn > 0:
            raise ValueError(f"training.kl_warn={self.kl_warn}, expected a divergence above 0")
        least = dict.fromkeys(("steps", "patience", "dynamic_sampling"), 0) | dict.fromkeys(
            ("prompts_per_step", "group_size", "num_substeps", "ppo_epochs"), 1
        )
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"training.{name}={getattr(self, name)}, expected at least {low}")
        if self.temperature_end is not None and not 0 < self.temperature_end < math.inf:
            raise ValueError(f"training.temperature_end={self.temperature_end}, expected a number above 0, or null")
        self._check_noise()
        if not 0 <= self.until <= 1:
            raise ValueError(f"training.until={self.until}, expected a pass rate from 0 to 1")
        if not 0 < self.gap_warn <= self.gap_stop:
            raise ValueError(f"training: gap_warn={self.gap_warn}, gap_stop={self.gap_stop}; expected 0 < warn <= stop")
        if not 0 <= self.error_budget <= 1:
            raise ValueError(f"training.error_budget={self.error_budget}, expected a share from 0 to 1")
        if not self.target_kl >= 0:
            raise ValueError(f"training.target_kl={self.target_kl}, expected 0 (never) or a divergence above 0")
        if self.target_kl and self.ppo_epochs * self.num_substeps == 1:
            raise ValueError(
                "training.target_kl has no effect with one update a step; raise ppo_epochs or num_substeps"
            )

    def _check_noise(self) -> None:
        positives, negatives = self.false_positives, self.false_negatives
        if not (0 <= positives < 1 and 0 <= negatives < 1 and positives + negatives < 1):
            raise ValueError(
                f"training: false_positives={positives}, false_negatives={negatives}; expected chances of at "
                "least 0 whose sum is below 1 (at 1 a verdict says nothing)"
            )
        if self.has_noise and self.control != "none":
            raise ValueError(
                f"training.control={self.control} replaces every reward, so false_positives and false_negatives have "
                "no effect; leave them or control out"
            )
        if self.noise_correction and not self.has_noise:
            raise ValueError(
                "training.noise_correction=true has no effect without false_positives or false_negatives; leave it out"
            )

    @property
    def has_noise(self) -> bool:
        """Whether verdicts are wrong on purpose."""
        return self.false_positives > 0 or self.false_negatives > 0

    @property
    def is_control(self) -> bool:
        """Whether the run is not to learn from, or stop by, the verifier's true verdicts."""
        return self.control != "none" or self.has_noise

    @property
    def order(self) -> ScheduleOptions:
        """The schedule in effect: the one that is named, or that its numbers imply."""
        return self.schedule.variant

    @property
    def slots(self) -> int:
        """The most groups in flight: sampled or being sampled, and not yet learned from."""
        return self.prompts_per_step * (self.order.max_lag + 1)
