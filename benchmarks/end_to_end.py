"""A whole training step (sampling, rewards, update) of this package beside TRL's `GRPOTrainer`.

Both start from the same weights and get the same prompts, reward function, batch, loss (`dapo` with the group's mean as
baseline, clipped at 0.2 and 0.28, no KL) and AdamW. Groups with equal rewards stay in our denominator, as in TRL's, so
both have the same gradient; skipping their rows only saves work. Ours is the `Trainer` that `rlvr train` runs, over the
local client, with up to 1,024 rows at once as in the shipped configs; TRL's is in `benchmarks.trl_peer`. Run by `rlvr
bench end-to-end`. Left out on purpose: evaluation, checkpoints and logs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.measure import BenchmarkCase, BenchSettings, TurnResult
from benchmarks.step_shape import (
    BETA1,
    BETA2,
    CODE,
    LATE,
    LONG,
    PRETRAINED,
    SHORT,
    StepShape,
    local_client,
    start_folder,
    tasks_and_reward,
)
from benchmarks.trl_peer import peer
from benchmarks.workloads import OrderedPrompts
from rlvr.core import rng


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    """short (early and late in a run), long and code-like, with the same dtype on both sides."""
    shapes = [SHORT, LATE, LONG, CODE, PRETRAINED]
    if setting.quick:
        shapes = [replace(SHORT, groups=32, steps=2), replace(LONG, groups=1), replace(CODE, groups=1)]
    return [case(setting, shape) for shape in shapes if setting.model is None or shape.prompt]


def case(setting: BenchSettings, shape: StepShape) -> BenchmarkCase:
    size = "3 M parameters" if not shape.prompt else "25 M parameters"
    if setting.model or shape.model:
        size = "the given model" if setting.model else f"{shape.model} under an adapter of rank {shape.lora}"
    prompts = f"{shape.prompt}-token prompts" if shape.prompt else "sums in a chat" if shape.model else "3-digit sums"
    work = f"{shape.groups} {prompts} x {shape.size} answers of at most {shape.answer} tokens"
    peers = {"trl": partial(peer, setting, shape)}
    # In one case only: TRL with our process settings, and with its own continuous batching.
    if shape.name == SHORT.name and not setting.quick and setting.dtype == "float32":
        peers["trl, our process settings"] = partial(peer, setting, shape, settings=True)
        peers["trl, continuous batching"] = partial(peer, setting, shape, continuous=True)
    return BenchmarkCase(
        name=shape.name,
        unit="samples",
        work=f"{size}, {setting.dtype}, {work}",
        ours=partial(ours, setting, shape),
        peers=peers,
        aim=0.8 if shape.prompt else 8.0 if shape.model else 10.0,
        of_bound=bool(shape.prompt),
        curve="mean reward",
        most_rounds=2 if shape.prompt else 3 if shape.model else 0,
    )


def ours(setting: BenchSettings, shape: StepShape) -> TrainerTurn:
    from rlvr.algorithms.optimizers import OptimizerSection
    from rlvr.algorithms.registry import resolve_algorithm
    from rlvr.core.messages import SamplingParams
    from rlvr.reward import resolve_reward
    from rlvr.training.curriculum import Curriculum, CurriculumOptions
    from rlvr.training.monitor import Monitor
    from rlvr.training.parts import TrainerParts
    from rlvr.training.schedules.sync import Synchronous
    from rlvr.training.trainer import Trainer
    from rlvr.training.training_job import freeze_collector
    from rlvr.training.training_options import TrainingOptions

    folder = start_folder(setting, shape)
    client, engine = local_client(folder, setting.dtype, setting.threads, setting.scratch, shape.lora)
    tasks, reward = tasks_and_reward(shape, client.get_tokenizer())
    source = OrderedPrompts(shape.name, tasks, [], "")
    options = TrainingOptions(
        steps=1 << 20,
        prompts_per_step=shape.groups,
        group_size=shape.size,
        optimizer=OptimizerSection(learning_rate=shape.learning_rate, beta1=BETA1, beta2=BETA2, grad_clip=0.0),
    )
    parts = TrainerParts(
        client,
        source,
        resolve_reward(f"benchmarks.workloads:{reward.__name__}"),
        resolve_algorithm("ppo", drop_equal_groups=False),
        SamplingParams(max_tokens=shape.answer),
        options,
        Curriculum(source, CurriculumOptions(), seed=0),
        seed=rng.key("bench", shape.name),
    )
    schedule = Synchronous(Trainer(parts, Monitor(options, print)))
    settings = ExitStack()
    settings.enter_context(freeze_collector())
    return TrainerTurn(schedule, shape, settings, engine.model.module)


class TrainerTurn:
    """Our turn: `shape.steps` steps of the trainer. Holds `settings`, the process settings of a run, open."""

    def __init__(self, trainer: Any, shape: StepShape, settings: ExitStack, model: Any) -> None:
        self.trainer, self.shape, self.settings, self.step = trainer, shape, settings, 0
        self.model = model

    def train(self, seconds: float) -> tuple[float, int]:
        """Train to the end of the step in which `seconds` are over; returns the seconds this took, and the steps."""
        began, first = time.perf_counter(), self.step
        while (gone := time.perf_counter() - began) < seconds:
            self.trainer.learn(self.step)
            self.step += 1
        return gone, self.step - first

    def __call__(self) -> TurnResult:
        began, points, cost, facts = time.perf_counter(), [], 0.0, dict[str, float]()
        for _ in range(self.shape.steps):
            metrics, collected = self.trainer.learn(self.step)
            self.step += 1
            batch = collected.all
            points.append((time.perf_counter() - began, batch.mean_reward))
            groups = list(batch.groups().values())
            with_signal = [g for g in groups if len({t.reward for t in g}) > 1]
            cost += token_passes([(len(g[0].prompt_tokens), [t.num_response_tokens for t in g]) for g in groups], 1)
            cost += token_passes(
                [(len(g[0].prompt_tokens), [t.num_response_tokens for t in g]) for g in with_signal], 3
            )
            for name in ("time/sampling", "time/scoring", "time/update"):
                facts[name] = facts.get(name, 0.0) + metrics[name] / self.shape.steps
            facts["groups with signal"] = (
                facts.get("groups with signal", 0.0) + len(with_signal) / len(groups) / self.shape.steps
            )
        facts["mean reward"] = sum(value for _, value in points) / len(points)
        return TurnResult(self.shape.samples * self.shape.steps, cost=cost, facts=facts, points=tuple(points))


def token_passes(groups: Sequence[tuple[int, Sequence[int]]], passes: int) -> float:
    """The token passes that groups of (prompt length, completion lengths) need: each prompt once, no padding.

    `passes` is 1 for sampling, 3 for forward and backward. The last token of a completion is never read.
    """
    return float(passes * sum(prompt + sum(max(0, n - 1) for n in answers) for prompt, answers in groups))
