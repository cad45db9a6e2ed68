"""A run that is ready to begin: its parts, already built, and how often it is made safe.

`rlvr.build` fills a `Job`; `rlvr.training.loops` carries it out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlvr.messages import SamplingParams
from rlvr.protocols import TaskSource, TrainingClient
from rlvr.reward import Reward
from rlvr.tracking.trackers import Trackers
from rlvr.training.evaluate import EvaluationOptions
from rlvr.training.options import TrainingOptions
from rlvr.training.sft import SftOptions
from rlvr.training.step import Trainer


@contextmanager
def settled() -> Iterator[None]:
    """Within the block the collector of cycles leaves alone what is there already.

    Libraries and a model are a million objects, and a step's own set off several searches through all of them.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class RunOptions:
    """Where a run lives (`root`/`name`; the name of the config by default) and how often it is made safe.

    `rollouts_per_step` answers a step are kept to look at, 0 for none.
    """

    root: str = "runs"
    name: str | None = None
    resume: bool = True
    checkpoint_every: int = 20
    keep_checkpoints: int = 2
    rollouts_per_step: int = 32

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1 or self.keep_checkpoints < 2:
            raise ValueError(
                f"run: checkpoint_every={self.checkpoint_every} (expected at least 1), keep_checkpoints="
                f"{self.keep_checkpoints} (expected at least 2: the last one may turn out damaged)"
            )


@dataclass
class Job:
    """Everything a run needs, already built."""

    client: TrainingClient
    source: TaskSource
    reward: Reward
    params: SamplingParams
    trainer: Trainer
    sft: SftOptions
    training: TrainingOptions
    evaluation: EvaluationOptions
    options: RunOptions
    seed: int
    folder: Path
    trackers: Trackers
    weights_sha256: Callable[[], str]
