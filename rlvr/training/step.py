"""One step of reinforcement learning: collect a batch of scored trajectories, then update the policy on it.

`collect` and `update` are all there is; the loops only decide when to call them.
Everything here is written against the protocols: the same code trains the engine in this process or a remote one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlvr import draws
from rlvr.algorithms import Algorithm
from rlvr.algorithms.advantages import teaches
from rlvr.protocols import AdamParams, Datum, ForwardBackwardOutput, SamplingParams, TaskSource, TrainingClient
from rlvr.reward import Reward
from rlvr.rollout import open_groups, rollout, score
from rlvr.training.curriculum import Curriculum
from rlvr.training.errors import TrainingStopped, check_error_budget
from rlvr.training.metrics import UpdateSums, answer_statistics, last_of_rollouts, passes_by_level
from rlvr.types import Trajectory, TrajectoryBatch, group_by


@dataclass(frozen=True)
class Schedule:
    """AdamW and its rate over a phase of `steps` steps: linear warm-up, then constant, linear or cosine decay.

    The rate decays to `final_rate` x `learning_rate`. `grad_clip` is the largest global norm, 0 for none.
    """

    learning_rate: float = 1e-5
    warmup_steps: int = 0
    decay: str = "constant"
    final_rate: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        if self.decay not in ("constant", "linear", "cosine"):
            raise ValueError(f"decay={self.decay!r}; expected constant, linear or cosine")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate}, expected a number above 0")
        if not 0 <= self.final_rate <= 1:
            raise ValueError(f"final_rate={self.final_rate}, expected 0 to 1 (a share of learning_rate)")
        if self.decay == "constant" and self.final_rate:
            raise ValueError(f"final_rate={self.final_rate} has no effect with decay=constant; use linear or cosine")

    def at(self, step: int, steps: int) -> AdamParams:
        """The parameters of optimizer step `step` (from 0) of `steps`."""
        rate = self.learning_rate * min(1.0, (step + 1) / (self.warmup_steps + 1))
        if step >= self.warmup_steps and self.decay != "constant":
            through = (step - self.warmup_steps) / max(1, steps - self.warmup_steps)
            left = 1 - through if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * through))
            rate = self.learning_rate * (self.final_rate + (1 - self.final_rate) * left)
        return AdamParams(rate, self.beta1, self.beta2, self.eps, self.weight_decay, self.grad_clip)


@dataclass(frozen=True)
class TrainingOptions:
    """Sizes and safety limits of RL training. `mode` is rlvr, or sft for supervised learning alone.

    With `until` training ends as soon as a quick look at held-out tasks (`evaluation.every`) finds that pass rate; 0
    means all `steps`. A step samples `prompts_per_step` groups of `group_size` answers; groups with equal rewards may
    be replaced by up to `refill` further waves of prompts (DAPO's dynamic sampling). The batch is used `ppo_epochs`
    times in `num_minibatches` optimizer steps each; an update that would start further than `target_kl` (0: never)
    from the sampler, and the rest of the step's, are skipped. `gap_warn` and `gap_stop` bound the mean absolute
    difference between the log-probs of sampler and trainer; `error_budget` is the share of answers whose verifier may
    fail before the run stops.
    """

    mode: str = "rlvr"
    steps: int = 100
    until: float = 0.0
    prompts_per_step: int = 32
    group_size: int = 8
    refill: int = 0
    num_minibatches: int = 1
    ppo_epochs: int = 1
    target_kl: float = 0.0
    mask_truncated: bool = False
    gap_warn: float = 0.01
    gap_stop: float = 0.1
    error_budget: float = 0.05
    optimizer: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if self.mode not in ("rlvr", "sft"):
            raise ValueError(f"training.mode={self.mode!r}; expected rlvr or sft")
        least = {"steps": 0, "prompts_per_step": 1, "group_size": 1, "refill": 0, "num_minibatches": 1, "ppo_epochs": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"training.{name}={getattr(self, name)}, expected at least {low}")
        if not 0 <= self.until <= 1:
            raise ValueError(f"training.until={self.until}, expected a pass rate from 0 to 1")
        if not 0 < self.gap_warn <= self.gap_stop:
            raise ValueError(f"training: gap_warn={self.gap_warn}, gap_stop={self.gap_stop}; expected 0 < warn <= stop")
        if not 0 <= self.error_budget <= 1:
            raise ValueError(f"training.error_budget={self.error_budget}, expected a share from 0 to 1")
        if self.target_kl < 0:
            raise ValueError(f"training.target_kl={self.target_kl}, expected 0 (never) or a divergence above 0")
        if self.target_kl and self.ppo_epochs * self.num_minibatches == 1:
            raise ValueError(
                "training.target_kl has no effect with one update a step; raise ppo_epochs or num_minibatches"
            )


@dataclass
class Collected:
    """A step's trajectories: `all` enter the statistics, `batch` the update. `waves` of prompts were sampled."""

    all: TrajectoryBatch
    batch: list[Trajectory]
    waves: int
    seconds_sampling: float
    seconds_scoring: float


class Trainer:
    """Holds what a step needs; the only state between steps is the client's weights and the curriculum."""

    def __init__(
        self,
        client: TrainingClient,
        source: TaskSource,
        reward: Reward,
        algorithm: Algorithm,
        params: SamplingParams,
        options: TrainingOptions,
        curriculum: Curriculum,
        seed: int,
        warn: Callable[[str], None],
    ) -> None:
        self.client, self.source, self.reward, self.algorithm = client, source, reward, algorithm
        self.params, self.options, self.curriculum = params, options, curriculum
        self.seed, self.warn = seed, warn
        self.max_tokens = params.max_tokens or 0
        self.updates_per_step = options.ppo_epochs * options.num_minibatches
        if options.mode == "sft":
            return
        if algorithm.loss == "importance_sampling" and self.updates_per_step > 1:
            raise ValueError(
                f"algorithm.loss=importance_sampling does not clip, and {self.updates_per_step} updates a step make "
                "the later ones stale; use a loss that clips (algorithm.name=ppo), or one minibatch and one epoch"
            )
        if options.refill and not (algorithm.uses_groups and algorithm.drop_equal_groups):
            raise ValueError(
                f"training.refill={options.refill} has no effect: it replaces groups that teach nothing, and "
                f"{algorithm.name!r} with {algorithm.advantage} keeps every group; leave it out"
            )
        if algorithm.uses_groups and options.group_size == 1:
            raise ValueError(
                f"training.group_size=1 teaches nothing under the group baseline {algorithm.advantage!r}: a group of "
                "one always equals its own mean; use group_size >= 2, or algorithm.name=reinforce"
            )
        if params.temperature == 0:
            raise ValueError(
                "rollout.temperature=0 samples the same answer every time: all rewards of a group are equal and "
                "nothing is learned; use a temperature above 0 (1.0 is the default)"
            )
        if not self.max_tokens:
            raise ValueError("rollout.max_tokens is missing: training needs a budget of tokens per answer")

    def collect(self, step: int) -> Collected:
        """Sample and score wave after wave of prompts until enough groups teach, or `refill` is used up."""
        everything: list[Trajectory] = []
        chosen: list[Trajectory] = []
        teaching = waves = 0
        sampling = scoring = 0.0
        sampler = self.client.save_weights_and_get_sampling_client()
        expected = getattr(sampler, "fingerprint", None)
        wanted = self.options.prompts_per_step
        while waves == 0 or (teaching < wanted and waves <= self.options.refill):
            tasks = self.curriculum.tasks(wanted, step, waves)
            started = time.perf_counter()
            groups = open_groups(
                self.source, tasks, self.options.group_size, self.client.get_tokenizer(), f"{step}/{waves}"
            )
            fresh = rollout(groups, sampler, self.params, seed=draws.key("rollout", self.seed), version=step)
            sampled = time.perf_counter()
            score(fresh, self.reward)
            sampling, scoring = sampling + sampled - started, scoring + time.perf_counter() - sampled
            for trajectory in fresh:
                if expected is not None and trajectory.policy_fingerprint != expected:
                    raise TrainingStopped(
                        f"step {step}: an answer was made by weights {trajectory.policy_fingerprint!r}, "
                        f"expected {expected!r}"
                    )
            everything += fresh
            for group in group_by(fresh, lambda t: t.group_id).values():
                mixed = teaches(group)
                if waves == 0 or (mixed and teaching < wanted):
                    chosen += group
                    teaching += mixed
            waves += 1
        batch = TrajectoryBatch(everything)
        answers = last_of_rollouts(batch)
        failed = [t.scores[self.reward.name] for t in answers if t.reward is None and self.reward.name in t.scores]
        check_error_budget(f"step {step}", self.reward.name, failed, len(answers), self.options.error_budget)
        self.curriculum.observe(passes_by_level(batch, self.reward.name))
        return Collected(batch, chosen, waves, sampling, scoring)

    def update(self, step: int, collected: Collected) -> dict[str, float]:
        """All optimizer steps of one training step; metrics of the answers and of the update. No batch, no step."""
        selected = self.algorithm.select(collected.batch)
        if self.options.mask_truncated:
            cut = {t.rollout_id for t in collected.batch if t.truncated}
            selected = [t for t in selected if t.rollout_id not in cut]
        metrics: dict[str, float] = {"updates": 0.0, "tokens_trained": 0.0}
        sums = UpdateSums(self.algorithm)
        for epoch in range(self.options.ppo_epochs):
            order = draws.permutation(len(selected), draws.key("minibatches", self.seed, step, epoch))
            count = min(self.options.num_minibatches, len(selected))
            for index in range(count):
                part = [selected[i] for i in sorted(order[index::count])]
                rows = self.algorithm.weigh(part, self.max_tokens)
                if not rows:
                    continue
                if self.options.target_kl and metrics["updates"] and self._kl(rows) > self.options.target_kl:
                    answers = answer_statistics(collected.all, self.reward.name)
                    return {**answers, "rollout/waves": float(collected.waves), **metrics, **sums.metrics()}
                output = self._forward_backward(rows)
                on_policy = metrics["updates"] == 0
                sums.add([t for t, _ in rows], output, on_policy)
                if on_policy:
                    self._check_gap(step, sums)
                number = step * self.updates_per_step + int(metrics["updates"])
                adam = self.options.optimizer.at(number, self.options.steps * self.updates_per_step)
                stepped = self.client.optim_step(adam).result()
                metrics["updates"] += 1
                metrics["learning_rate"] = adam.learning_rate
                metrics["grad_norm"] = stepped.metrics.get("grad_norm", math.nan)
                metrics["tokens_trained"] += sum(t.num_action_tokens for t, _ in rows)
        answers = answer_statistics(collected.all, self.reward.name)
        return {**answers, "rollout/waves": float(collected.waves), **metrics, **sums.metrics()}

    def _kl(self, rows: Sequence[tuple[Trajectory, float]]) -> float:
        """How far the policy has moved from the sampler on these rows: mean of r - 1 - log r, by a forward pass."""
        data = [Datum.from_trajectory(t) for t, _ in rows]
        output = self.client.forward(data, self.algorithm.loss, self._loss_config()).result()
        measured = UpdateSums(self.algorithm)
        measured.add([t for t, _ in rows], output, on_policy=False)
        return measured.last_kl

    def _forward_backward(self, rows: Sequence[tuple[Trajectory, float]]) -> ForwardBackwardOutput:
        data = [Datum.from_trajectory(t, weight) for t, weight in rows]
        return self.client.forward_backward(data, self.algorithm.loss, self._loss_config()).result()

    def _loss_config(self) -> dict[str, float]:
        temperature = {"temperature": self.params.temperature}
        return {
            **self.algorithm.loss_config,
            **(temperature if getattr(self.client, "scores_at_temperature", False) else {}),
        }

    def _check_gap(self, step: int, sums: UpdateSums) -> None:
        gap = sums.gap
        trusted = self.params.temperature == 1 or getattr(self.client, "scores_at_temperature", False)
        if gap > self.options.gap_stop and trusted:
            raise TrainingStopped(
                f"step {step}: sampler and trainer disagree by {gap:.3g} nats a token on average, more than "
                f"training.gap_stop={self.options.gap_stop:g}: the gradient would be wrong. Check that both run the "
                "same weights in the same dtype, or raise the threshold knowingly"
            )
        if gap > self.options.gap_warn:
            self.warn(f"step {step}: sampler and trainer differ by {gap:.3g} nats a token on average")
