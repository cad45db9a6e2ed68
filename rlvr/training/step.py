"""One step of reinforcement learning: collect a batch of scored trajectories, then update the policy on it.

`collect` and `update` are all there is; the loops only decide when to call them.
Everything here is written against the protocols: the same code trains the engine in this process or a remote one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvr import draws
from rlvr.algorithms import Algorithm
from rlvr.algorithms.advantages import Memory, teaches
from rlvr.algorithms.roads import check_roads
from rlvr.algorithms.update import Passes, divergence, loss_config, update
from rlvr.messages import AdamParams, SamplingParams
from rlvr.protocols import SamplingClient, TaskSource, TrainingClient
from rlvr.reward import Reward
from rlvr.rollout import open_groups, rollout, score
from rlvr.training.curriculum import Curriculum
from rlvr.training.errors import TrainingStopped, check_error_budget
from rlvr.training.metrics import answer_statistics, last_of_rollouts, passes_by_level
from rlvr.types import Trajectory, TrajectoryBatch, group_by, mean


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
    from the sampler, and the rest of the step's, are skipped. The first step that ends further than `kl_warn` from it,
    measured on a sixteenth of its answers, is said. `gap_warn` and `gap_stop` bound the mean absolute difference
    between the log-probs of sampler and trainer; `error_budget` is the share of answers whose verifier may fail before
    the run stops. A task whose prompt has more than `max_prompt_tokens` (None: whatever fits the model) stops it too.

    `control=random_reward` trains on coin flips instead of the verifier's verdicts: what a gain without any signal
    looks like, arXiv:2506.10947. Rewards in the metrics of training are then the coins; pass rates and evaluations stay
    true, but neither `until` nor a curriculum acts on them.
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
    max_prompt_tokens: int | None = None
    control: str = "none"
    kl_warn: float = 0.1
    gap_warn: float = 0.01
    gap_stop: float = 0.1
    error_budget: float = 0.05
    optimizer: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if self.mode not in ("rlvr", "sft"):
            raise ValueError(f"training.mode={self.mode!r}; expected rlvr or sft")
        if self.control not in ("none", "random_reward"):
            raise ValueError(f"training.control={self.control!r}; expected none or random_reward")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"training.max_prompt_tokens={self.max_prompt_tokens}, expected at least 1, or null")
        if not self.kl_warn > 0:
            raise ValueError(f"training.kl_warn={self.kl_warn}, expected a divergence above 0")
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
        if not self.target_kl >= 0:
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
    """Holds what a step needs. What outlives a step is the client's weights, the curriculum and `memory`."""

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
        watched: Sequence[Reward] = (),
    ) -> None:
        self.client, self.source, self.reward, self.algorithm = client, source, reward, algorithm
        self.params, self.options, self.curriculum = params, options, curriculum
        self.seed, self.warn, self.watched = seed, warn, watched
        self.max_tokens = params.max_tokens or 0
        self.passes = Passes(options.ppo_epochs, options.num_minibatches, options.target_kl)
        self._told_of_change = False
        self.memory = Memory(algorithm.baseline_decay)
        self.reference: SamplingClient | None = None  # the loop sets it, where `algorithm.kl_coef` asks for one
        if options.mode == "rlvr":
            check_recipe(algorithm, params, options)
            check_roads(algorithm, client)
            for text in advice(algorithm, params):
                warn(text)

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
            fresh = rollout(
                groups,
                sampler,
                self.params,
                seed=draws.key("rollout", self.seed),
                version=step,
                max_prompt_tokens=self.options.max_prompt_tokens,
            )
            sampled = time.perf_counter()
            score(fresh, self.reward, self.watched)
            if self.options.control == "random_reward":
                flip_coins(fresh, self.seed)
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
        if self.options.control == "none":  # a control run must learn nothing from the verifier by any road
            self.curriculum.observe(passes_by_level(batch, self.reward.name))
        return Collected(batch, chosen, waves, sampling, scoring)

    def update(self, step: int, collected: Collected) -> dict[str, float]:
        """All optimizer steps of one training step; metrics of the answers and of the update. No batch, no step."""
        per_step = self.options.ppo_epochs * self.options.num_minibatches
        schedule, steps = self.options.optimizer, self.options.steps * per_step
        measured = update(
            self.client,
            self.algorithm,
            collected.batch,
            lambda number: schedule.at(step * per_step + number, steps),
            self.passes,
            memory=self.memory,
            max_tokens=self.max_tokens,
            temperature=self.params.temperature,
            key=draws.key(self.seed, step),
            reference=self.reference,
            check=lambda first: self._check_gap(step, first.gap),
        )
        moved = self._moved(step, collected) if measured.updates else {}
        answers = answer_statistics(collected.all, self.reward.name)
        if self.algorithm.penalizes:
            answers["penalty"] = mean([t.penalty for t in last_of_rollouts(TrajectoryBatch(collected.batch))])
        return {**answers, "rollout/waves": float(collected.waves), **measured.metrics(), **moved}

    def _moved(self, step: int, collected: Collected) -> dict[str, float]:
        """How far the updates took the policy from the one that sampled, by a forward pass over a few answers."""
        known = [t for t in collected.batch if t.reward is not None]
        few = known[:: max(1, len(known) // max(8, len(known) // 16))]
        moved = divergence(self.client, few, loss_config(self.algorithm, self.client, self.params.temperature))
        if moved > self.options.kl_warn and not self._told_of_change:
            self._told_of_change = True
            self.warn(
                f"step {step}: large policy change: it ended {moved:.3g} nats a token from the policy that sampled, "
                f"more than training.kl_warn={self.options.kl_warn:g}. A lower rate, fewer ppo_epochs or a target_kl "
                "hold it down (said once; optim/kl_after has every step)"
            )
        return {"optim/kl_after": moved}

    def _check_gap(self, step: int, gap: float) -> None:
        trusted = self.params.temperature == 1 or getattr(self.client, "scores_at_temperature", False)
        if gap > self.options.gap_stop and trusted:
            raise TrainingStopped(
                f"step {step}: sampler and trainer disagree by {gap:.3g} nats a token on average, more than "
                f"training.gap_stop={self.options.gap_stop:g}: the gradient would be wrong. Check that both run the "
                "same weights in the same dtype, or raise the threshold knowingly"
            )
        if gap > self.options.gap_warn:
            self.warn(f"step {step}: sampler and trainer differ by {gap:.3g} nats a token on average")

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights."""
        return {"curriculum": self.curriculum.state(), "baseline": self.memory.baseline}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.curriculum.restore(state["curriculum"])
        self.memory.baseline = state["baseline"]


def flip_coins(trajectories: Sequence[Trajectory], seed: int) -> None:
    """The control: 0 or 1 with equal chance in place of every known reward, the same for all parts of a rollout."""
    for t in trajectories:
        if t.reward is not None:
            t.reward = float(draws.uniform(draws.key("coin", seed, t.rollout_id), 0) < 0.5)


def check_recipe(algorithm: Algorithm, params: SamplingParams, options: TrainingOptions) -> None:
    """ValueError where algorithm, sampling and sizes contradict each other or could teach nothing."""
    updates = options.ppo_epochs * options.num_minibatches
    if algorithm.loss == "importance_sampling" and updates > 1:
        raise ValueError(
            f"algorithm.loss=importance_sampling does not clip, and {updates} updates a step make "
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
    if not params.max_tokens:
        raise ValueError("rollout.max_tokens is missing: training needs a budget of tokens per answer")
    if algorithm.overlong_buffer is not None and algorithm.overlong_buffer > params.max_tokens:
        raise ValueError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} is longer than the budget rollout.max_tokens="
            f"{params.max_tokens}: every answer would be penalised; use a fifth of the budget, say"
        )


def advice(algorithm: Algorithm, params: SamplingParams) -> list[str]:
    """Recipes that run and are known to disappoint."""
    told: list[str] = []
    if algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        told.append(
            "algorithm.kl_in=loss with kl_estimator=k1: its gradient is 0 on average, so nothing holds the policy near "
            "the reference; use k2 in the loss, or k1 in the reward"
        )
    if algorithm.penalizes and algorithm.advantage == "group_normalized" and not algorithm.drop_equal_groups:
        told.append(
            "algorithm.advantage=group_normalized divides by the deviation of reward less penalty: in a group of equal "
            "rewards the penalty alone is blown up to size 1; use group_mean, or drop_equal_groups=true"
        )
    if params.top_p < 1 or params.top_k != -1 or params.min_p > 0:
        told.append(
            "rollout: top_p, top_k or min_p cut the distribution that answers are drawn from, while the gradient is "
            "that of the whole one: tokens outside are never tried, and the estimate is biased"
        )
    return told
