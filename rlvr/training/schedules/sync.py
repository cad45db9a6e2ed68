"""The synchronous schedule: sample a batch, learn from it, repeat. The reference for all others.

Only here can groups without signal be replaced (`training.dynamic_sampling`): the whole batch is known before the next
prompts are drawn.
"""

from __future__ import annotations

import time

from rlvr.algorithms.penalties import penalize_length
from rlvr.core.types import Trajectory, TrajectoryBatch, group_by
from rlvr.training.journal import Journal
from rlvr.training.parts import StepBatch
from rlvr.training.schedules.base import Schedule
from rlvr.training.trainer import Trainer


class Synchronous(Schedule):
    """Batch b is sampled by version b of the policy, and nothing runs meanwhile."""

    def __init__(self, trainer: Trainer, journal: Journal | None = None) -> None:
        self.trainer = trainer

    def learn(self, step: int) -> tuple[dict[str, float], StepBatch]:
        """One step: sample, score, update."""
        self.trainer.current_batch = []
        collected = self.collect(step)
        began = time.perf_counter()
        metrics = self.trainer.update(step, collected)
        times = {
            "time/sampling": collected.seconds_sampling,
            "time/scoring": collected.seconds_scoring,
            "time/update": time.perf_counter() - began,
        }
        return {**metrics, **times}, collected

    def collect(self, step: int) -> StepBatch:
        """Sample and score waves of prompts until enough groups have signal, with `dynamic_sampling` further ones."""
        options, collector, algorithm = self.trainer.options, self.trainer.collector, self.trainer.parts.algorithm
        everything: list[Trajectory] = []
        chosen: list[Trajectory] = []
        with_signal = waves = 0
        seconds_sampling = seconds_scoring = 0.0
        sampler = collector.current_sampler()
        while waves == 0 or (with_signal < options.prompts_per_step and waves <= options.dynamic_sampling):
            tasks = collector.curriculum.tasks(options.prompts_per_step, step, waves)
            scored = collector.sample(collector.open_groups(tasks, f"{step}/{waves}"), sampler, step)
            seconds_sampling += scored.seconds_sampling
            seconds_scoring += scored.seconds_scoring
            everything += scored.trajectories
            penalize_length(scored.trajectories, algorithm, self.trainer.parts.params.max_tokens or 0)
            for group in group_by(scored.trajectories, lambda t: t.group_id).values():
                signal = algorithm.has_signal(group)
                if waves == 0 or (signal and with_signal < options.prompts_per_step):
                    chosen += group
                    with_signal += signal
            waves += 1
        batch = TrajectoryBatch(everything)
        self.trainer.accept(step, batch)
        return StepBatch(batch, chosen, waves, seconds_sampling, seconds_scoring)
