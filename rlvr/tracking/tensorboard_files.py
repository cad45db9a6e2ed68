"""TensorBoard's event files, written by tensorboard's own records: neither torch nor tensorflow is needed.

    tensorboard --logdir runs/arithmetic/tensorboard

Each phase has a folder, because a resumed phase takes back its own later steps: a new file says from which step on
everything before it is void.
"""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvr.tracking.tracker import MetricRow, Status, TrackedRun, TrackerOptions


@dataclass(frozen=True)
class TensorBoardOptions(TrackerOptions):
    """Event files for TensorBoard in the run's folder."""

    name = "tensorboard"
    switch = "tensorboard"

    def open(self, run: TrackedRun) -> TensorBoardFiles:
        return TensorBoardFiles(run.folder / "tensorboard")


class TensorBoardFiles:
    """One event file per phase and attempt; a step's events are with the system when `write` returns."""

    name = "TensorBoard"
    interval = 0.0

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ModuleNotFoundError as error:
            raise ValueError(
                f"tracking.tensorboard=true, but {error.name} is not installed; it comes with the extra: "
                "pip install 'rlvr[tensorboard]'"
            ) from error
        self._folder, self._events, self._summaries, self._records = folder, event_pb2, summary_pb2, RecordWriter
        self._files: dict[str, io.FileIO] = {}

    def begin(self, kept: Sequence[MetricRow]) -> None:
        """Nothing to do: the files of earlier attempts hold every step up to the first one that is redone."""

    def write(self, rows: Sequence[MetricRow]) -> None:
        for phase in dict.fromkeys(row.phase for row in rows):
            mine = [row for row in rows if row.phase == phase]
            if phase not in self._files:
                self._files[phase] = self._open(phase, mine[0].step)
            values = [
                self._events.Event(
                    wall_time=row.time,
                    step=row.step,
                    summary=self._summaries.Summary(
                        value=[
                            self._summaries.Summary.Value(tag=f"{phase}/{name}", simple_value=value)
                            for name, value in row.metrics.items()
                        ]
                    ),
                )
                for row in mine
            ]
            self._append(self._files[phase], values)

    def close(self, status: Status) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, phase: str, step: int) -> io.FileIO:
        folder = self._folder / phase
        folder.mkdir(parents=True, exist_ok=True)
        before = len(list(folder.glob("*tfevents*")))
        # TensorBoard reads a folder's files in the order of their names.
        file = io.FileIO(folder / f"events.out.tfevents.{int(time.time()):010d}.{before:04d}.rlvr", "x")
        first = [self._events.Event(wall_time=time.time(), file_version="brain.Event:2")]
        if before:
            restart = self._events.SessionLog(status=self._events.SessionLog.START)
            first.append(self._events.Event(wall_time=time.time(), step=step, session_log=restart))
        try:
            self._append(file, first)
        except OSError:
            file.close()
            raise
        return file

    def _append(self, file: io.FileIO, events: Sequence[object]) -> None:
        """All of the events or none: a torn record would hide everything written after it."""
        buffer = io.BytesIO()
        writer = self._records(buffer)
        for event in events:
            writer.write(event.SerializeToString())  # pyright: ignore[reportAttributeAccessIssue]
        content, start = buffer.getvalue(), file.tell()
        try:
            if file.write(content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(start)
            file.seek(start)
            raise
