"""A callback that measures the processor seconds of a run's training, apart from its evaluations.

    rlvr train --config-name=smollm "callbacks=[benchmarks.processor_time:ProcessorTime]"

On a machine with other work, processor seconds vary less than the seconds of a clock. They are those of all threads of
the run's process; a sandbox's processes and a GPU are not counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr.core.types import Trajectory
from rlvr.training.callbacks import Callback


class ProcessorTime(Callback):
    """Adds `processor/training` to the metrics of each step: the seconds of all steps so far, without evaluations."""

    def __init__(self) -> None:
        self._training = 0.0
        self._last = time.process_time()

    def on_start(self, folder: Path) -> None:
        """Begin to measure behind the loading of the model."""
        self._last = time.process_time()

    def on_rollouts(self, step: int, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Count what was used since the last call of this callback: it is this step."""
        self._training += self._measure()
        return {"processor/training": self._training}

    def on_step(self, phase: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Leave out what logging used."""
        self._measure()

    def on_evaluate(self, phase: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Leave out what the evaluation used."""
        self._measure()

    def state(self) -> dict[str, Any]:
        """The seconds so far: a resumed run goes on with them."""
        return {"training": self._training}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the seconds of the checkpoint."""
        self._training = float(state["training"])

    def _measure(self) -> float:
        """The processor seconds since the last call."""
        last, self._last = self._last, time.process_time()
        return self._last - last
