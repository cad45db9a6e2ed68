"""Held-out accuracy over time, of this package and of TRL's `GRPOTrainer`, on the run `arithmetic`.

Both sides start from the weights that `arithmetic`'s supervised fine-tuning made with a seed, and train for equal times
with the same problems, reward, batch, loss and learning rate (`benchmarks.step_shape` has what they share). Training
stops for each measurement: the weights are saved, and `transformers` samples one completion of each of 1,200 held-out
problems at temperature 1, with the same random draws for both; its seconds do not count. (Greedy completions say little
here: nine in ten are right at the start, because the demonstrations' mistakes are random.) A target counts as reached
at the first measurement that is above it. Run by `rlvr bench accuracy`. Left out on purpose: the curriculum of `rlvr
train`, which TRL does not have, and its own reward (`combined`), for one that both sides call. AdamW on both sides,
because that is what TRL's trainer has where the recipe has Muon, with the recipe's rate for the weights that are no
matrices, constant and without clipping of the gradient; it was not searched for either side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from benchmarks.end_to_end import ours
from benchmarks.measure import BenchmarkCase, BenchSettings, TurnResult
from benchmarks.step_shape import StepShape
from benchmarks.workloads import last_word, main_job

SEEDS = (1, 2, 3)
TARGETS = (0.7, 0.8, 0.9, 0.95)


class TimedTrainer(Protocol):
    """A side of `benchmarks.end_to_end`: `train` trains to the end of the step in which so many seconds are over.

    It returns the seconds this took, and the steps it made.
    """

    model: Any
    train: Callable[[float], tuple[float, int]]


def cases(setting: BenchSettings) -> list[BenchmarkCase]:
    """One case per seed."""
    seeds, fine_tuning, parts, seconds = (SEEDS[:1], 100, 2, 3.0) if setting.quick else (SEEDS, 2200, 6, 5.0)
    return [case(setting, seed, fine_tuning, parts, seconds) for seed in seeds]


def case(setting: BenchSettings, seed: int, fine_tuning: int, parts: int, seconds: float) -> BenchmarkCase:
    """A turn trains `parts` times for `seconds`, with a measurement after each."""
    from benchmarks import trl_peer

    shape = StepShape(
        f"seed-{seed}", 64, 16, 0, 16, steps=1 << 20, fine_tuning_steps=fine_tuning, learning_rate=0.0012, seed=seed
    )
    side = partial(accuracy_side, setting, shape, parts, seconds)
    return BenchmarkCase(
        name=f"seed {seed}",
        unit="samples",
        work=f"the config arithmetic, {shape.groups} prompts x {shape.size} completions a step, {seconds:g} s of "
        "training before each evaluation",
        ours=partial(side, ours),
        peers={"trl": partial(side, trl_peer.peer)},
        curve="held-out accuracy",
        targets=TARGETS,
    )


def accuracy_side(
    setting: BenchSettings,
    shape: StepShape,
    parts: int,
    seconds: float,
    start: Callable[[BenchSettings, StepShape], TimedTrainer],
) -> AccuracyTurn:
    folder = setting.scratch / f"{shape.name}-{start.__module__}"
    return AccuracyTurn(start(setting, shape), shape.samples, folder, parts, seconds)


@dataclass
class AccuracyTurn:
    """A turn: `parts` times training for `seconds` and a measurement, and in the first turn one before."""

    trainer: TimedTrainer
    samples: int  # of a step
    folder: Path
    parts: int
    seconds: float
    is_first: bool = True

    def __call__(self) -> TurnResult:
        points = [(0.0, self.measure())] if self.is_first else []
        self.is_first = False
        gone, trained = 0.0, 0
        for _ in range(self.parts):
            seconds, steps = self.trainer.train(self.seconds)
            gone, trained = gone + seconds, trained + steps * self.samples
            points.append((gone, self.measure()))
        return TurnResult(trained, gone, points=tuple(points))

    def measure(self) -> float:
        self.trainer.model.save_pretrained(self.folder)
        return held_out_accuracy(self.folder)


def held_out_accuracy(folder: Path, count: int = 1200) -> float:
    """The share of held-out problems that a sampled completion of the saved model gets right."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlvr.engine.tokenizer import build_tokenizer

    source = main_job()
    tokenizer = build_tokenizer("words", source.vocabulary, end=source.end_word, pad=source.pad_word)
    tasks = source.heldout(count)
    prompts = tokenizer([task.prompt for task in tasks], return_tensors="pt", padding=True, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(0)
        rows = model.generate(
            **prompts,
            max_new_tokens=16,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    texts = tokenizer.batch_decode(rows[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    right = last_word([""] * count, texts, [str(task.meta["answer"]) for task in tasks])
    return sum(right) / len(right)
