"""What a tracker is: one more destination of the metrics of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rlvr.core.types import Trajectory

Status = Literal["FINISHED", "KILLED", "FAILED"]  # MLflow's words


@dataclass(frozen=True)
class MetricRow:
    """The metrics of one step of a phase; `time` is in seconds since 1970."""

    phase: str
    step: int
    time: float
    metrics: Mapping[str, float]


class Tracker(Protocol):
    """One destination of metrics. Any method may raise: `Trackers` then tries again later."""

    name: str
    interval: float  # seconds between two calls of `write`; 0 for at once

    def begin(self, kept: Sequence[MetricRow]) -> None:
        """Open the destination. `kept` are the rows of earlier attempts that still stand; later ones will be redone."""
        ...

    def write(self, rows: Sequence[MetricRow]) -> None: ...

    def close(self, status: Status) -> None: ...


class Recorder(Tracker, Protocol):
    """A tracker that also gets the completions of each step, before the step's metrics."""

    def keep(self, step: int, trajectories: Sequence[Trajectory]) -> None: ...


def without_passwords(text: str) -> str:
    """`http://user:password@host` as `http://***@host`."""
    return re.sub(r"://[^/\s]*@", "://***@", text)
