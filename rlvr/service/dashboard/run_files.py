"""The files of a run folder, read again and again while a run writes them, and only what is new.

A run folder may come from anywhere, be half written or damaged: lines that are not rows are skipped and counted, no
value is trusted to have a type, and nothing is ever written.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlvr.service.dashboard.dashboard_data import (
    AnswerRow,
    as_mapping,
    finite_number,
    one_line,
    outcome_of,
    verdicts_of,
    visible_text,
)

SMALL = 16 << 20  # the largest JSON file that is read
FIRST_ROWS, LAST_ROWS = 500, 5_000  # rows of metrics that are kept whole, of each phase
MOST_METRICS = 2_000


def open_file(path: Path) -> BinaryIO:
    """Open an ordinary file; OSError for a device or a pipe, which would be read for ever."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing or not an ordinary file")
    return open(path, "rb")


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it is missing, damaged, too large or too deep."""
    try:
        with open_file(path) as file:
            content = file.read(SMALL + 1)
        value = json.loads(content) if len(content) <= SMALL else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if is_shallow(value) else None


def is_shallow(value: Any, levels: int = 50) -> bool:
    """Whether a value can be walked through and written without a RecursionError."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels > 0 and all(is_shallow(child, levels - 1) for child in children)


def parse_row(text: bytes) -> dict[str, Any] | None:
    """A line as a JSON object, else None."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class PhaseMetrics:
    """The rows of one phase: of each metric all numbers, and of the rows themselves the first and the last ones."""

    def __init__(self) -> None:
        self.num_rows, self.first, self.last = 0, list[dict[str, Any]](), deque[dict[str, Any]](maxlen=LAST_ROWS)
        self._columns: dict[str, array[float]] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [*self.first, *self.last]

    @property
    def names(self) -> list[str]:
        """The metrics that have a number."""
        return sorted(self._columns)

    def add(self, row: dict[str, Any]) -> None:
        (self.first if len(self.first) < FIRST_ROWS else self.last).append(row)
        columns, place = self._columns, self.num_rows
        for name, value in row.items():
            if (type(value) is not float and type(value) is not int) or not -1e300 < value < 1e300:
                continue
            column = columns.get(name)
            if column is None:
                if len(columns) >= MOST_METRICS or one_line(name) != name:  # pages and addresses name it as it is
                    continue
                column = columns[name] = array("d")
            if len(column) < place:
                column.extend([math.nan] * (place - len(column)))
            column.append(value)
        self.num_rows += 1

    def steps_and_values(self, *names: str) -> list[np.ndarray]:
        """The steps, and the values of these metrics, of the rows that have all of them; by step."""
        whole = [np.full(self.num_rows, math.nan) for _ in range(len(names) + 1)]
        for values, name in zip(whole, ("step", *names), strict=True):
            stored = self._columns.get(name, array("d"))
            values[: len(stored)] = stored
        complete = np.flatnonzero(np.all([~np.isnan(values) for values in whole], axis=0))
        order = complete[np.argsort(whole[0][complete], kind="stable")]
        return [values[order] for values in whole]


class MetricsFile:
    """A metrics.jsonl, phase by phase. `refresh` reads new lines, and everything if the file was rewritten."""

    def __init__(self, path: Path) -> None:
        self.path, self.damaged = path, 0
        self._phases: dict[str, PhaseMetrics] = {}
        self._place: tuple[int, int] = (0, 0)  # inode, bytes read
        self._last = b""  # the last line read: detects a file rewritten in place

    def refresh(self) -> None:
        try:
            with open_file(self.path) as file:
                stat = os.fstat(file.fileno())
                inode, read = self._place
                file.seek(max(0, read - len(self._last)))
                if inode != stat.st_ino or stat.st_size < read or file.read(len(self._last)) != self._last:
                    self._phases, self.damaged, self._last, read = {}, 0, b"", 0
                    file.seek(0)
                for text in file:
                    if not text.endswith(b"\n"):
                        break  # not finished yet
                    read += len(text)
                    self._last = text
                    row = parse_row(text)
                    if row is None:
                        self.damaged += 1
                    else:
                        self._phases.setdefault(str(row.get("phase", "rl")), PhaseMetrics()).add(row)
                self._place = (stat.st_ino, read)
        except OSError:
            self._phases, self._place, self._last = {}, (0, 0), b""

    def of(self, phase: str) -> PhaseMetrics:
        return self._phases.get(phase) or PhaseMetrics()


def answer_row(work: str, step: int | None, key: str, row: dict[str, Any]) -> AnswerRow:
    """A stored answer as a row of a table."""
    verdicts = verdicts_of(row.get("scores"))
    outcome, reason = outcome_of(verdicts)
    tokens, logprobs = row.get("response_tokens"), numbers(row.get("logprobs"))
    answer = row.get("answer") if isinstance(row.get("answer"), str) else row.get("response")
    return AnswerRow(
        key=key,
        work=work,
        task=one_line(row.get("task_id"), 100),
        step=step,
        outcome=outcome,
        status=one_line(row.get("stop_reason"), 40),
        reward=finite_number(row.get("reward")),
        advantage=finite_number(row.get("advantage")),
        tokens=len(tokens) if isinstance(tokens, list) else 0,
        prompt=one_line(row.get("prompt")),
        answer=one_line(answer),
        group=visible_text(row.get("group_id"), 200),
        reason=reason,
        verifiers=tuple(verdict.verifier for verdict in verdicts),
        level=one_line(row.get("level"), 40),
        logprob=math.fsum(logprobs) / len(logprobs) if logprobs else None,
        expected=one_line(as_mapping(row.get("reference")).get("answer"), 60),
    )


def numbers(value: Any) -> list[float]:
    """A list of finite numbers; [] if any item is something else, since the others would lose their places."""
    if not isinstance(value, list) or not {*map(type, value)} <= {int, float}:
        return []
    try:
        found = list(map(float, value))
    except OverflowError:
        return []
    return found if all(map(math.isfinite, found)) and max(map(abs, found), default=0.0) < 1e300 else []


def is_run_locked(lock: Path) -> bool:
    """Whether a process has locked the run folder. The lock itself is not touched: a starting trainer needs it."""
    try:
        stat = lock.stat()
        mine = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        return any(mine in text.split() and "FLOCK" in text for text in Path("/proc/locks").read_text().splitlines())
    except OSError:
        return False


def size_and_mtime(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns
    except OSError:
        return 0, 0
