"""The run folder and its journal: what was done, what is safe on disk, and where to resume.

`journal.jsonl` is a write-ahead log, one synced line an event. A checkpoint counts once its line is there and its files
match their checksums. Whatever was done after it is done again with the same random draws, so the outcome is the same
to the bit; later metric rows are dropped.

    runs/<name>/resolved.yaml  metrics.jsonl  journal.jsonl  checkpoints/  rollouts/  evaluations/  curve.png
    runs/<name>/inflight/         (groups sampled and not yet learned from: `rlvr.training.schedules`)
    runs/<name>/environment.json  (salted hashes of the values that came from `${oc.env:...}`)
    runs/<name>/summary.json      (last: a run with a summary is finished)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rlvr.core.files import (
    CHECKSUMS,
    check_name,
    find_damage,
    lock_file,
    new_folder,
    read_json,
    remove_leftovers,
    write_atomic,
)
from rlvr.training.group_files import find_file_damage

# What may lie in a run folder before its `resolved.yaml` does: an attempt that was killed while it made the folder.
_BEGUN = re.compile(r"\.lock|environment\.json|\.(environment\.json|resolved\.yaml)\.[0-9a-f]+\.tmp")


REMOTE = "remote.json"
PARTS = ("checkpoints", "rollouts", "evaluations", "inflight")  # the folders of a run folder


class RunLockedError(ValueError):
    """Another process is working in this run folder."""


@dataclass(frozen=True)
class Position:
    """A place in a run: `step` steps of the phase numbered `phase` are done."""

    phase: int = 0
    step: int = 0

    def __lt__(self, other: Position) -> bool:
        return (self.phase, self.step) < (other.phase, other.step)


@dataclass(frozen=True)
class Checkpoint:
    """A safe point: where the run was, where the weights are, and all state that is not weights.

    `inflight` is the hash of the file of answers that belongs to it, '' where there is none. With a critic its
    weights are in a folder beside (`critic_of`).
    """

    position: Position
    path: str
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    inflight: str = ""
    has_critic: bool = False
    line: int = field(default=0, compare=False)  # of `journal.jsonl`, for messages


class Journal:
    """Locks a run folder and writes its journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in PARTS:
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(folder)
        for place in (folder, *(folder / part for part in PARTS)):
            remove_leftovers(place)
        try:
            self.events, whole = _events(folder)
        except ValueError:
            self._lock.close()
            raise
        path = folder / "journal.jsonl"
        if path.exists() and path.stat().st_size > whole:  # cut a torn line off so that the next one starts clean
            write_atomic(path, path.read_bytes()[:whole])
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, event: str, **details: Any) -> None:
        line = {"event": event, **details}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.events.append(line)

    def attempt(self, circumstances: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        """Record what this attempt computes with; warn if the run began with something else."""
        names = [event["event"] for event in self.events]
        saved = names.index("checkpoint") if "checkpoint" in names else 0  # earlier attempts left no checkpoint
        first = next((event for event in reversed(self.events[:saved]) if event["event"] == "run"), {})
        before = {key: first[key] for key, value in circumstances.items() if key in first and first[key] != value}
        if before:
            changes = ", ".join(f"{key} {was} (now {circumstances[key]})" for key, was in before.items())
            warn(f"this run began with {changes}: results are the same to the bit only if these stay the same")
        self.write("run", **circumstances)

    def checkpoint(self, checkpoint: Checkpoint, keep: int) -> None:
        """Record a saved checkpoint, then delete discarded ones and older ones beyond the last `keep`."""
        at = checkpoint.position
        self.resolve(checkpoint.path)
        more: dict[str, Any] = {"inflight": checkpoint.inflight} if checkpoint.inflight else {}
        more |= {"critic": True} if checkpoint.has_critic else {}
        self.write("checkpoint", phase=at.phase, step=at.step, path=checkpoint.path, state=checkpoint.state, **more)
        remaining = {event["path"] for event in _standing(self.events)[:keep]}
        for path in {e["path"] for e in self.events if e["event"] in ("checkpoint", "discarded")} - remaining:
            shutil.rmtree(self.resolve(path), ignore_errors=True)
            shutil.rmtree(self.resolve(critic_of(path)), ignore_errors=True)
            self.inflight(path).unlink(missing_ok=True)

    def reopen(self, position: Position, name: str) -> None:
        """Add a checkpoint `name` at `position`, with the state that a run ended with: more steps follow."""
        newest = _standing(self.events)[0]
        path = f"checkpoints/{name}"
        for old, new in ((newest["path"], path), (critic_of(newest["path"]), critic_of(path))):
            if self.resolve(old).exists() and not self.resolve(new).exists():
                with new_folder(self.resolve(new)) as place:
                    shutil.copytree(
                        self.resolve(old), place, dirs_exist_ok=True, ignore=shutil.ignore_patterns(CHECKSUMS)
                    )
        details = {key: value for key, value in newest.items() if key != "event"}
        self.write("checkpoint", **details | {"phase": position.phase, "step": position.step, "path": path})

    def finish(self) -> None:
        """Record the end of the run, and delete the groups in flight of its checkpoints: no resume follows."""
        self.write("finished")
        for file in (self.folder / "inflight").iterdir():
            file.unlink()

    def delete_unstarted(self) -> None:
        """Delete the folder of a run that could not be built, unless an attempt began in it or it holds more files."""
        known = {"resolved.yaml", "environment.json", "journal.jsonl", ".lock", *PARTS}
        if self.events or {entry.name for entry in self.folder.iterdir()} - known:
            return
        if not any(file for part in PARTS for file in (self.folder / part).iterdir()):
            shutil.rmtree(self.folder)

    def inflight(self, path: str) -> Path:
        """The file of the groups in flight that belong to a checkpoint."""
        return self.folder / "inflight" / f"{Path(path).name}.json"

    @property
    def resumable_positions(self) -> list[Position]:
        """The positions that a resume could go on from, newest first: it takes the first that is not damaged."""
        there = (e for e in _standing(self.events) if self.resolve(e["path"]).exists())
        return [Position(event["phase"], event["step"]) for event in there]

    def resolve(self, path: str) -> Path:
        """The full path of a checkpoint; stored paths are relative to the run folder, so a run can be moved."""
        if problem := _outside(self.folder, path):
            raise ValueError(problem)
        return self.folder / path

    def last_good(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest undamaged checkpoint. Warn about newer, damaged ones and record them as discarded."""
        damaged = False
        for number, event in enumerate(_standing(self.events)):
            folder = self.resolve(event["path"])
            wrong = find_damage(folder)
            if not wrong and (sha256 := event.get("inflight")):
                wrong = find_file_damage(self.inflight(event["path"]), sha256)
            if not wrong and event.get("critic"):
                wrong = find_damage(self.resolve(critic_of(event["path"])))
            if not wrong:
                line = 1 + next(i for i, other in enumerate(self.events) if other is event)
                at, critic = Position(event["phase"], event["step"]), bool(event.get("critic"))
                return Checkpoint(at, event["path"], event["state"], event.get("inflight", ""), critic, line)
            if number == 0 or os.path.exists(folder):  # an older one that is missing was deleted on purpose
                warn(f"checkpoint {event['path']} is damaged ({wrong}); falling back to the one before")
                self.write("discarded", path=event["path"], why=wrong)
                damaged = True
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


def critic_of(path: str) -> str:
    """The place of the critic that belongs to a checkpoint."""
    return f"{path}-critic"


def lock_folder(folder: Path) -> IO[str]:
    """Lock a run folder until the file is closed; RunLockedError if another process has it."""
    lock = lock_file(folder / ".lock")
    if lock is None:
        raise RunLockedError(
            f"run folder {folder} is in use by another process; wait for it, or choose another run.name"
        )
    return lock


def _events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """All whole events, and their size in bytes. Only the last line may be incomplete; any other is an error."""
    path = folder / "journal.jsonl"
    lines = (path.read_bytes() if path.exists() else b"").split(b"\n")
    if not lines[-1]:
        lines.pop()
        whole = len(lines)
    else:
        whole = len(lines) - 1  # what follows the last newline was never finished
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:whole], 1):
        where = f"{path}, line {number}"
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):  # after a power cut the last line may hold zeros although its newline is there
                break
            raise ValueError(
                f"{where}: not JSON: {line[:60]!r}. A crash does not do this; restore the line, or delete it to go on "
                "without it"
            ) from None
        if not isinstance(event, dict) or "event" not in event:
            raise ValueError(f"{where}: not an event: {line[:60]!r}; delete the line")
        if event["event"] in ("checkpoint", "discarded") and (problem := _outside(folder, event.get("path"))):
            raise ValueError(f"{where}: {problem}; delete the line")
        if event["event"] == "checkpoint" and (problem := _unusable(event)):
            raise ValueError(f"{where}: {problem}; delete the line to go on from the checkpoint before")
        events.append(event)
    return events, sum(len(line) + 1 for line in lines[: len(events)])


def _outside(folder: Path, path: Any) -> str:
    """'' if a path of the journal is inside the run's `checkpoints`, else what is wrong with it."""
    home = (folder / "checkpoints").resolve()
    try:
        if isinstance(path, str) and home in (folder / path).resolve().parents:
            return ""
    except (OSError, ValueError, RuntimeError):  # zero bytes in it, or a circle of links
        pass
    return f"checkpoint path {path!r:.80} does not lie inside {folder / 'checkpoints'}"


def _unusable(event: Mapping[str, Any]) -> str:
    """'' if a checkpoint line has a position and a state, else what is wrong."""
    for name in ("phase", "step"):
        if type(event.get(name)) is not int or not 0 <= event[name] < 2**63:
            return f"checkpoint without a {name}, a whole number from 0"
    if not isinstance(event.get("inflight", ""), str):
        return f"checkpoint whose groups in flight have the hash {event['inflight']!r:.40}, expected text"
    return "" if isinstance(event.get("state"), dict) else "checkpoint without a state"


def describe_mismatch(stored: Any, expected: Any, key: str = "state") -> str:
    """'' if a stored state has the keys and kinds of numbers of a new one, else what differs.

    A number that is null in a new state may be any finite one; others are at least 0. A list is one of tasks. An empty
    mapping may hold finite numbers by any name.
    """
    if isinstance(expected, Mapping):
        if not expected and isinstance(stored, dict):
            expected = dict.fromkeys(stored)
        if not isinstance(stored, dict) or stored.keys() != expected.keys():
            return f"{key} does not hold {', '.join(map(str, expected)) or 'nothing'}"
        problems = (describe_mismatch(stored[name], expected[name], f"{key}.{name}") for name in expected)
        return next(filter(None, problems), "")
    if isinstance(expected, list):
        tasks = stored if isinstance(stored, list) else [stored]
        fits = all(isinstance(t, list) and [*map(type, t)] == [str, int] and t[1] >= 0 for t in tasks)
        return "" if fits else f"{key} is {stored!r:.40}, expected a list of [level, index]"
    if expected is None and stored is None:
        return ""
    known = type(stored) in (int, float) and abs(stored) <= sys.float_info.max
    if not known or (expected is not None and stored < 0) or (type(expected) is int and type(stored) is not int):
        return f"{key} is {stored!r:.40}, expected a number like {expected}"
    return ""


def _standing(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The valid checkpoints, newest first: the last of each path, unless it was discarded since."""
    last: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["event"] in ("checkpoint", "discarded"):
            last.pop(event["path"], None)
            last[event["path"]] = event
    return [event for event in reversed(last.values()) if event["event"] == "checkpoint"]


def store_remote_path(folder: Path, path: str) -> None:
    """Make a checkpoint folder that holds the path of weights at a server (`tinker://...`)."""
    with new_folder(folder) as place:
        (place / REMOTE).write_text(json.dumps({"path": path}))


def weights_path(folder: Path) -> str:
    """Where the weights of a checkpoint are: its folder, or the path at the server that `store_remote_path` wrote
    down."""
    if not (folder / REMOTE).exists():
        return str(folder)
    path = read_json(folder / REMOTE, "the path of weights that a server keeps").get("path")
    if not isinstance(path, str) or "://" not in path:
        raise ValueError(
            f"{folder / REMOTE}: path={path!r:.80}, expected weights at a server, such as tinker://run/weights/name"
        )
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that the journal of a run has, newest first. Older ones may be deleted, any may be damaged."""
    return [folder / event["path"] for event in _standing(_events(folder)[0])]


def newest_checkpoint(folder: Path, report: Callable[[str], None] = lambda text: None) -> Path | None:
    """The newest undamaged checkpoint of a run, which may be running: only reads, without a lock.

    `report` is called with the damage of each newer checkpoint.
    """
    for place in list_checkpoints(folder):
        if not (wrong := find_damage(place)):
            return place
        report(f"checkpoint {place} is damaged ({wrong})")
    return None


def has_no_progress(folder: Path) -> bool:
    """Whether a run folder has neither a checkpoint nor a metric row yet."""
    rows = folder / "metrics.jsonl"
    return newest_checkpoint(folder) is None and not (rows.exists() and rows.stat().st_size)


def read_stop_reason(folder: Path) -> str:
    """Why the last attempt stopped by itself; "" if it did not, or if the journal is damaged."""
    try:
        events, _ = _events(folder)
    except (ValueError, OSError):
        return ""
    return str(events[-1].get("reason", "")) if events and events[-1]["event"] == "stopped" else ""


def move_aside(folder: Path) -> Path:
    """Rename a run folder to `<name>.old-N`, unless a process works in it: starting anew never deletes anything."""
    with lock_folder(folder):
        number = 1
        while (target := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        return folder.rename(target)


def holds_other_files(folder: Path) -> bool:
    """Whether `folder` holds files that are not of a run."""
    if not folder.exists() or (folder / "resolved.yaml").exists():
        return False
    return any(not _BEGUN.fullmatch(entry.name) for entry in folder.iterdir())


def environment_values(values: Any, raw: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every config value that depends on the environment (`${oc.env:...}`)."""
    if isinstance(values, Mapping) and isinstance(raw, Mapping):
        for name, value in values.items():
            yield from environment_values(value, raw.get(name), f"{key}.{name}" if key else str(name))
    elif isinstance(values, list) and isinstance(raw, list):
        for number, pair in enumerate(zip(values, raw, strict=True)):
            yield from environment_values(*pair, f"{key}[{number}]")
    elif isinstance(raw, str) and raw != (values.replace("${", r"\${") if isinstance(values, str) else values):
        yield key, values


def store_environment(folder: Path, values: Mapping[str, Any]) -> None:
    """Store salted hashes of values from the environment, by dotted key, so they can be compared and not read."""
    salt = secrets.token_hex(16)
    hashes = {key: _hash(value, salt) for key, value in values.items()}
    write_atomic(folder / "environment.json", json.dumps({"salt": salt, "hashes": hashes}, indent=2))


def changed_environment(folder: Path, values: Mapping[str, Any]) -> list[str]:
    """The keys whose values from the environment differ from those that `store_environment` stored."""
    path = folder / "environment.json"
    if not path.exists():
        return []
    remedy = "delete it to go on unchecked"
    stored = read_json(path, "hashes of what came from the environment", remedy)
    salt, hashes = stored.get("salt"), stored.get("hashes")
    if not isinstance(salt, str) or not isinstance(hashes, dict):
        raise ValueError(f"{path}: damaged; {remedy}")
    return [key for key, value in values.items() if key in hashes and hashes[key] != _hash(value, salt)]


def _hash(value: Any, salt: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", repr(value).encode(), salt.encode(), 100_000).hex()


def run_folder(root: str, name: str) -> Path:
    return Path(root).expanduser() / check_name(name, "run.name")
