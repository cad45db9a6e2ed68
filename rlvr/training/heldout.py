"""The held-out tasks of a run, and their evaluation with the run's reward and sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlvr.core import rng
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import SamplingClient, TaskSource
from rlvr.core.types import Task
from rlvr.reward import Reward
from rlvr.training.evaluate import (
    Evaluation,
    EvaluationOptions,
    evaluate,
    evaluation_params,
    extra_heldout,
    heldout_split,
)
from rlvr.training.failure_groups import lowest_kind_rate
from rlvr.training.interim import PASS_RATE
from rlvr.training.judged_tasks import JudgedTask


@dataclass
class HeldoutEvaluator:
    """Evaluates samplers on three kinds of held-out tasks.

    `tasks` are reported; `validation` tasks are only for interim evaluations, by which a run may stop; `extra` sets are
    reported by name. `params` are the sampling parameters of training.
    """

    source: TaskSource
    reward: Reward
    watched: Sequence[Reward]
    params: SamplingParams
    options: EvaluationOptions
    error_budget: float
    has_interim: bool

    def __post_init__(self) -> None:
        self.tasks, self.validation = heldout_split(self.source, self.options, has_interim=self.has_interim)
        self.extra = extra_heldout(self.source, self.options)

    def evaluate(
        self,
        sampler: SamplingClient,
        seed: int,
        progress: Callable[[int], None],
        group_size: int = 0,
        keep: Callable[[JudgedTask], None] = lambda judged: None,
    ) -> Evaluation:
        """Evaluate the reported tasks, then the extra sets. `progress` gets the number of finished tasks.

        With a `group_size`, the form of failed answers is examined; `keep` gets the reported tasks with their
        completions (`evaluate`).
        """
        samples = self.options.samples
        result = self._evaluate(self.tasks, sampler, samples, seed, progress, group_size=group_size, keep=keep)
        extra = {name: self._evaluate(tasks, sampler, samples, seed) for name, tasks in self.extra.items()}
        return replace(result, extra_heldout=extra)

    def evaluate_interim(self, sampler: SamplingClient, seed: int) -> dict[str, float]:
        """Metrics of the validation tasks, which are never reported: pass rate with its interval (and that of the worst
        kind of task), reward, and the watched verifiers."""
        result = self._evaluate(self.validation, sampler, self.options.interim_samples, rng.key("look", seed), k=1)
        rates = result.metrics()
        return {
            PASS_RATE: rates["pass@1"].value,
            f"{PASS_RATE}/low": rates["pass@1"].low,
            f"{PASS_RATE}/high": rates["pass@1"].high,
            "test/env/all/reward/total": rates["mean_reward"].value,
            "test/kinds/lowest": lowest_kind_rate((r.features, r.passed / r.judged) for r in result.results),
            **{f"test/{name}": rate.value for name, rate in rates.items() if name.startswith("watched/")},
        }

    def _evaluate(
        self,
        tasks: list[Task],
        sampler: SamplingClient,
        samples: int,
        seed: int,
        progress: Callable[[int], None] = lambda done: None,
        k: int | None = None,
        **more: Any,
    ) -> Evaluation:
        return evaluate(
            self.source,
            tasks,
            sampler,
            self.reward,
            evaluation_params(self.params, self.options),
            samples=samples,
            k=k or self.options.k or samples,
            seed=seed,
            error_budget=self.error_budget,
            watched=self.watched,
            progress=progress,
            **more,
        )
