"""A trainer over a table of token logits that learns to say a letter: steps in milliseconds, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.optimizers import OptimizerSection
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.envs import PromptEnv
from rlvr.reward import Reward, resolve_reward
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.journal import Journal
from rlvr.training.monitor import Monitor
from rlvr.training.parts import StepBatch, TrainerParts
from rlvr.training.schedules import ScheduleSection
from rlvr.training.schedules.fixed_lag import FixedLag
from rlvr.training.schedules.sync import Synchronous
from rlvr.training.trainer import Trainer
from rlvr.training.training_options import TrainingOptions


class Letters(TaskSource):
    """Tasks that want the letter `a`; every 3rd wants `z`, which the policy cannot say."""

    levels, reward = ("",), "exact_match"

    def __init__(self, impossible: bool = False) -> None:
        self.impossible = impossible

    def train(self, seed: int, index: int, level: str) -> Task:
        wanted = "z" if self.impossible and index % 3 == 2 else "a"
        return Task(f"{index}", "say", {"answer": wanted})

    def heldout(self, count: int | None) -> list[Task]:
        return [Task("held", "say", {"answer": "a"})]

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str | None:
        return "a"


def make_trainer(
    client: Any = None,
    algorithm: str = "ppo",
    reward: Any = None,
    source: Letters | None = None,
    temperature: float = 1.0,
    warnings: list[str] | None = None,
    cells: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    watched: Sequence[Reward] = (),
    seed: int = 1,
    **settings: Any,
) -> Trainer:
    source = source or Letters()
    names = {"max_steps_off_policy": "lag", "num_minibatches": "num_minibatches", "stale": "stale"}
    of_schedule = {own: settings.pop(flat) for flat, own in names.items() if flat in settings}
    settings["schedule"] = ScheduleSection(name=settings.get("schedule"), **of_schedule)
    options = TrainingOptions(
        **{"prompts_per_step": 6, "group_size": 4, "optimizer": OptimizerSection(learning_rate=0.1), **settings}
    )
    parts = TrainerParts(
        client or MockTrainingClient(TablePolicy(["say", "a", "b"])),
        source,
        reward or resolve_reward("exact_match"),
        resolve_algorithm(algorithm, **(cells or {})),
        SamplingParams(**{"max_tokens": 1, "temperature": temperature, **(sampling or {})}),
        options,
        Curriculum(source, CurriculumOptions(), seed=1),
        seed=seed,
        watched=watched,
    )
    return Trainer(parts, Monitor(options, (warnings if warnings is not None else []).append))


def collect(trainer: Trainer, step: int) -> StepBatch:
    """Sample and score a batch, as the synchronous schedule does."""
    return Synchronous(trainer).collect(step)


def table(seed: int = 0) -> TablePolicy:
    return TablePolicy(["say", "a", "b"], seed=seed)


class Remote(MockTrainingClient):
    """A client whose model is elsewhere: groups are played beside the training."""

    capabilities = replace(MockTrainingClient.capabilities, can_overlap=True)


def fixed_lag_trainer(client: Any = None, **options: Any) -> Trainer:
    asked = {"steps": 8, "prompts_per_step": 4, "schedule": "fixed_lag", **options}
    cells = {"reduction": "constant"} if asked.get("num_minibatches", 1) > 1 else None
    return make_trainer(client or MockTrainingClient(table()), cells=cells, **asked)


def run_fixed_lag(t: Trainer, folder: Path, first: int = 0, last: int | None = None) -> list[dict[str, float]]:
    with Journal(folder) as journal:
        schedule = FixedLag(t, journal)
        rows = [schedule.learn(step)[0] for step in range(first, t.options.steps if last is None else last)]
        schedule.close()
    return rows


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "async/")) and "second" not in k} for row in rows
    ]
