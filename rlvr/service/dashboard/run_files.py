"""The files of a run folder as the dashboard reads them: again and again while a run writes them, and only what is new.

A run folder may come from somebody else, be half written or damaged: what is no row is left out and counted, nothing
is trusted to have a type, and nothing is ever written. Exercised by tests/test_dashboard_runs.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr.service.dashboard.data import Entry, line, number, outcome_of, verdicts_of, visible

BUDGET = 32 << 20  # bytes of answers that one look reads; the next one goes on from there
SMALL = 16 << 20  # bytes of a JSON file that is read whole
ROWS = 200_000  # answers that are kept track of
_NUMBERED = re.compile(r"rl-(\d{1,9})\.jsonl")


def read_json(path: Path) -> Any:
    """What a JSON file holds; None where there is none, or it is damaged or too large."""
    try:
        with open(path, "rb") as file:
            content = file.read(SMALL + 1)
        return json.loads(content) if len(content) <= SMALL else None
    except (OSError, ValueError, RecursionError):
        return None


def parsed(text: bytes) -> dict[str, Any] | None:
    """A line as a JSON object, else None."""
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class Metrics:
    """The rows of a metrics.jsonl. `refresh` reads what was added; a file that was rewritten is read anew."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows, self.damaged = path, list[dict[str, Any]](), 0
        self._place: tuple[int, int] = (0, 0)  # inode, bytes read
        self._last = b""  # the last line that was read: tells a file rewritten in place

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
                    row = parsed(text)
                    if row is None:
                        self.damaged += 1
                    else:
                        self.rows.append(row)
                self._place = (stat.st_ino, read)
        except OSError:
            self.rows, self._place, self._last = [], (0, 0), b""

    def of(self, phase: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("phase", "rl") == phase]


@dataclass(frozen=True)
class _Light:
    """An answer without its texts: enough to filter by, and where to find it."""

    place: int  # of its line in the file
    task: str
    outcome: str
    status: str


@dataclass
class _Kept:
    """What is known of one file of answers, as it was when it had this stamp."""

    stamp: tuple[int, int]
    light: list[_Light] = field(default_factory=list[_Light])


class Rollouts:
    """The answers of a run, `rollouts/rl-<step>.jsonl`. Texts stay on disk; the newest files are looked at first."""

    def __init__(self, folder: Path, budget: int = BUDGET) -> None:
        self.folder, self.budget = folder, budget
        self._files: dict[int, _Kept] = {}
        self.complete = True

    def refresh(self) -> None:
        """Look at what is new, newest first, until the budget is used up; `complete` says whether all was seen."""
        left, rows, self.complete = self.budget, 0, True
        present = self._present()
        for gone in self._files.keys() - present.keys():
            del self._files[gone]
        for step in sorted(present, reverse=True):
            size, changed = present[step]
            known = self._files.get(step)
            if known is None or known.stamp != (size, changed):
                if left <= 0 or rows > ROWS:
                    self.complete = False
                    continue
                left -= size
                known = self._files[step] = _Kept((size, changed), list(self._light(step)))
            rows += len(known.light)

    @property
    def known(self) -> int:
        """How many files were looked at: it grows while older ones are still being read."""
        return len(self._files)

    def steps(self) -> list[int]:
        return sorted(self._files)

    def found(self, step: int | None, task: str, outcome: str, status: str) -> list[tuple[int, int]]:
        """(step, line) of the answers asked for, newest step first, in the order of the file."""
        steps = [step] if step is not None else sorted(self._files, reverse=True)
        return [
            (at, light.place)
            for at in steps
            for light in (self._files[at].light if at in self._files else [])
            if (not task or light.task == task)
            and (not outcome or light.outcome == outcome)
            and (not status or light.status == status)
        ]

    def choices(self) -> tuple[list[str], list[str], list[str]]:
        """The tasks, outcomes and stop reasons there are; of tasks the thousand most frequent."""
        tasks: dict[str, int] = {}
        outcomes, statuses = set[str](), set[str]()
        for kept in self._files.values():
            for light in kept.light:
                tasks[light.task] = tasks.get(light.task, 0) + 1
                outcomes.add(light.outcome)
                statuses.add(light.status)
        often = sorted(tasks, key=lambda task: (-tasks[task], task))[:1000]
        return sorted(often), sorted(outcomes - {""}), sorted(statuses - {""})

    def rows(self, places: list[tuple[int, int]]) -> dict[tuple[int, int], dict[str, Any]]:
        """The rows at these places, read from disk; what is not there any more is left out."""
        wanted: dict[int, set[int]] = {}
        for step, place in places:
            wanted.setdefault(step, set()).add(place)
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for step, lines in wanted.items():
            for place, row in self._lines(step, lines):
                found[step, place] = row
        return found

    def _present(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if match := _NUMBERED.fullmatch(entry.name):
                        stat = entry.stat()
                        found[int(match[1])] = (stat.st_size, stat.st_mtime_ns)
        except OSError:
            pass
        return found

    def _lines(self, step: int, wanted: set[int] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            with open(self.folder / f"rl-{step:06d}.jsonl", "rb") as file:
                for place, text in enumerate(file):
                    if (wanted is None or place in wanted) and (row := parsed(text)) is not None:
                        yield place, row
        except OSError:
            return

    def _light(self, step: int) -> Iterator[_Light]:
        for place, row in self._lines(step):
            outcome, _ = outcome_of(verdicts_of(row.get("scores")))
            yield _Light(place, line(row.get("task_id"), 100), outcome, line(row.get("stop_reason"), 40))


def entry(run: str, step: int, place: int, row: dict[str, Any]) -> Entry:
    """A stored answer as a row of a table."""
    outcome, reason = outcome_of(verdicts_of(row.get("scores")))
    tokens = row.get("response_tokens")
    answer = row.get("answer") if isinstance(row.get("answer"), str) else row.get("response")
    return Entry(
        key=f"{run}:{step}:{place}",
        work=run,
        task=line(row.get("task_id"), 100),
        step=step,
        outcome=outcome,
        status=line(row.get("stop_reason"), 40),
        reward=number(row.get("reward")),
        advantage=number(row.get("advantage")),
        tokens=len(tokens) if isinstance(tokens, list) else 0,
        prompt=line(row.get("prompt")),
        answer=line(answer),
        group=visible(row.get("group_id"), 200),
        reason=reason,
    )


def numbers(value: Any) -> list[float]:
    """A list of numbers, else []: one of a list with anything else in it could not be matched with its neighbour."""
    found = [number(item) for item in value] if isinstance(value, list) else []
    return [] if None in found else [item for item in found if item is not None]


def is_held(lock: Path) -> bool:
    """Whether a process holds the run folder. The lock is not touched: a trainer that starts must not find it taken."""
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
