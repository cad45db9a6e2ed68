"""What a tracker is: one more destination of the metrics of a run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rlvr.core.files import write_atomic
from rlvr.core.types import Trajectory

Status = Literal["FINISHED", "KILLED", "FAILED"]  # MLflow's words


@dataclass(frozen=True)
class MetricRow:
    """The metrics of one step of a phase; `time` is in seconds since 1970.

    The last row of a run is of the phase `summary`; it has the whole content of `summary.json` beside its numbers.
    """

    phase: str
    step: int
    time: float
    metrics: Mapping[str, float]
    summary: Mapping[str, Any] = field(default_factory=dict[str, Any])


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


class RunMemory:
    """Remembers in a file of the run folder which run of a tracker it is, so that a resumed attempt continues that one.

    With another config in the same folder it remembers none. The config itself is not stored.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path = path
        self._fingerprint = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()

    def read(self) -> str | None:
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            return str(stored["run_id"]) if stored["config"] == self._fingerprint else None
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or not what was written there
            return None

    def store(self, run_id: str) -> None:
        write_atomic(self._path, json.dumps({"run_id": run_id, "config": self._fingerprint}))


def without_passwords(text: str) -> str:
    """`http://user:password@host` as `http://***@host`."""
    return re.sub(r"://[^/\s]*@", "://***@", text)
