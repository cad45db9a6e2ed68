"""A whole step of reinforcement learning, ours beside TRL's `GRPOTrainer`: sampling, rewards, the update.

Both start from the same weights and get the same prompts, reward function, batch, loss (`dapo` with the group's mean
as baseline, clipped at 0.2 and 0.28, no KL) and AdamW. Groups with equal rewards stay in our denominator, as in
theirs, so both have the same gradient; that we skip their rows changes nothing but the work. Ours is the `Trainer` that
`rlvr train` runs, over the local client, with room for 1,024 rows at once as shipped configs have; theirs is in
`rlvr.bench.trl_peer`. Exercised by `tests/test_bench.py` and `rlvr bench end-to-end`. Left out on purpose: evaluation,
checkpoints and logs, on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlvr import draws
from rlvr.bench.measure import Case, Done, Setting, Turn
from rlvr.bench.workloads import (
    QWEN_3M,
    QWEN_25M,
    WORDS,
    Prompts,
    built_folder,
    even_words,
    near_sum,
    sums,
    word_prompts,
)
from rlvr.types import Task

LEARNING_RATE = 2e-4
BETA1, BETA2 = 0.9, 0.95


@dataclass(frozen=True)
class Shape:
    """One comparison: `groups` prompts of `prompt` tokens (0: sums) x `size` answers of at most `answer` tokens.

    After few `warm_steps` nine groups of ten have something to teach. After 600 nine answers of ten are right, as in
    the later part of a run: in half of the groups all are.
    """

    name: str
    groups: int
    size: int
    prompt: int
    answer: int
    steps: int  # of a turn
    warm_steps: int = 0  # of supervised learning before, once, for both

    @property
    def samples(self) -> int:
        return self.groups * self.size


SHORT = Shape("short", 128, 8, 0, 8, steps=5, warm_steps=150)
LATE = replace(SHORT, name="short-late", warm_steps=600)
LONG = Shape("long", 8, 16, 256, 64, steps=1)
CODE = Shape("code-like", 4, 8, 500, 128, steps=1)


def cases(setting: Setting) -> list[Case]:
    """short (at first and late in a run), long and code-like, with the dtypes of both sides alike."""
    shapes = [SHORT, LATE, LONG, CODE]
    if setting.quick:
        shapes = [replace(SHORT, groups=32, steps=2), replace(LONG, groups=1), replace(CODE, groups=1)]
    return [case(setting, shape) for shape in shapes if setting.model is None or shape.prompt]


def case(setting: Setting, shape: Shape) -> Case:
    from rlvr.bench import trl_peer

    size = "the given model" if setting.model else "3 M parameters" if not shape.prompt else "25 M parameters"
    prompts = f"{shape.prompt}-token prompts" if shape.prompt else "3-digit sums"
    work = f"{shape.groups} {prompts} x {shape.size} answers of at most {shape.answer} tokens"
    peers = {"trl": partial(trl_peer.peer, setting, shape)}
    # Shown once: what of the ratio is the process's settings; and its own batching, half as fast as `generate` here.
    if shape.name == SHORT.name and not setting.quick and setting.dtype == "float32":
        peers["trl, our process settings"] = partial(trl_peer.peer, setting, shape, settings=True)
        peers["trl, continuous batching"] = partial(trl_peer.peer, setting, shape, continuous=True)
    return Case(
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


def start_folder(setting: Setting, shape: Shape) -> Path:
    """The folder with the weights that both begin with; the first one to ask makes it."""
    if setting.model is not None:
        return setting.model
    if shape.prompt:
        return built_folder(setting.scratch / "qwen-25m", QWEN_25M, "words", WORDS)
    folder = setting.scratch / f"qwen-3m-{shape.warm_steps}"
    if not (folder / "config.json").exists():
        built_folder(folder, QWEN_3M, "characters", "0123456789+-=")
        warm_up(folder, shape.warm_steps, setting.threads)
    return folder


def warm_up(folder: Path, steps: int, threads: int) -> None:
    """Supervised learning on sums, as far as some answers are right and some are not; written back to the folder."""
    from rlvr.training.curriculum import Curriculum, CurriculumOptions
    from rlvr.training.options import Schedule
    from rlvr.training.sft import SftOptions, sft_step

    client, engine = local_client(folder, "float32", threads, folder)
    source = Prompts("sums", sums(8192)[::-1], [], "", demonstrations="answer")
    options = SftOptions(steps=steps, batch_size=64, optimizer=Schedule(learning_rate=1e-3, warmup_steps=20))
    curriculum = Curriculum(source, CurriculumOptions(), seed=0)
    for step in range(steps):
        sft_step(client, source, curriculum, options, step, seed=0)
    engine.model.module.save_pretrained(folder)


def local_client(folder: Path, dtype: str, threads: int, saves: Path) -> tuple[Any, Any]:
    """A client that trains all weights of the model, and its engine."""
    import torch

    from rlvr.clients.local import LocalTrainingClient
    from rlvr.engine.engine import Engine
    from rlvr.engine.model import load_model
    from rlvr.engine.options import EngineLimits
    from rlvr.engine.tokenizer import load_tokenizer

    torch.set_num_threads(threads)
    model = load_model(str(folder), load_tokenizer(str(folder)), device="auto", dtype=dtype)
    engine = Engine(model, EngineLimits(threads=threads, max_rows=1024))
    return LocalTrainingClient(engine, engine.create_policy("policy"), saves), engine


def tasks_and_reward(shape: Shape, tokenizer: Any) -> tuple[list[Task], Callable[..., list[float]]]:
    """What both sides train on, in order."""
    if shape.prompt:
        return word_prompts(shape.groups * 8, shape.prompt, tokenizer), even_words
    return sums(8192), near_sum


def ours(setting: Setting, shape: Shape) -> Turn:
    from rlvr.algorithms.rows import resolve_algorithm
    from rlvr.messages import SamplingParams
    from rlvr.reward import resolve_reward
    from rlvr.training.curriculum import Curriculum, CurriculumOptions
    from rlvr.training.job import settled
    from rlvr.training.options import Schedule, TrainingOptions
    from rlvr.training.step import Trainer

    client, _ = local_client(start_folder(setting, shape), setting.dtype, setting.threads, setting.scratch)
    tasks, reward = tasks_and_reward(shape, client.get_tokenizer())
    source = Prompts(shape.name, tasks, [], "")
    trainer = Trainer(
        client,
        source,
        resolve_reward(f"rlvr.bench.workloads:{reward.__name__}"),
        resolve_algorithm("ppo", drop_equal_groups=False),
        SamplingParams(max_tokens=shape.answer),
        TrainingOptions(
            steps=1 << 20,
            prompts_per_step=shape.groups,
            group_size=shape.size,
            optimizer=Schedule(learning_rate=LEARNING_RATE, beta1=BETA1, beta2=BETA2, grad_clip=0.0),
        ),
        Curriculum(source, CurriculumOptions(), seed=0),
        seed=draws.key("bench", shape.name),
        warn=print,
    )
    as_a_run = ExitStack()
    as_a_run.enter_context(settled())
    return Steps(trainer, shape, as_a_run)


class Steps:
    """Our turn: so many steps of the trainer, in `held`, which ends with it."""

    def __init__(self, trainer: Any, shape: Shape, held: ExitStack) -> None:
        self.trainer, self.shape, self.held, self.step = trainer, shape, held, 0

    def __call__(self) -> Done:
        import time

        began, points, cost, facts = time.perf_counter(), [], 0.0, dict[str, float]()
        for _ in range(self.shape.steps):
            metrics, collected = self.trainer.learn(self.step)
            self.step += 1
            batch = collected.all
            points.append((time.perf_counter() - began, batch.mean_reward))
            groups = list(batch.groups().values())
            taught = [g for g in groups if len({t.reward for t in g}) > 1]
            cost += needed([(len(g[0].prompt_tokens), [t.num_response_tokens for t in g]) for g in groups], 1)
            cost += needed([(len(g[0].prompt_tokens), [t.num_response_tokens for t in g]) for g in taught], 3)
            for name in ("time/sampling", "time/scoring", "time/update"):
                facts[name] = facts.get(name, 0.0) + metrics[name] / self.shape.steps
            facts["groups that teach"] = (
                facts.get("groups that teach", 0.0) + len(taught) / len(groups) / self.shape.steps
            )
        facts["mean reward"] = sum(value for _, value in points) / len(points)
        return Done(self.shape.samples * self.shape.steps, cost=cost, facts=facts, points=tuple(points))


def needed(groups: Sequence[tuple[int, Sequence[int]]], passes: int) -> float:
    """Token passes of groups (prompt, answers): the prompt once, and every token of an answer that is read again.

    `passes` is 1 for sampling, 3 for forward and backward. The last token of an answer is never read.
    """
    return float(passes * sum(prompt + sum(max(0, n - 1) for n in answers) for prompt, answers in groups))
