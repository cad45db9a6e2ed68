"""A whole training step (sampling, rewards, update) of this package beside TRL's `GRPOTrainer`.

Both start from the same weights and get the same prompts, reward function, batch, loss (`dapo` with the group's mean as
baseline, clipped at 0.2 and 0.28, no KL) and AdamW. Groups with equal rewards stay in our denominator, as in TRL's, so
both have the same gradient; skipping their rows only saves work. Ours is the `Trainer` that `rlvr train` runs, over the
local client, with up to 1,024 rows at once as in the shipped configs; TRL's is in `benchmarks.trl_peer`. Tested by
`tests/test_bench.py`, run by `rlvr bench end-to-end`. Left out on purpose: evaluation, checkpoints and logs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import BenchmarkCase, BenchSettings, TurnResult
from benchmarks.workloads import (
    QWEN_3M,
    QWEN_25M,
    WORDS,
    OrderedPrompts,
    build_folder,
    even_words,
    last_word,
    main_job_tasks,
    near_sum,
    sums,
    word_prompts,
)
from rlvr.core import rng
from rlvr.core.types import Task

BETA1, BETA2 = 0.9, 0.95


@dataclass(frozen=True)
class StepShape:
    """One comparison: `groups` prompts of `prompt` tokens (0: sums) x `size` answers of at most `answer` tokens.

    With a `seed` the tasks are the main job's, and the model is the one that its supervised fine-tuning made.

    After 150 `fine_tuning_steps` nine groups of ten have a signal. After 600 nine completions of ten are right, as late
    in a run, and in half of the groups all are.
    """

    name: str
    groups: int
    size: int
    prompt: int
    answer: int
    steps: int  # of a turn
    fine_tuning_steps: int = 0  # of supervised fine-tuning before, once for both
    learning_rate: float = 2e-4
    seed: int = 0

    @property
    def samples(self) -> int:
        return self.groups * self.size


SHORT = StepShape("short", 128, 8, 0, 8, steps=5, fine_tuning_steps=150)
LATE = replace(SHORT, name="short-late", fine_tuning_steps=600)
LONG = StepShape("long", 8, 16, 256, 64, steps=1)
CODE = StepShape("code-like", 4, 8, 500, 128, steps=1)


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    """short (early and late in a run), long and code-like, with the same dtype on both sides."""
    shapes = [SHORT, LATE, LONG, CODE]
    if setting.quick:
        shapes = [replace(SHORT, groups=32, steps=2), replace(LONG, groups=1), replace(CODE, groups=1)]
    return [case(setting, shape) for shape in shapes if setting.model is None or shape.prompt]


def case(setting: BenchSettings, shape: StepShape) -> BenchmarkCase:
    from benchmarks import trl_peer

    size = "the given model" if setting.model else "3 M parameters" if not shape.prompt else "25 M parameters"
    prompts = f"{shape.prompt}-token prompts" if shape.prompt else "3-digit sums"
    work = f"{shape.groups} {prompts} x {shape.size} answers of at most {shape.answer} tokens"
    peers = {"trl": partial(trl_peer.peer, setting, shape)}
    # In one case only: TRL with our process settings, and with its own continuous batching.
    if shape.name == SHORT.name and not setting.quick and setting.dtype == "float32":
        peers["trl, our process settings"] = partial(trl_peer.peer, setting, shape, settings=True)
        peers["trl, continuous batching"] = partial(trl_peer.peer, setting, shape, continuous=True)
    return BenchmarkCase(
        name=shape.name,
        unit="samples",
        work=f"{size}, {setting.dtype}, {work}",
        ours=partial(ours, setting, shape),
        peers=peers,
        aim=0.8 if shape.prompt else 10.0,
        of_bound=bool(shape.prompt),
        curve="mean reward",
        most_rounds=2 if shape.prompt else 0,
    )


def start_folder(setting: BenchSettings, shape: StepShape) -> Path:
    """The folder with the initial weights of both sides; the first caller creates it."""
    if setting.model is not None:
        return setting.model
    if shape.seed:
        return main_job_start(setting, shape)
    if shape.prompt:
        return build_folder(setting.scratch / "qwen-25m", QWEN_25M, "words", WORDS)
    folder = setting.scratch / f"qwen-3m-{shape.fine_tuning_steps}"
    if not (folder / "config.json").exists():
        build_folder(folder, QWEN_3M, "characters", "0123456789+-=")
        fine_tune(folder, shape.fine_tuning_steps, setting.threads)
    return folder


def main_job_start(setting: BenchSettings, shape: StepShape) -> Path:
    """The folder with the weights that the main job has after its supervised fine-tuning with this seed."""
    name = f"main-job-{shape.seed}"
    folder = setting.scratch / name / "checkpoints" / "done-000000"
    if not folder.exists():
        settings = [f"seed={shape.seed}", f"sft.steps={shape.fine_tuning_steps}", "training.steps=0"]
        settings += [f"run.root={setting.scratch}", f"run.name={name}", "evaluation.tasks=100", "evaluation.samples=1"]
        subprocess.run([sys.executable, "-m", "rlvr", "train", "--config-name=arithmetic", *settings], check=True)
    return folder


def fine_tune(folder: Path, steps: int, threads: int) -> None:
    """Supervised fine-tuning on sums, until some completions are right and some are not; writes to the folder."""
    from rlvr.training.curriculum import Curriculum, CurriculumOptions
    from rlvr.training.sft import SftOptions, sft_step
    from rlvr.training.training_options import LearningRateSchedule

    client, engine = local_client(folder, "float32", threads, folder)
    source = OrderedPrompts("sums", sums(8192)[::-1], [], "", demonstrations="answer")
    options = SftOptions(
        steps=steps, batch_size=64, optimizer=LearningRateSchedule(learning_rate=1e-3, warmup_steps=20)
    )
    curriculum = Curriculum(source, CurriculumOptions(), seed=0)
    for step in range(steps):
        sft_step(client, source, curriculum, options, step, seed=0)
    engine.model.module.save_pretrained(folder)


def local_client(folder: Path, dtype: str, threads: int, saves: Path) -> tuple[Any, Any]:
    """A client that trains all weights of the model, and its engine."""
    import torch

    from rlvr.clients.local import LocalTrainingClient
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import EngineLimits
    from rlvr.engine.model_loading import load_model
    from rlvr.engine.tokenizer import load_tokenizer

    torch.set_num_threads(threads)
    model = load_model(str(folder), load_tokenizer(str(folder)), device="auto", dtype=dtype)
    engine = Engine(model, EngineLimits(threads=threads, max_rows=1024))
    return LocalTrainingClient(engine, engine.create_policy("policy"), saves), engine


def tasks_and_reward(shape: StepShape, tokenizer: Any) -> tuple[list[Task], Callable[..., list[float]]]:
    """The tasks of both sides, in order, and their reward."""
    if shape.seed:
        return main_job_tasks(shape.seed), last_word
    if shape.prompt:
        return word_prompts(shape.groups * 8, shape.prompt, tokenizer), even_words
    return sums(8192), near_sum


def ours(setting: BenchSettings, shape: StepShape) -> TrainerTurn:
    from rlvr.algorithms.registry import resolve_algorithm
    from rlvr.core.messages import SamplingParams
    from rlvr.reward import resolve_reward
    from rlvr.training.curriculum import Curriculum, CurriculumOptions
    from rlvr.training.monitor import Monitor
    from rlvr.training.parts import TrainerParts
    from rlvr.training.schedules.sync import Synchronous
    from rlvr.training.trainer import Trainer
    from rlvr.training.training_job import freeze_collector
    from rlvr.training.training_options import LearningRateSchedule, TrainingOptions

    client, engine = local_client(start_folder(setting, shape), setting.dtype, setting.threads, setting.scratch)
    tasks, reward = tasks_and_reward(shape, client.get_tokenizer())
    source = OrderedPrompts(shape.name, tasks, [], "")
    options = TrainingOptions(
        steps=1 << 20,
        prompts_per_step=shape.groups,
        group_size=shape.size,
        optimizer=LearningRateSchedule(learning_rate=shape.learning_rate, beta1=BETA1, beta2=BETA2, grad_clip=0.0),
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
