"""Groups of scored answers on disk, so that a killed run learns from the same ones again: exact, and whole or absent.

A group is stored without its task, which its source makes again from a level and an index. Floats are written so that
they read back to the same bits. Exercised by `python -m pytest tests/test_pipelined_completion.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlvr.files import write_atomic
from rlvr.types import Outcome, Score, StopReason, Task, Trajectory

_PLAIN = [f.name for f in fields(Trajectory) if f.name not in ("task", "scores", "stop_reason")]


@dataclass
class Answers:
    """A group of a batch: which task it answers (a `level` and an `index`), by which version, and with what."""

    id: str
    level: str
    index: int
    version: int
    trajectories: list[Trajectory]


def write(path: Path, groups: Sequence[Answers]) -> str:
    """Store them, synced; the SHA-256 of the file."""
    content = json.dumps([_to_json(group) for group in groups], default=float).encode()
    write_atomic(path, content)
    return hashlib.sha256(content).hexdigest()


def read(path: Path, sha256: str, task: Any) -> list[Answers]:
    """What `write` stored, with `task(level, index)` for each; ValueError where the file has another hash."""
    if wrong := damaged(path, sha256):
        raise ValueError(f"{path}: {wrong}")
    return [_from_json(group, task) for group in json.loads(path.read_bytes())]


def damaged(path: Path, sha256: str) -> str:
    """'' if the file is there as it was stored, else what is wrong."""
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "" if found == sha256 else "does not have its recorded checksum"


def _to_json(group: Answers) -> dict[str, Any]:
    return {
        "id": group.id,
        "level": group.level,
        "index": group.index,
        "version": group.version,
        "trajectories": [
            {
                **{name: getattr(t, name) for name in _PLAIN},
                "stop_reason": t.stop_reason.value if t.stop_reason else None,
                "scores": {name: {**vars(score), "outcome": score.outcome.value} for name, score in t.scores.items()},
            }
            for t in group.trajectories
        ],
    }


def _from_json(stored: dict[str, Any], task: Any) -> Answers:
    of: Task = task(stored["level"], stored["index"])
    trajectories: list[Trajectory] = []
    for t in stored["trajectories"]:
        scores = {name: Score(**{**s, "outcome": Outcome(s["outcome"])}) for name, s in t["scores"].items()}
        stop = StopReason(t["stop_reason"]) if t["stop_reason"] else None
        trajectories.append(Trajectory(**{**t, "scores": scores, "stop_reason": stop, "task": of}))
    return Answers(stored["id"], stored["level"], stored["index"], stored["version"], trajectories)
