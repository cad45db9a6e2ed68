"""Reads the rollouts of run folders into a `RolloutIndex`: the newest first, some at once, the rest in a thread.

    reader = RolloutReader(index)
    reader.refresh({"arithmetic": Path("runs/arithmetic/rollouts")})
    reader.share  # of the bytes that are there, how many are read

A file is read again when its size or time has changed. Files are never written.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlvr.service.dashboard.rollout_index import GivenRow, RolloutIndex
from rlvr.service.dashboard.run_files import open_file, parse_row

BUDGET = 4 << 20  # bytes that a refresh reads itself; a thread reads the rest
ROWS = 300_000  # rollouts in the table; older ones are left out
BATCH = 1 << 20  # bytes of rows that are added at once
PAUSE_S = 0.002  # after each batch of the thread, so that pages come first
_NUMBERED = re.compile(r"rl-(\d{1,9})\.jsonl")
File = tuple[str, int]  # the run and the step
Stamp = tuple[int, int]  # size and time of change


class RolloutReader:
    """Reads the rollouts of runs into an index; `budget` None reads all at once. Thread-safe; `refresh` blocks as long
    as its budget takes."""

    def __init__(self, index: RolloutIndex, budget: int | None = BUDGET, rows: int = ROWS) -> None:
        self.index, self.budget, self.rows = index, budget, rows
        self._known: dict[File, tuple[Stamp, int]] = {}  # with the number of rollouts
        self._folders: dict[str, Path] = {}
        self._lock, self._thread = threading.Lock(), threading.Thread()
        self._current: File | None = None
        self._bytes, self._all_bytes = 0, 0  # that are read, and that are there
        self.note = ""  # that older rollouts are left out

    @property
    def share(self) -> float:
        """How much of the files is read, 1 when nothing is left to read."""
        return 1.0 if self._all_bytes == 0 else min(1.0, self._bytes / self._all_bytes)

    def refresh(self, folders: Mapping[str, Path], first: File | None = None) -> None:
        """Read what is new, as far as the budget allows, and `first` in any case; a thread reads the rest."""
        busy = self._thread.is_alive()
        if busy and (first is None or first in self._known):
            return
        with self._lock:
            self._folders = dict(folders)
            is_left = self._read(self.budget, first)
        if is_left and not busy:
            self._thread = threading.Thread(target=self._read_rest, name="rollouts", daemon=True)
            self._thread.start()

    def is_read(self, file: File) -> bool:
        """Whether the table has the rows that the file has now, or is being filled with them."""
        try:
            stat = _path(self._folders[file[0]], file[1]).stat()
        except (OSError, KeyError):
            return False
        known = self._known.get(file)
        return file == self._current or (known is not None and known[0] == (stat.st_size, stat.st_mtime_ns))

    def rows_at(self, file: File, offsets: Mapping[int, int]) -> dict[int, dict[str, Any]]:
        """Rows of a file by their places, given the bytes where they begin; those that are gone are left out."""
        found: dict[int, dict[str, Any]] = {}
        try:
            with open_file(_path(self._folders[file[0]], file[1])) as opened:
                for place, at in offsets.items():
                    opened.seek(at)
                    if (row := parse_row(opened.readline())) is not None:
                        found[place] = row
        except (OSError, KeyError):
            pass
        return found

    def _read_rest(self) -> None:
        is_left = True
        while is_left:
            with self._lock:
                is_left = self._read(self.budget, None, PAUSE_S)

    def _read(self, budget: int | None, first: File | None, pause: float = 0.0) -> bool:
        """Read files up to the budget; the thread, which pauses, one at least. Return whether some are left."""
        present = _list_files(self._folders)
        for gone in [file for file in self._known if file not in present]:
            del self._known[gone]
            self.index.remove(*gone)
        waiting = [file for file, stamp in present.items() if self._known.get(file, (None, 0))[0] != stamp]
        if first in waiting:
            waiting = [first, *(file for file in waiting if file != first)]
        self._all_bytes = sum(size for size, _ in present.values())
        self._bytes = self._all_bytes - sum(present[file][0] for file in waiting)
        rows, left = sum(rows for _, rows in self._known.values()), budget
        while waiting and rows < self.rows:
            file, size = waiting[0], present[waiting[0]][0]
            if left is not None and size > left and file != first and not (pause and left == budget):
                break
            if file in self._known:
                rows -= self._known.pop(file)[1]
                self.index.remove(*file)
            number = self._read_file(file, pause)
            self._known[file] = present[file], number
            rows, left = rows + number, None if left is None else left - size
            del waiting[0]
        is_full = bool(waiting) and rows >= self.rows
        self.note = f"Only the newest {rows:,} rollouts are in this table; older ones are left out." if is_full else ""
        self._bytes = self._all_bytes if is_full else self._bytes
        return bool(waiting) and not is_full

    def _read_file(self, file: File, pause: float) -> int:
        """Add the rows of a file in batches: a page waits for one at most."""
        work, step = self._current = file
        batch, size, rows = list[GivenRow](), 0, 0
        for place, at, length, row in _read_rows(_path(self._folders[work], step)):
            if row is not None:
                batch.append((place, at, row))
            size += length
            self._bytes += length
            if size >= BATCH:
                rows += self.index.add(work, step, step, batch)
                batch, size = [], 0
                time.sleep(pause)
        rows += self.index.add(work, step, step, batch) if batch else 0
        self._current = None
        return rows


def _path(folder: Path, step: int) -> Path:
    return folder / f"rl-{step:06d}.jsonl"


def _list_files(folders: Mapping[str, Path]) -> dict[File, Stamp]:
    """The files of all runs: run by run, the newest step first."""
    return {
        (work, step): stamp for work, folder in folders.items() for step, stamp in sorted(_scan(folder), reverse=True)
    }


def _scan(folder: Path) -> Iterable[tuple[int, Stamp]]:
    files: list[tuple[int, Stamp]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if match := _NUMBERED.fullmatch(entry.name):
                    stat = entry.stat()
                    files.append((int(match[1]), (stat.st_size, stat.st_mtime_ns)))
    except OSError:
        pass
    return files


def _read_rows(path: Path) -> Iterator[tuple[int, int, int, dict[str, Any] | None]]:
    """(place, offset, length, row) of each line; None for one that is no row."""
    try:
        with open_file(path) as file:
            at = 0
            for place, text in enumerate(file):
                yield place, at, len(text), parse_row(text)
                at += len(text)
    except OSError:
        return
