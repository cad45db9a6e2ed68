"""Where else a run's metrics go: TensorBoard, MLflow and the store of the service, each an extra of its own.

    trackers = Trackers(TrackingOptions(tensorboard=True), folder, "my-run", settings, warn)
    with trackers.running(rows_that_stand):
        trackers.log("rl", 12, {"reward": 0.4})
        trackers.finish(summary)

`metrics.jsonl` stays the truth: a tracker that fails (its disk full, its server away) is warned of once, its rows wait
and are tried again, and training goes on. Exercised by `python -m pytest tests/test_trackers.py`. Left out on purpose:
uploads of weights and pictures, and trackers that need an account.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from rlvr.types import Trajectory

Status = Literal["FINISHED", "KILLED", "FAILED"]  # MLflow's words

_FIRST_RETRY, _LAST_RETRY = 30.0, 600.0  # seconds; what fails may take its time to fail, and is asked ever more rarely


@dataclass(frozen=True)
class TrackingOptions:
    """Trackers beside `metrics.jsonl`.

    `tensorboard` writes event files into the run's folder. `mlflow` logs to the store at `mlflow_uri` (None: a local
    one, `mlruns` in the run's root) under `experiment`. `store` is the URL of a database (SQLite, PostgreSQL) that gets
    the run and all of its answers, to be looked at and analysed beside those of the service.
    """

    tensorboard: bool = False
    mlflow: bool = False
    mlflow_uri: str | None = None
    experiment: str = "rlvr"
    store: str | None = None

    def __post_init__(self) -> None:
        if self.store == "":
            raise ValueError("tracking.store is empty; expected sqlite:///path or postgresql://user@host/database")


@dataclass(frozen=True)
class Row:
    """The metrics of one step of a phase, and when (seconds since 1970) they were known."""

    phase: str
    step: int
    time: float
    metrics: Mapping[str, float]


class Tracker(Protocol):
    """One place that metrics go to. Any method may raise: `Trackers` keeps what was not taken."""

    name: str
    interval: float  # seconds between two calls of `write`; 0 for at once

    def begin(self, kept: Sequence[Row]) -> None:
        """Open the place. `kept` are the rows of earlier attempts that still stand; later ones will be redone."""
        ...

    def write(self, rows: Sequence[Row]) -> None: ...

    def close(self, status: Status) -> None: ...


class Recorder(Tracker, Protocol):
    """A tracker that gets the answers of each step too, before the step's metrics."""

    def keep(self, step: int, trajectories: Sequence[Trajectory]) -> None: ...


class Trackers:
    """All trackers of a run. Building it needs the libraries (ValueError naming the extra) and begins nothing."""

    def __init__(
        self,
        options: TrackingOptions,
        folder: Path,
        run_name: str,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        """`config` is shown as it is given: hand in what `resolved.yaml` holds, so that no secret is.

        `recorder` is what `options.store` asks for (`rlvr.store.runs`).
        """
        self._recorder = recorder
        trackers: list[Tracker] = [recorder] if recorder else []
        if options.tensorboard:
            from rlvr.tracking.tensorboard_files import TensorBoardFiles

            trackers.append(TensorBoardFiles(folder / "tensorboard"))
        if options.mlflow:
            from rlvr.tracking.mlflow_store import MlflowStore

            uri = options.mlflow_uri or (folder.parent / "mlruns").absolute().as_uri()
            trackers.append(MlflowStore(uri, options.experiment, run_name, config, folder))
        self._feeds = [_Feed(tracker, warn, clock) for tracker in trackers]

    @contextmanager
    def running(
        self, kept: Sequence[Mapping[str, Any]], stopped_by: tuple[type[BaseException], ...] = (KeyboardInterrupt,)
    ) -> Iterator[Trackers]:
        """From the first step of an attempt to its last. `kept`: the rows of `metrics.jsonl` that stand.

        An exception ends the run as FAILED where trackers show that, one of `stopped_by` as KILLED.
        """
        now = time.time()
        rows = [Row(str(row["phase"]), int(row["step"]), now, _numbers(row)) for row in kept]
        status: Status = "FAILED"
        for feed in self._feeds:
            feed.begin(rows)
        try:
            yield self
            status = "FINISHED"
        except stopped_by:
            status = "KILLED"
            raise
        finally:
            for feed in self._feeds:
                feed.close(status)

    def log(self, phase: str, step: int, metrics: Mapping[str, Any]) -> None:
        row = Row(phase, step, time.time(), _numbers(metrics))
        for feed in self._feeds:
            feed.add(row)

    def keep(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """The answers that a step learned from; its metrics follow."""
        if self._recorder:
            self._recorder.keep(step, trajectories)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The numbers of `summary.json`, as metrics of a phase `summary`: `summary/final/pass@1` and so on."""
        self.log("summary", 0, dict(_flat_summary(summary)))


class _Feed:
    """One tracker's queue: what it could not take now waits, and it is asked again later, ever more rarely."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.tracker, self.warn, self.clock = tracker, warn, clock
        self.kept: Sequence[Row] = ()
        self.queue: list[Row] = []
        self.begun = self.warned = False
        self.next, self.retry = -math.inf, _FIRST_RETRY

    def begin(self, kept: Sequence[Row]) -> None:
        self.kept = kept
        self._send()

    def add(self, row: Row) -> None:
        self.queue.append(row)
        if self.clock() >= self.next:
            self._send()

    def close(self, status: Status) -> None:
        self._send()
        try:
            self.tracker.close(status)
        except Exception as error:
            self._failed(error)
        if self.queue:
            self.warn(f"{self.tracker.name} did not get the last {len(self.queue)} steps; metrics.jsonl has them")

    def _send(self) -> None:
        try:
            if not self.begun:
                self.tracker.begin(self.kept)
                self.begun = True
            if self.queue:
                self.tracker.write(self.queue)
                self.queue = []
        except Exception as error:  # whatever a tracker's libraries raise: it is not worth a training run
            self._failed(error)
        else:
            self.next, self.retry = self.clock() + self.tracker.interval, _FIRST_RETRY

    def _failed(self, error: Exception) -> None:
        self.next = self.clock() + self.retry
        self.retry = min(2 * self.retry, _LAST_RETRY)
        if not self.warned:
            self.warned = True
            told = without_passwords(f"{type(error).__name__}: {error}")
            if len(told) > 300:  # cut between words: of a secret that is cut in two nobody knows that it is one
                told = f"{told[:300].rpartition(' ')[0] or told[:300]} ..."
            self.warn(f"{self.tracker.name} failed ({told}); training goes on, metrics.jsonl has every step")


def without_passwords(text: str) -> str:
    """`http://user:password@host` as `http://***@host`."""
    return re.sub(r"://[^/\s]*@", "://***@", text)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a row: what is a number, `phase` and `step` apart."""
    named = ((name, value) for name, value in metrics.items() if name not in ("phase", "step"))
    fits = ((name, v) for name, v in named if not (isinstance(v, int) and abs(v) > sys.float_info.max))
    return {name: float(value) for name, value in fits if hasattr(value, "__float__")}


def _flat_summary(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(`final/pass@1`, value) of every number; an estimate counts by its `value`, its interval is in the file."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            if "value" in value:
                yield f"{prefix}{name}", float(value["value"])
            else:
                yield from _flat_summary(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)
