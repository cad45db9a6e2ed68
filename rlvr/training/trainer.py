"""The update of one step of reinforcement learning: rewards to advantages to optimizer steps, with its metrics.

`collector` samples what a step learns from, and a schedule (`rlvr.training.schedules`) calls both. Everything here is
written against the protocols: the same code trains the engine in this process or a remote one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlvr.algorithms.capabilities import check_supported
from rlvr.algorithms.critic import ValueCritic
from rlvr.algorithms.optimizers import Optimizer
from rlvr.algorithms.update import (
    Passes,
    StreamPlan,
    UpdateInputs,
    loss_config,
    measure_divergence,
    update,
    update_streamed,
)
from rlvr.algorithms.update_statistics import UpdateStatistics
from rlvr.core import rng
from rlvr.core.messages import AdamParams
from rlvr.core.protocols import SamplingClient, TrainingClient
from rlvr.core.types import Trajectory, TrajectoryBatch, group_by, mean
from rlvr.core.verdict_reasons import ReasonNames
from rlvr.training.collector import Collector
from rlvr.training.compatibility import check_compatibility, check_roles, check_temperatures, list_advice
from rlvr.training.errors import TrainingStoppedError, check_error_budget
from rlvr.training.hints import hint_statistics, without_hints
from rlvr.training.informed_prompts import InformedPrompts, make_informed_prompts
from rlvr.training.metrics import (
    answer_statistics,
    last_of_rollouts,
    measure_signal,
    size_statistics,
    verdicts_by_level,
    verdicts_by_task,
)
from rlvr.training.monitor import Monitor
from rlvr.training.parts import StepBatch, TrainerParts


class Trainer:
    """Updates the policy. The client's weights, the curriculum and the running baseline outlive a step."""

    def __init__(self, parts: TrainerParts, monitor: Monitor) -> None:
        self.parts, self.monitor, self.options = parts, monitor, parts.options
        self.collector = Collector(parts)
        self.passes = Passes(parts.options.ppo_epochs, parts.options.num_substeps, parts.options.target_kl)
        self.current_batch: list[Trajectory] = []  # of the step in progress: written to a file if the step fails
        self._reason_names = ReasonNames()
        self.baseline = parts.algorithm.advantage.start_baseline()
        self.reference: SamplingClient | None = None  # the loop sets it if `algorithm.needs_reference`
        self.critic: TrainingClient | None = None  # the loop sets it if the algorithm has one
        if parts.options.mode == "rlvr":
            check_temperatures(parts.algorithm, parts.params, parts.options, parts.client.capabilities)
            for algorithm in parts.algorithm.every:
                check_compatibility(algorithm, parts.params, parts.options)
                check_roles(algorithm, parts.source)
                check_supported(algorithm, parts.client.capabilities)
                for text in list_advice(algorithm, parts.params):
                    monitor.warn(text)
        self.prompts = self._make_prompts()

    def _make_prompts(self) -> InformedPrompts | None:
        """What writes the prompts of the algorithm's terms, checked; None if they need none."""
        parts = self.parts
        terms = [term for one in parts.algorithm.every for term in one.terms if term.needs_prompts]
        if not terms or parts.options.mode != "rlvr":
            return None
        source, tokenizer = parts.source, parts.client.get_tokenizer()
        prompts = make_informed_prompts(source, tokenizer, parts.reward.name, terms[0].key(terms[0].switch))
        for term in terms:
            term.check_prompts(prompts, source.train(0, 0, source.levels[0]))
        return prompts

    def accept(self, step: int, batch: TrajectoryBatch) -> None:
        """Check a batch against the error budget, and let the curriculum see its verdicts."""
        self._check_error_budget(step, batch)
        curriculum, reward = self.parts.curriculum, self.parts.reward.name
        if self.options.is_control:  # it must learn nothing from the verifier, by the curriculum too
            curriculum.under_way.clear()
        else:
            curriculum.observe(verdicts_by_level(without_hints(batch), reward))
            curriculum.observe_tasks(verdicts_by_task(batch, reward))

    def update(self, step: int, collected: StepBatch) -> dict[str, float]:
        """Make all optimizer steps of one training step; metrics of the completions and of the update."""
        self.current_batch = collected.batch
        statistics = update(
            self.parts.client,
            self.parts.algorithm,
            collected.batch,
            self._adam(step, self.options.optimizer.variant),
            self.passes,
            self._update_inputs(step),
            check=lambda first: self._check_gap(step, first.gap, collected.batch),
        )
        return self._metrics(step, collected, statistics)

    def learn_from(self, step: int, arriving: Iterable[Sequence[Trajectory]]) -> tuple[dict[str, float], StepBatch]:
        """Update from a batch that arrives in parts: part by part with `num_minibatches`, else once it is whole."""
        if self.options.order.minibatches > 1:
            metrics, collected = self._update_streamed(step, arriving)
            self.accept(step, collected.all)
            return metrics, collected
        batch = [t for part in arriving for t in part]
        collected = StepBatch(TrajectoryBatch(batch), batch)
        self.accept(step, collected.all)
        return self.update(step, collected), collected

    def _update_streamed(
        self, step: int, arriving: Iterable[Sequence[Trajectory]]
    ) -> tuple[dict[str, float], StepBatch]:
        """`update` from minibatches that are still arriving, and what they were in the end."""
        batch = self.current_batch = list[Trajectory]()
        o, minibatches = self.options, self.options.order.minibatches

        def record_parts() -> Iterator[Sequence[Trajectory]]:
            for number, part in enumerate(arriving, 1):
                batch.extend(part)
                if number % minibatches == 0:  # the last one before an optimizer step
                    self._check_error_budget(step, TrajectoryBatch(batch))
                yield part

        stream = StreamPlan(o.num_substeps, minibatches, o.prompts_per_step * o.group_size // o.num_substeps)
        statistics = update_streamed(
            self.parts.client,
            self.parts.algorithm,
            record_parts(),
            self._adam(step, self.options.optimizer.variant),
            stream,
            self._update_inputs(step),
            check=lambda first: self._check_gap(step, first.gap, batch),
        )
        collected = StepBatch(TrajectoryBatch(batch), batch)
        return self._metrics(step, collected, statistics), collected

    def _value_critic(self, step: int) -> ValueCritic | None:
        if self.critic is None:
            return None
        options = self.options.critic
        alone = step < options.warmup_steps
        return ValueCritic(self.critic, self._adam(step, options.optimizer.variant), options.value_clip, alone)

    def _adam(self, step: int, optimizer: Optimizer) -> Callable[[int], AdamParams]:
        per_step = self.options.ppo_epochs * self.options.num_substeps
        steps = self.options.steps * per_step
        return lambda number: optimizer.at(step * per_step + number, steps)

    def _update_inputs(self, step: int) -> UpdateInputs:
        return UpdateInputs(
            baseline=self.baseline,
            max_tokens=self.parts.params.max_tokens or 0,
            temperature=self.collector.params(step).temperature,
            key=rng.key(self.parts.seed, step),
            reference=self.reference,
            teacher=self.parts.teacher,
            critic=self._value_critic(step),
            is_given=self.options.completions == "given",
            prompts=self.prompts,
        )

    def _metrics(self, step: int, collected: StepBatch, statistics: UpdateStatistics) -> dict[str, float]:
        change = self._measure_change(step, collected) if statistics.updates else {}
        is_given = self.options.completions == "given"  # then rewards, verdicts and log-probs are the data's
        completions = (
            size_statistics(collected.all)
            if is_given
            else answer_statistics(collected.all, self.parts.reward.name, self._reason_names)
        )
        completions |= measure_signal(collected.all, self.parts.algorithm)
        if self.parts.algorithm.has_penalty:
            completions["penalty"] = mean([t.penalty for t in last_of_rollouts(TrajectoryBatch(collected.batch))])
        for term in (term for one in self.parts.algorithm.every for term in one.terms):
            completions |= term.measure_batch(collected.batch)
        if self.options.temperature_end is not None:
            completions["rollout/temperature"] = self.collector.params(step).temperature
        if self.parts.curriculum.options.replay:
            completions["curriculum/unsolved"] = float(len(self.parts.curriculum.unsolved))
        if self.parts.curriculum.options.hint_step:
            completions |= hint_statistics(collected.all, self.parts.reward.name)
        progress = {"progress/batch": float(step), "progress/done_frac": (step + 1) / self.options.steps}
        updates = statistics.metrics()
        if is_given:
            updates.pop("optim/entropy", None)
        self.monitor.watch_drift(step, updates)
        self.monitor.watch_critic(step, updates)
        return {**completions, "rollout/waves": float(collected.waves), **updates, **change, **progress}

    def _measure_change(self, step: int, collected: StepBatch) -> dict[str, float]:
        """Measure how far the updates took the policy from the one that sampled, by a forward pass over a few groups.

        Whole groups: their completions share the computation of their prompt.
        """
        scored = [t for t in collected.batch if t.reward is not None and not t.is_empty]
        groups = list(group_by(scored, lambda t: t.group_id).values())
        few = [t for group in groups[:: max(1, len(groups) // max(2, len(groups) // 16))] for t in group]
        config = loss_config(self.parts.algorithm, self.parts.client, self.collector.params(step).temperature)
        change = measure_divergence(self.parts.client, few, config)
        self.monitor.watch_policy_change(step, change)
        return {"optim/kl_after": change}

    def _check_gap(self, step: int, gap: float, batch: Sequence[Trajectory]) -> None:
        """Raise TrainingStoppedError if sampler and trainer give too different log-probs for the same tokens."""
        if any(t.policy_version < step for t in batch):
            return  # stale completions differ on purpose: only those of this version say how well both agree
        comparable = (
            self.collector.params(step).temperature == 1 or self.parts.client.capabilities.scores_at_temperature
        )
        if gap > self.options.gap_stop and comparable:
            raise TrainingStoppedError(
                f"step {step + 1}: sampler and trainer disagree by {gap:.3g} nats a token on average, more than "
                f"training.gap_stop={self.options.gap_stop:g}: the gradient would be wrong. Sampled by "
                f"{batch[0].policy_fingerprint or 'unnamed weights'}, trained from the weights "
                f"{self.parts.client.weights_sha256()[:12] or 'at the server'}. Check that both are the "
                "same, in the same dtype, or raise the threshold knowingly"
            )
        self.monitor.watch_gap(step, gap)

    def _check_error_budget(self, step: int, batch: TrajectoryBatch) -> None:
        name = self.parts.reward.name
        completions = last_of_rollouts(batch)
        failed = [t for t in completions if t.reward is None and name in t.scores]
        check_error_budget(f"step {step + 1}", name, failed, len(completions), self.options.error_budget)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores beside the weights."""
        of_roles = {} if self.baseline.of_roles is None else {"role_baselines": dict(self.baseline.of_roles)}
        return {"curriculum": self.parts.curriculum.state(), "baseline": self.baseline.value, **of_roles}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.parts.curriculum.restore(state["curriculum"])
        self.baseline.value = state["baseline"]
        if self.baseline.of_roles is not None:
            self.baseline.of_roles = dict(state["role_baselines"])
