"""One step of reinforcement learning: collect a batch of scored trajectories, then update the policy on it.

`collect` and `update` are all there is; the loops only decide when to call them: `learn` one after the other, and
`rlvr.training.pipelined` while further batches are sampled.
Everything here is written against the protocols: the same code trains the engine in this process or a remote one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr import draws
from rlvr.algorithms import Algorithm
from rlvr.algorithms.advantages import Memory, teaches
from rlvr.algorithms.measure import Measured
from rlvr.algorithms.roads import check_roads
from rlvr.algorithms.update import Passes, Stream, divergence, loss_config, update, update_streamed
from rlvr.messages import AdamParams, SamplingParams
from rlvr.protocols import SamplingClient, TaskSource, TrainingClient
from rlvr.reward import Reward
from rlvr.rollout import Group, open_groups, rollout
from rlvr.scoring import Scoring, score
from rlvr.training.curriculum import Curriculum
from rlvr.training.errors import TrainingStopped, check_error_budget
from rlvr.training.metrics import answer_statistics, last_of_rollouts, passes_by_level
from rlvr.training.options import TrainingOptions
from rlvr.training.recipe import advice, check_recipe
from rlvr.types import Task, Trajectory, TrajectoryBatch, group_by, mean

KL_SAMPLE_TRAIN = 0.01  # nats a token: the cookbook's rule of thumb for a stable run


@dataclass
class Collected:
    """A step's trajectories: `all` enter the statistics, `batch` the update. `waves` of prompts were sampled."""

    all: TrajectoryBatch
    batch: list[Trajectory]
    waves: int = 1
    seconds_sampling: float = 0.0
    seconds_scoring: float = 0.0


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
        self.passes = Passes(options.ppo_epochs, options.num_substeps, options.target_kl)
        self._told_of_change = self._told_of_drift = self._told_of_gap = False
        self.verifiers = [reward, *watched]
        self.under_way: list[Trajectory] = []  # what the step learns from: kept where the step fails
        self.memory = Memory(algorithm.baseline_decay)
        self.reference: SamplingClient | None = None  # the loop sets it, where `algorithm.kl_coef` asks for one
        if options.mode == "rlvr":
            check_recipe(algorithm, params, options)
            check_roads(algorithm, client)
            for text in advice(algorithm, params):
                warn(text)

    def learn(self, step: int) -> tuple[dict[str, float], Collected]:
        """A whole step: sample, score, update. Its metrics, and the answers that they are about."""
        self.under_way = []
        collected = self.collect(step)
        began = time.perf_counter()
        metrics = self.update(step, collected)
        times = {
            "time/sampling": collected.seconds_sampling,
            "time/scoring": collected.seconds_scoring,
            "time/update": time.perf_counter() - began,
        }
        return {**metrics, **times}, collected

    def collect(self, step: int) -> Collected:
        """Sample and score wave after wave of prompts until enough groups teach, or `refill` is used up."""
        everything: list[Trajectory] = []
        chosen: list[Trajectory] = []
        teaching = waves = 0
        sampling = scoring = 0.0
        sampler = self.client.save_weights_and_get_sampling_client()
        wanted = self.options.prompts_per_step
        while waves == 0 or (teaching < wanted and waves <= self.options.refill):
            tasks = self.curriculum.tasks(wanted, step, waves)
            fresh, *seconds = self.answers(self.groups(tasks, f"{step}/{waves}"), sampler, step)
            sampling, scoring = sampling + seconds[0], scoring + seconds[1]
            everything += fresh
            for group in group_by(fresh, lambda t: t.group_id).values():
                mixed = teaches(group)
                if waves == 0 or (mixed and teaching < wanted):
                    chosen += group
                    teaching += mixed
            waves += 1
        batch = TrajectoryBatch(everything)
        self.accept(step, batch)
        return Collected(batch, chosen, waves, sampling, scoring)

    def groups(self, tasks: Sequence[Task], prefix: str) -> list[Group]:
        """Fresh episodes of the tasks."""
        return open_groups(self.source, tasks, self.options.group_size, self.client.get_tokenizer(), prefix)

    def how(self, version: int) -> dict[str, Any]:
        """How rollouts are played: their draws, and which version of the policy answers."""
        limit = self.options.max_prompt_tokens
        return {"seed": draws.key("rollout", self.seed), "version": version, "max_prompt_tokens": limit}

    def answers(
        self, groups: Sequence[Group], sampler: SamplingClient, version: int
    ) -> tuple[list[Trajectory], float, float]:
        """Answers of all groups, scored; the seconds until the last was there, and those that verdicts took longer.

        A verifier that waits is asked about a group as soon as it is over, while others are still sampled.
        """
        began = time.perf_counter()
        with Scoring(self.reward, self.watched) as scoring:

            def over(group: list[Trajectory]) -> None:
                self.check_author(group, sampler)
                scoring.begin(group)

            fresh = rollout(groups, sampler, self.params, over=over if scoring.waits else None, **self.how(version))
            sampled = time.perf_counter()
            self.check_author(fresh, sampler)
            scoring.finish(fresh)
        self.control(fresh)
        return fresh, sampled - began, time.perf_counter() - sampled

    def judge(self, fresh: Sequence[Trajectory], sampler: SamplingClient) -> None:
        """Score answers, after making sure of who gave them."""
        self.check_author(fresh, sampler)
        score(fresh, self.reward, self.watched)
        self.control(fresh)

    def control(self, fresh: Sequence[Trajectory]) -> None:
        """Put chance in place of the verdicts, in a run that is to show what that does."""
        if self.options.control == "random_reward":
            flip_coins(fresh, self.seed)

    def check_author(self, fresh: Sequence[Trajectory], sampler: SamplingClient) -> None:
        """TrainingStopped where an answer was not made by the weights that were asked."""
        expected = getattr(sampler, "fingerprint", None)
        for trajectory in fresh:
            unlike = trajectory.policy_fingerprint != expected and not trajectory.over_at_once
            if expected is not None and unlike:
                raise TrainingStopped(
                    f"step {trajectory.policy_version}: an answer was made by weights "
                    f"{trajectory.policy_fingerprint!r}, expected {expected!r}"
                )

    def accept(self, step: int, batch: TrajectoryBatch) -> None:
        """Hold a batch against the error budget; let the curriculum see its verdicts."""
        self.within_budget(step, batch)
        if self.options.control == "none":  # a control run must learn nothing from the verifier by any road
            self.curriculum.observe(passes_by_level(batch, self.reward.name))

    def within_budget(self, step: int, batch: TrajectoryBatch) -> None:
        """TrainingStopped where the verifier failed on more of the answers than the error budget allows."""
        answers = last_of_rollouts(batch)
        failed = [t.scores[self.reward.name] for t in answers if t.reward is None and self.reward.name in t.scores]
        check_error_budget(f"step {step}", self.reward.name, failed, len(answers), self.options.error_budget)

    def update(self, step: int, collected: Collected) -> dict[str, float]:
        """All optimizer steps of one training step; metrics of the answers and of the update. No batch, no step."""
        self.under_way = collected.batch
        measured = update(
            self.client,
            self.algorithm,
            collected.batch,
            self._adam(step),
            self.passes,
            key=draws.key(self.seed, step),
            check=lambda first: self._check_gap(step, first.gap, collected.batch),
            **self._given(),
        )
        return self._told(step, collected, measured)

    def update_streamed(
        self, step: int, arriving: Iterable[Sequence[Trajectory]]
    ) -> tuple[dict[str, float], Collected]:
        """`update` from minibatches that are still arriving, and what they were in the end."""
        batch = self.under_way = list[Trajectory]()

        o = self.options

        def taken() -> Iterator[Sequence[Trajectory]]:
            for number, part in enumerate(arriving, 1):
                batch.extend(part)
                if number % o.num_minibatches == 0:  # the last one before an optimizer step
                    self.within_budget(step, TrajectoryBatch(batch))
                yield part

        stream = Stream(o.num_substeps, o.num_minibatches, o.prompts_per_step * o.group_size // o.num_substeps)
        measured = update_streamed(
            self.client,
            self.algorithm,
            taken(),
            self._adam(step),
            stream,
            check=lambda first: self._check_gap(step, first.gap, batch),
            **self._given(),
        )
        collected = Collected(TrajectoryBatch(batch), batch)
        return self._told(step, collected, measured), collected

    def _adam(self, step: int) -> Callable[[int], AdamParams]:
        per_step = self.options.ppo_epochs * self.options.num_substeps
        schedule, steps = self.options.optimizer, self.options.steps * per_step
        return lambda number: schedule.at(step * per_step + number, steps)

    def _given(self) -> dict[str, Any]:
        return {
            "memory": self.memory,
            "max_tokens": self.max_tokens,
            "temperature": self.params.temperature,
            "reference": self.reference,
        }

    def _told(self, step: int, collected: Collected, measured: Measured) -> dict[str, float]:
        moved = self._moved(step, collected) if measured.updates else {}
        answers = answer_statistics(collected.all, self.reward.name)
        if self.algorithm.penalizes:
            answers["penalty"] = mean([t.penalty for t in last_of_rollouts(TrajectoryBatch(collected.batch))])
        progress = {"progress/batch": float(step), "progress/done_frac": (step + 1) / self.options.steps}
        told = measured.metrics()
        self._watch_drift(step, told)
        return {**answers, "rollout/waves": float(collected.waves), **told, **moved, **progress}

    def _watch_drift(self, step: int, told: Mapping[str, float]) -> None:
        """Say once that trainer and sampler have come apart.

        Not where they are meant to, by the earlier of several substeps (`kl_warn` watches that), and not where
        `_check_gap` speaks of it already.
        """
        v1, v2 = (told.get(f"optim/kl_sample_train_{v}", 0.0) for v in ("v1", "v2"))
        stale, cut = self.options.max_steps_off_policy > 0, self.options.num_substeps > 1
        warned = not stale and told.get("sampling/sampling_logp_difference/mean", 0.0) > self.options.gap_warn
        if max(abs(v1), v2) <= KL_SAMPLE_TRAIN or self._told_of_drift or (cut and not stale) or warned:
            return
        self._told_of_drift = True
        cure = "check that sampler and trainer run the same weights in the same dtype"
        if stale:
            cure = "a lower rate, fewer num_substeps or a smaller max_steps_off_policy hold it down"
        self.warn(
            f"step {step}: the policy that is trained is {v1:.3g} (v1) and {v2:.3g} (v2) nats a token from the one "
            f"that sampled; up to {KL_SAMPLE_TRAIN:g} training is known to be stable: {cure} (said once; "
            "optim/kl_sample_train_v1 and _v2 have every step)"
        )

    def _moved(self, step: int, collected: Collected) -> dict[str, float]:
        """How far the updates took the policy from the one that sampled, by a forward pass over a few groups' answers.

        Whole groups: their answers share the work that their prompt is.
        """
        known = [t for t in collected.batch if t.reward is not None and not t.over_at_once]
        groups = list(group_by(known, lambda t: t.group_id).values())
        few = [t for group in groups[:: max(1, len(groups) // max(2, len(groups) // 16))] for t in group]
        moved = divergence(self.client, few, loss_config(self.algorithm, self.client, self.params.temperature))
        if moved > self.options.kl_warn and not self._told_of_change:
            self._told_of_change = True
            self.warn(
                f"step {step}: large policy change: it ended {moved:.3g} nats a token from the policy that sampled, "
                f"more than training.kl_warn={self.options.kl_warn:g}. A lower rate, fewer ppo_epochs or a target_kl "
                "hold it down (said once; optim/kl_after has every step)"
            )
        return {"optim/kl_after": moved}

    def _check_gap(self, step: int, gap: float, batch: Sequence[Trajectory]) -> None:
        if any(t.policy_version < step for t in batch):
            return  # stale answers are meant to differ: only those of this version say how well both agree
        trusted = self.params.temperature == 1 or getattr(self.client, "scores_at_temperature", False)
        if gap > self.options.gap_stop and trusted:
            raise TrainingStopped(
                f"step {step}: sampler and trainer disagree by {gap:.3g} nats a token on average, more than "
                f"training.gap_stop={self.options.gap_stop:g}: the gradient would be wrong. Check that both run the "
                "same weights in the same dtype, or raise the threshold knowingly"
            )
        if gap > self.options.gap_warn and not self._told_of_gap:
            self._told_of_gap = True
            self.warn(
                f"step {step}: sampler and trainer differ by {gap:.3g} nats a token on average, more than "
                f"training.gap_warn={self.options.gap_warn:g} (said once; sampling/sampling_logp_difference/mean has "
                "every step)"
            )

    def close(self) -> None:
        """Nothing goes on beside the steps that a trainer makes."""

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
