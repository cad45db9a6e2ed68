"""The run folder and its memory: what was done, what is safe on disk, and where to go on.

`journal.jsonl` is written ahead of everything that depends on it, one synced line an event. A checkpoint counts once
its line is there and its files have their checksums; whatever was done after the last such checkpoint is done again
from the start of that step, with the same draws, so the outcome is the same bits. Metric rows beyond it are dropped.

    runs/<name>/resolved.yaml  metrics.jsonl  journal.jsonl  checkpoints/  rollouts/  evaluations/  curve.png
    runs/<name>/summary.json   (last: a run with a summary is finished)
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr.files import checked_name, remove_leftovers, verified, write_atomic


class RunLocked(ValueError):
    """Another process is working in this run folder."""


@dataclass(frozen=True)
class Position:
    """`step` steps of the phase numbered `phase` are done."""

    phase: int = 0
    step: int = 0

    def __lt__(self, other: Position) -> bool:
        return (self.phase, self.step) < (other.phase, other.step)


@dataclass(frozen=True)
class Checkpoint:
    """A safe point: where the run was, where the weights are, and all state that is not weights."""

    position: Position
    path: str
    state: dict[str, Any] = field(default_factory=dict[str, Any])


class Journal:
    """One process's hold on a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in ("checkpoints", "rollouts", "evaluations"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._lock = open(folder / ".lock", "w")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise RunLocked(
                f"run folder {folder} is in use by another process; wait for it, or choose another run.name"
            ) from error
        for place in (folder, *(folder / p for p in ("checkpoints", "rollouts", "evaluations"))):
            remove_leftovers(place)
        self.events = self._read()
        self._file = open(folder / "journal.jsonl", "a", encoding="utf-8")  # noqa: SIM115

    def _read(self) -> list[dict[str, Any]]:
        """All whole events; a line torn by a crash is cut off so that the next one starts clean."""
        path = self.folder / "journal.jsonl"
        events: list[dict[str, Any]] = []
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for line in lines:
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("torn")
                events.append(json.loads(line))
            except ValueError:
                break
        if len(events) < len(lines):
            write_atomic(path, b"".join(lines[: len(events)]))
        return events

    def write(self, event: str, **details: Any) -> None:
        line = {"event": event, **details}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(line)

    def checkpoint(self, checkpoint: Checkpoint, keep: int) -> None:
        """Make a saved checkpoint count, then delete older ones beyond the last `keep`."""
        at = checkpoint.position
        self.write("checkpoint", phase=at.phase, step=at.step, path=checkpoint.path, state=checkpoint.state)
        paths = list(dict.fromkeys(e["path"] for e in reversed(self.events) if e["event"] == "checkpoint"))
        for path in paths[keep:]:
            shutil.rmtree(self.resolve(path), ignore_errors=True)

    def resolve(self, path: str) -> Path:
        """Checkpoint paths are stored relative to the run folder, so that a run can be moved."""
        return self.folder / path

    def last_good(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint whose files are whole; says so when it has to go back past a damaged one."""
        seen: set[str] = set()
        damaged = ""
        for event in reversed(self.events):
            if event["event"] != "checkpoint" or event["path"] in seen:
                continue
            seen.add(event["path"])
            folder = self.resolve(event["path"])
            if not folder.exists() and damaged == "" and len(seen) > 1:
                continue  # an older one that was deleted on purpose
            if wrong := verified(folder):
                warn(f"checkpoint {event['path']} is damaged ({wrong}); falling back to the one before")
                damaged = wrong
                continue
            return Checkpoint(Position(event["phase"], event["step"]), event["path"], event["state"])
        if damaged:
            warn("no undamaged checkpoint is left: starting this run from its beginning")
        return None

    def close(self) -> None:
        self._file.close()
        self._lock.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stored_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run that may be at work right now: read only, no lock."""
    path = folder / "journal.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in reversed(lines):
        if '"checkpoint"' in line and line.endswith("}"):
            place = folder / json.loads(line)["path"]
            if not verified(place):
                return place
    return None


def set_aside(folder: Path) -> Path:
    """Rename a run folder to `<name>.old-N`: starting anew never deletes anything."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    return folder.rename(target)


def run_folder(root: str, name: str) -> Path:
    return Path(root).expanduser() / checked_name(name, "run.name")
