"""A run that is ready to begin: its parts, already built, and how often it saves its state.

`rlvr.runs.assembly` makes a `TrainingJob`; `rlvr.training.loop` runs it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlvr.core.machine import describe_code
from rlvr.tracking.trackers import Trackers
from rlvr.training.callbacks import Callbacks
from rlvr.training.evaluate import EvaluationOptions
from rlvr.training.parts import TrainerParts
from rlvr.training.sft import SftOptions
from rlvr.training.trainer import Trainer


@contextmanager
def freeze_collector() -> Iterator[None]:
    """Keep Python's garbage collector from searching the objects that exist when the block begins.

    Libraries and a model are a million objects, and the objects of a step set off several searches through all of them.
    A program that froze its objects itself is left as it is.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class RunOptions:
    """The folder of a run (`root`/`name`; default: the name of the config) and how often it saves.

    `rollouts_per_step` completions a step are stored to read, and `rollouts_per_task` of each held-out task, before and
    after training; 0 for none. With `keep_best`, and interim evaluations (`evaluation.every`), the weights with the
    best one are kept too; the last step is then evaluated as well.
    """

    root: str = "runs"
    name: str | None = None
    resume: bool = True
    checkpoint_every: int = 20
    keep_checkpoints: int = 2
    keep_best: bool = True
    rollouts_per_step: int = 32
    rollouts_per_task: int = 4

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1 or self.keep_checkpoints < 2:
            raise ValueError(
                f"run: checkpoint_every={self.checkpoint_every} (expected at least 1), keep_checkpoints="
                f"{self.keep_checkpoints} (expected at least 2: the last one may be damaged)"
            )


@dataclass
class TrainingJob:
    """Everything a run needs, already built. `parts` are those of `trainer`."""

    trainer: Trainer
    sft: SftOptions
    evaluation: EvaluationOptions
    options: RunOptions
    folder: Path
    trackers: Trackers
    callbacks: Callbacks
    weights_sha256: Callable[[], str]

    @property
    def parts(self) -> TrainerParts:
        return self.trainer.parts

    def describe_environment(self) -> dict[str, str | int]:
        """What the results depend on beside the config: the client's machine and versions, and this code."""
        return {**self.parts.client.describe_environment(), "rlvr": describe_code()["rlvr"]}
