"""The stored completions of held-out tasks, `evaluations/<phase>.jsonl`: found by their task, read from disk one task
at a time. Lines that are not rows are skipped."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlvr.service.dashboard.heldout_changes import name_task
from rlvr.service.dashboard.run_files import open_file, parse_row, size_and_mtime

_ID = re.compile(rb'"task_id": ("(?:[^"\\]|\\.)*")')
HEAD = 2000  # bytes of a line in which its writer puts the id of the task


class HeldoutAnswers:
    """The completions of one evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: object = None
        self._places: dict[str, list[int]] = {}

    @property
    def is_stored(self) -> bool:
        return self.path.is_file()

    def rows(self, task: str, most: int = 64) -> list[dict[str, Any]]:
        """The completions of a task."""
        self._refresh()
        found = list[dict[str, Any]]()
        try:
            with open_file(self.path) as file:
                for place in self._places.get(task, ())[:most]:
                    file.seek(place)
                    row = parse_row(file.readline())
                    if row is not None and _task_of(row) == task:
                        found.append(row)
        except OSError:
            return []
        return found

    def _refresh(self) -> None:
        if (now := size_and_mtime(self.path)) == self._stamp:
            return
        self._stamp, self._places = now, {}
        try:
            with open_file(self.path) as file:
                place = 0
                for line in file:
                    if (task := _read_task(line)) is not None:
                        self._places.setdefault(task, []).append(place)
                    place += len(line)
        except OSError:
            return


def _read_task(line: bytes) -> str | None:
    """The task of a line, which is parsed only if its id is not where it is written."""
    if (found := _ID.search(line, 0, HEAD)) is not None:
        try:
            return name_task(json.loads(found[1]))
        except ValueError:
            return None
    row = parse_row(line)
    return _task_of(row) if row is not None else None


def _task_of(row: dict[str, Any]) -> str:
    return name_task(row.get("task_id"))  # type: ignore[arg-type]
