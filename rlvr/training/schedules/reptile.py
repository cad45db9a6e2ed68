"""Reptile: learn weights from which a few steps on a new family of tasks go far (Nichol et al. 2018, arXiv:1803.02999).

The families are the levels of the environment. An inner loop makes `inner_steps` ordinary steps on the tasks of one
family, from the weights W to the weights W'. The outer step after it is W <- W + outer_rate x (W' - W), and the
optimizer begins anew. Each pass goes through all families once, in a new order. Equation 2 of the paper, with whole
optimizer steps as the inner ones: its expectation has a term that makes the gradients of a family agree, which plain
training on all families (`inner_steps=1`) lacks.

The weights of the beginning of an inner loop are a folder `checkpoints/outer-STEP`, kept as long as a resume may go on
within that loop, so a resumed run is the same to the bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import cast

from rlvr.core import rng
from rlvr.core.files import find_damage
from rlvr.core.protocols import InterpolatingClient
from rlvr.core.weights_place import CHECKPOINTS
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.journal import Checkpoint, Journal
from rlvr.training.parts import StepBatch
from rlvr.training.schedules.schedule_options import ReptileOptions
from rlvr.training.schedules.sync import Synchronous
from rlvr.training.trainer import Trainer


class Reptile(Synchronous):
    """Steps of the synchronous schedule, on one family at a time, with an outer step after every `inner_steps`."""

    def __init__(self, trainer: Trainer, journal: Journal) -> None:
        super().__init__(trainer)
        assert isinstance(trainer.options.order, ReptileOptions)
        self._order = trainer.options.order
        self._client = cast(InterpolatingClient, trainer.parts.client)
        self._folder = journal.folder / CHECKPOINTS
        self._families = list(trainer.parts.source.levels)
        if len(self._families) < 2:
            raise ValueError(
                "training.schedule=reptile learns from families of tasks, which are the levels of the environment, and "
                "this one has a single level; use an environment with several, or schedule=sync"
            )

    def learn(self, step: int) -> tuple[dict[str, float], StepBatch]:
        """One inner step; the first of a loop saves the weights, and the last makes the outer step."""
        loop, inner_step = divmod(step, self._order.inner_steps)
        start = self._start_of(loop)
        if not inner_step:
            self._client.save_weights_for_sampler(start.name).result()
        self.trainer.collector.curriculum.level = self._choose_family(loop)
        metrics, collected = super().learn(step)
        if inner_step + 1 == self._order.inner_steps:
            self._client.interpolate(str(start), self._order.outer_rate).result()
        return metrics, collected

    def _choose_family(self, loop: int) -> str:
        number, place = divmod(loop, len(self._families))
        order = rng.permutation(len(self._families), rng.key("reptile", self.trainer.parts.seed, number))
        return self._families[order[place]]

    def _start_of(self, loop: int) -> Path:
        return self._folder / f"outer-{loop * self._order.inner_steps:06d}"

    def restore(self, checkpoint: Checkpoint | None, step: int) -> None:
        loop, inner_step = divmod(step, self._order.inner_steps)
        folder = self._start_of(loop)
        if inner_step and (damage := find_damage(folder)):
            raise TrainingStoppedError(
                f"{folder}, the weights that the inner loop began with, is damaged or missing ({damage}); put it back: "
                "it cannot be made again from later weights. Or start anew under another run.name"
            )

    def delete_before(self, step: int) -> None:
        first = self._start_of(step // self._order.inner_steps).name
        for folder in self._folder.glob("outer-*"):
            if folder.name < first:
                shutil.rmtree(folder, ignore_errors=True)

    def finish(self) -> None:
        for folder in self._folder.glob("outer-*"):
            shutil.rmtree(folder, ignore_errors=True)
