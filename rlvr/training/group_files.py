"""Stores scored groups on disk, so that a killed run learns from the same ones again, to the bit.

A group is stored without its task, which the source makes again from a level and an index.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlvr.core.files import write_atomic
from rlvr.core.types import Branch, Outcome, Score, StopReason, Task, Trajectory

_PLAIN = [f.name for f in fields(Trajectory) if f.name not in ("task", "scores", "stop_reason", "branches")]


@dataclass
class StoredGroup:
    """A sampled group: its task (`level` and `index`), the version that sampled it, and its trajectories."""

    id: str
    level: str
    index: int
    version: int
    trajectories: list[Trajectory]


def write(path: Path, groups: Sequence[StoredGroup]) -> str:
    """Write the groups, synced; return the SHA-256 of the file."""
    content = json.dumps([_to_json(group) for group in groups], default=float).encode()
    write_atomic(path, content)
    return hashlib.sha256(content).hexdigest()


def read(path: Path, sha256: str, task: Any) -> list[StoredGroup]:
    """Read what `write` stored, with `task(level, index)` as the task of each; ValueError if the hash differs."""
    if wrong := find_file_damage(path, sha256):
        raise ValueError(f"{path} {wrong}")
    return [_from_json(group, task) for group in json.loads(path.read_bytes())]


def find_file_damage(path: Path, sha256: str) -> str:
    """What is wrong with the file, as the end of a sentence; '' if it has the hash."""
    try:
        actual = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if actual == sha256 else "does not have its recorded checksum"


def _to_json(group: StoredGroup) -> dict[str, Any]:
    return {
        **vars(group),
        "trajectories": [
            {
                **{name: getattr(t, name) for name in _PLAIN},
                "stop_reason": t.stop_reason.value if t.stop_reason else None,
                "branches": [vars(branch) for branch in t.branches],
                "scores": {name: {**vars(score), "outcome": score.outcome.value} for name, score in t.scores.items()},
            }
            for t in group.trajectories
        ],
    }


def _from_json(stored: dict[str, Any], task: Any) -> StoredGroup:
    of: Task = task(stored["level"], stored["index"])
    trajectories: list[Trajectory] = []
    for t in stored["trajectories"]:
        scores = {name: Score(**{**s, "outcome": Outcome(s["outcome"])}) for name, s in t["scores"].items()}
        stop = StopReason(t["stop_reason"]) if t["stop_reason"] else None
        branches = [Branch(**branch) for branch in t.get("branches", ())]
        given = {**t, "scores": scores, "stop_reason": stop, "task": of, "branches": branches}
        trajectories.append(Trajectory(**given))
    return StoredGroup(stored["id"], stored["level"], stored["index"], stored["version"], trajectories)
