"""Further destinations of a run's metrics, each an extra: TensorBoard, MLflow, Weights & Biases, the service's store.

    trackers = Trackers(TrackingOptions(tensorboard=True), folder, "my-run", settings, warn)
    with trackers.running(rows_that_stand):
        trackers.log("rl", 12, {"reward": 0.4})
        trackers.finish(summary)

`metrics.jsonl` is complete whatever happens: if a tracker fails (disk full, no server), there is one warning, its rows
wait and are sent again, and training goes on. Left out on purpose: uploads of weights and pictures.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlvr.core.registry import load_path
from rlvr.core.types import Trajectory
from rlvr.core.variants import Section, Variants, make_section, setting
from rlvr.tracking.mlflow_store import MlflowOptions
from rlvr.tracking.tensorboard_files import TensorBoardOptions
from rlvr.tracking.tracker import (
    MetricRow,
    Recorder,
    Status,
    TrackedRun,
    Tracker,
    TrackerOptions,
    mask_settings,
    without_passwords,
)
from rlvr.tracking.wandb_run import WandbOptions

_FIRST_RETRY, _LAST_RETRY = 30.0, 600.0  # seconds; a failing call may be slow, so the pause grows


@dataclass(frozen=True)
class StoreOptions(TrackerOptions):
    """The service's store: the database at `url` (SQLite, PostgreSQL) gets the run and all of its completions, to be
    read and analysed together with those of the service.
    """

    name = "store"
    switch = "store"

    url: str = setting("", flat="store")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.url:
            raise ValueError("tracking.store is empty; expected sqlite:///path or postgresql://user@host/database")

    def open(self, run: TrackedRun) -> Recorder:
        try:
            recorder = load_path("tracking.store", "rlvr.store.run_recorder:RunRecorder")  # SQL is loaded where needed
        except ModuleNotFoundError as error:
            raise ValueError(f"tracking.store needs {error.name}: pip install 'rlvr[serve]'") from error
        try:
            return cast(Recorder, recorder(self.url, run.folder, run.name, mask_settings(run.config), run.warn))
        except ValueError as error:
            raise ValueError(f"tracking.store: {error}") from error


TRACKERS = Variants(
    "tracker", TrackerOptions, StoreOptions, TensorBoardOptions, MlflowOptions, WandbOptions,
    or_else="; or a path 'package.module:Class'",
)  # fmt: skip


class TrackerChoice(Section):
    """An entry of the list of trackers."""

    def __post_init__(self) -> None:
        for option, value in self.list_others().items():
            takers = ", ".join(TRACKERS.list_takers(option)) or "a class of your own"
            raise ValueError(
                f"tracking.trackers: {option}={value} has no effect: the tracker {self.choose_name()!r} has no "
                f"{option}, an option of {takers}; leave it out"
            )
        _ = self.variant


if TYPE_CHECKING:  # it is made of the trackers that there are
    TrackerSection = TrackerChoice
else:
    TrackerSection = make_section("TrackerSection", TRACKERS, ("name", str, MISSING), base=TrackerChoice)


@dataclass(frozen=True)
class TrackingOptions:
    """Trackers beside `metrics.jsonl`: `trackers` are their names, or records of a name and options.

    The other keys stand for a tracker too, or for an option of one: `tensorboard=true`, `mlflow=true` with `mlflow_uri`
    and `experiment`, `wandb=true` with `experiment`, its project, and `wandb_tags`, and `store=URL`.
    """

    trackers: list[TrackerSection | str] = field(default_factory=list[Any])
    tensorboard: bool = False
    mlflow: bool = False
    mlflow_uri: str | None = None
    experiment: str = "rlvr"
    wandb: bool = False
    wandb_tags: tuple[str, ...] = ()
    store: str | None = None

    def __post_init__(self) -> None:
        _ = self.all_trackers

    @cached_property
    def all_trackers(self) -> list[TrackerOptions]:
        """The trackers of a run, with their options."""
        switched = [one for one in TRACKERS.classes() if one.switch]
        by_switch = [one for one in switched if getattr(self, one.switch) not in (None, False)]
        flat = [one(**{name: getattr(self, key) for name, key in one.flat_names().items()}) for one in by_switch]
        listed = [TrackerSection.of(given).variant for given in self.trackers]
        return [*flat, *(one for one in listed if one not in flat)]

    def unread(self) -> dict[str, str]:
        """Keys that have no effect, and why."""
        flat = TRACKERS.flat_options()
        unread: dict[str, str] = {}
        for key in (one.name for one in fields(self)):
            switches = [one.switch for one in TRACKERS.classes() if one.name in flat.get(key, ())]
            if switches and key not in switches and not any(getattr(self, switch) for switch in switches):
                named = " nor ".join(f"tracking.{switch}" for switch in switches)
                unread[f"tracking.{key}"] = f"neither {named} is true" if len(switches) > 1 else f"{named} is false"
        return unread


class Trackers:
    """All trackers of a run. Building it needs the libraries (ValueError naming the extra) and connects to nothing."""

    def __init__(
        self,
        options: TrackingOptions,
        folder: Path,
        run_name: str,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`config`, `warn` and `say` are those of `TrackedRun`."""
        run = TrackedRun(folder, run_name, config, warn, say)
        trackers = [one.open(run) for one in options.all_trackers]
        self._recorders = [tracker for tracker in trackers if isinstance(tracker, Recorder)]
        self._feeds = [_Feed(tracker, warn, clock) for tracker in trackers]

    @contextmanager
    def running(
        self, kept: Sequence[Mapping[str, Any]], stopped_by: tuple[type[BaseException], ...] = (KeyboardInterrupt,)
    ) -> Iterator[Trackers]:
        """Covers an attempt from its first to its last step. `kept`: the rows of `metrics.jsonl` that stand.

        An exception ends the run as FAILED where trackers show that, one of `stopped_by` as KILLED.
        """
        now = time.time()
        rows = [MetricRow(str(row["phase"]), int(row["step"]), now, _numbers(row)) for row in kept]
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
        self._add(MetricRow(phase, step, time.time(), _numbers(metrics)))

    def _add(self, row: MetricRow) -> None:
        for feed in self._feeds:
            feed.add(row)

    def keep(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Record the completions that a step learned from, before its metrics."""
        for recorder in self._recorders:
            recorder.keep(step, trajectories)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Log the numbers of `summary.json` as metrics of a phase `summary`: `summary/final/pass@1` and so on."""
        self._add(MetricRow("summary", 0, time.time(), dict(_flat_summary(summary)), summary))


class _Feed:
    """One tracker's queue: rows wait if it fails, and are sent again after growing pauses."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.tracker, self.warn, self.clock = tracker, warn, clock
        self.kept: Sequence[MetricRow] = ()
        self.queue: list[MetricRow] = []
        self.begun = self.warned = False
        self.next, self.retry = -math.inf, _FIRST_RETRY

    def begin(self, kept: Sequence[MetricRow]) -> None:
        self.kept = kept
        self._send()

    def add(self, row: MetricRow) -> None:
        self.queue.append(row)
        if self.clock() >= self.next:
            self._send()

    def close(self, status: Status) -> None:
        self._send()
        try:
            self.tracker.close(status)
        except Exception as error:
            self._handle_failure(error)
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
        except Exception as error:  # a tracker's library may raise anything, and must not stop training
            self._handle_failure(error)
        else:
            self.next, self.retry = self.clock() + self.tracker.interval, _FIRST_RETRY

    def _handle_failure(self, error: Exception) -> None:
        self.next = self.clock() + self.retry
        self.retry = min(2 * self.retry, _LAST_RETRY)
        if not self.warned:
            self.warned = True
            problem = without_passwords(" ".join(f"{type(error).__name__}: {error}".split()))
            if len(problem) > 300:  # cut between words: half a secret would not be recognised
                problem = f"{problem[:300].rpartition(' ')[0] or problem[:300]} ..."
            self.warn(f"{self.tracker.name} failed ({problem}); training goes on, metrics.jsonl has every step")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, without `phase` and `step`."""
    named = ((name, value) for name, value in metrics.items() if name not in ("phase", "step"))
    fits = ((name, v) for name, v in named if not (isinstance(v, int) and abs(v) > sys.float_info.max))
    return {name: float(value) for name, value in fits if hasattr(value, "__float__")}


def _flat_summary(summary: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(`final/pass@1`, value) of every number; of an estimate only its `value`."""
    for name, value in summary.items():
        if isinstance(value, Mapping):
            if "value" in value:
                yield f"{prefix}{name}", math.nan if value["value"] is None else float(value["value"])
            else:
                yield from _flat_summary(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", float(value)
