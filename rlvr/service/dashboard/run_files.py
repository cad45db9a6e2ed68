"""The files of a run folder, read again and again while a run writes them, and only what is new.

A run folder may come from anywhere, be half written or damaged: lines that are not rows are skipped and counted, no
value is trusted to have a type, and nothing is ever written.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from rlvr.service.dashboard.dashboard_data import (
    AnswerRow,
    finite_number,
    one_line,
    outcome_of,
    verdicts_of,
    visible_text,
)

SMALL = 16 << 20  # the largest JSON file that is read


def read_json(path: Path) -> Any:
    """The content of a JSON file; None if it is missing, damaged or too large."""
    try:
        with open(path, "rb") as file:
            content = file.read(SMALL + 1)
        return json.loads(content) if len(content) <= SMALL else None
    except (OSError, ValueError, RecursionError):
        return None


def parse_row(text: bytes) -> dict[str, Any] | None:
    """A line as a JSON object, else None."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class MetricsFile:
    """The rows of a metrics.jsonl. `refresh` reads new lines, and everything if the file was rewritten."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows, self.damaged = path, list[dict[str, Any]](), 0
        self._place: tuple[int, int] = (0, 0)  # inode, bytes read
        self._last = b""  # the last line read: detects a file rewritten in place

    def refresh(self) -> None:
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                inode, read = self._place
                file.seek(max(0, read - len(self._last)))
                if inode != stat.st_ino or stat.st_size < read or file.read(len(self._last)) != self._last:
                    self.rows, self.damaged, self._last, read = [], 0, b"", 0
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
                        self.rows.append(row)
                self._place = (stat.st_ino, read)
        except OSError:
            self.rows, self._place, self._last = [], (0, 0), b""

    def of(self, phase: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("phase", "rl") == phase]


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
    )


def numbers(value: Any) -> list[float]:
    """A list of finite numbers; [] if any item is something else, since the others would lose their places."""
    items = [finite_number(item) for item in value] if isinstance(value, list) else []
    return [] if None in items else [item for item in items if item is not None]


def is_held(lock: Path) -> bool:
    """Whether a process has locked the run folder. The lock itself is not touched: a starting trainer needs it."""
    try:
        stat = lock.stat()
        mine = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        return any(mine in text.split() and "FLOCK" in text for text in Path("/proc/locks").read_text().splitlines())
    except OSError:
        return False


def stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
        return stat.st_size, stat.st_mtime_ns
    except OSError:
        return 0, 0
