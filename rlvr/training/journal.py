"""The run folder and its memory: what was done, what is safe on disk, and where to go on.

`journal.jsonl` is written ahead of everything that depends on it, one synced line an event. A checkpoint counts once
its line is there and its files have their checksums; whatever was done after the last such checkpoint is done again
from the start of that step, with the same draws, so the outcome is the same bits. Metric rows beyond it are dropped.

    runs/<name>/resolved.yaml  metrics.jsonl  journal.jsonl  checkpoints/  rollouts/  evaluations/  curve.png
    runs/<name>/inflight/         (answers that a pipelined run has not learned from yet: `rlvr.training.pipelined`)
    runs/<name>/environment.json  (salted hashes of the values that came from `${oc.env:...}`)
    runs/<name>/summary.json      (last: a run with a summary is finished)
"""

from __future__ import annotations

import fcntl
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

from rlvr.files import checked_name, new_folder, read_json, remove_leftovers, verified, write_atomic
from rlvr.training.payload import damaged as damaged_file

# What may lie in a run folder before its `resolved.yaml` does: an attempt that was killed while it made the folder.
_BEGUN = re.compile(r"\.lock|environment\.json|\.(environment\.json|resolved\.yaml)\.[0-9a-f]+\.tmp")


REMOTE = "remote.json"
PARTS = ("checkpoints", "rollouts", "evaluations", "inflight")  # the folders of a run folder


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
    """A safe point: where the run was, where the weights are, and all state that is not weights.

    `inflight` is the hash of the file of answers that belongs to it, '' where there is none.
    """

    position: Position
    path: str
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    inflight: str = ""
    line: int = field(default=0, compare=False)  # of `journal.jsonl`, for messages


class Journal:
    """One process's hold on a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in PARTS:
            (folder / part).mkdir(parents=True, exist_ok=True)
        self._lock = locked(folder)
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
        """Note what this attempt computes with; say so where a resumed run started with something else."""
        names = [event["event"] for event in self.events]
        saved = names.index("checkpoint") if "checkpoint" in names else 0  # what came before left nothing to go on from
        first = next((event for event in reversed(self.events[:saved]) if event["event"] == "run"), {})
        before = {key: first[key] for key, value in circumstances.items() if key in first and first[key] != value}
        if before:
            told = ", ".join(f"{key} {was} (now {circumstances[key]})" for key, was in before.items())
            warn(f"this run began with {told}: it has the same bits as an undisturbed one only with the same of each")
        self.write("run", **circumstances)

    def checkpoint(self, checkpoint: Checkpoint, keep: int) -> None:
        """Make a saved checkpoint count, then delete discarded ones and older ones beyond the last `keep`."""
        at = checkpoint.position
        self.resolve(checkpoint.path)
        more = {"inflight": checkpoint.inflight} if checkpoint.inflight else {}
        self.write("checkpoint", phase=at.phase, step=at.step, path=checkpoint.path, state=checkpoint.state, **more)
        kept = {event["path"] for event in _standing(self.events)[:keep]}
        for path in {e["path"] for e in self.events if e["event"] in ("checkpoint", "discarded")} - kept:
            shutil.rmtree(self.resolve(path), ignore_errors=True)
            self.inflight(path).unlink(missing_ok=True)

    def inflight(self, path: str) -> Path:
        """The file of the answers in flight that belong to a checkpoint."""
        return self.folder / "inflight" / f"{Path(path).name}.json"

    @property
    def oldest_kept(self) -> Position:
        """Where a run could have to go on from, should every checkpoint after the oldest one kept be damaged."""
        there = [e for e in _standing(self.events) if self.resolve(e["path"]).exists()]
        return Position(there[-1]["phase"], there[-1]["step"]) if there else Position()

    def resolve(self, path: str) -> Path:
        """Checkpoint paths are stored relative to the run folder, so that a run can be moved."""
        if problem := _outside(self.folder, path):
            raise ValueError(problem)
        return self.folder / path

    def last_good(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint whose files are whole. One that is not is named and discarded: it counts no more."""
        damaged = False
        for number, event in enumerate(_standing(self.events)):
            folder = self.resolve(event["path"])
            wrong = verified(folder)
            if not wrong and (sha256 := event.get("inflight")):
                wrong = damaged_file(self.inflight(event["path"]), sha256)
            if not wrong:
                line = 1 + next(i for i, other in enumerate(self.events) if other is event)
                at = Position(event["phase"], event["step"])
                return Checkpoint(at, event["path"], event["state"], event.get("inflight", ""), line)
            if number == 0 or os.path.exists(folder):  # an older one that is not there was deleted on purpose
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


def locked(folder: Path) -> IO[str]:
    """The hold on a run folder, until the file is closed; RunLocked where another process has it."""
    lock = open(folder / ".lock", "w")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RunLocked(
            f"run folder {folder} is in use by another process; wait for it, or choose another run.name"
        ) from error
    return lock


def _events(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """All whole events, and how many bytes they take. Only the last line may be torn; any other is an error."""
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
                f"{where}: not JSON: {line[:60]!r}. Something else than a crash damaged this file; restore the line, "
                "or delete it to go on from what the others say"
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
    """'' if a journalled path is a place inside the run's `checkpoints`, else what is wrong with it."""
    home = (folder / "checkpoints").resolve()
    try:
        if isinstance(path, str) and home in (folder / path).resolve().parents:
            return ""
    except (OSError, ValueError, RuntimeError):  # no path at all (zero bytes), or links that lead in a circle
        pass
    return f"checkpoint path {path!r:.80} does not lie inside {folder / 'checkpoints'}"


def _unusable(event: Mapping[str, Any]) -> str:
    """'' if a journalled checkpoint has a position and a state, else what is wrong."""
    for name in ("phase", "step"):
        if type(event.get(name)) is not int or not 0 <= event[name] < 2**63:
            return f"checkpoint without a {name}, a whole number from 0"
    if not isinstance(event.get("inflight", ""), str):
        return f"checkpoint whose answers in flight have the hash {event['inflight']!r:.40}, expected text"
    return "" if isinstance(event.get("state"), dict) else "checkpoint without a state"


def unlike(found: Any, wanted: Any, key: str = "state") -> str:
    """'' if a stored state has the keys of a fresh one and numbers of its kinds, else what differs.

    A number that a fresh state does not know yet (null) may be any finite one; others are at least 0.
    """
    if isinstance(wanted, Mapping):
        if not isinstance(found, dict) or found.keys() != wanted.keys():
            return f"{key} does not hold {', '.join(map(str, wanted)) or 'nothing'}"
        return next((told for name in wanted if (told := unlike(found[name], wanted[name], f"{key}.{name}"))), "")
    if wanted is None and found is None:
        return ""
    known = type(found) in (int, float) and abs(found) <= sys.float_info.max
    if not known or (wanted is not None and found < 0) or (type(wanted) is int and type(found) is not int):
        return f"{key} is {found!r:.40}, expected a number like {wanted}"
    return ""


def _standing(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The checkpoints that count, newest first: the last of each path, unless it was discarded since."""
    last: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["event"] in ("checkpoint", "discarded"):
            last.pop(event["path"], None)
            last[event["path"]] = event
    return [event for event in reversed(last.values()) if event["event"] == "checkpoint"]


def keep_remote(folder: Path, path: str) -> None:
    """A checkpoint folder of ours for weights that a server keeps (`tinker://...`): it says where they are."""
    with new_folder(folder) as place:
        (place / REMOTE).write_text(json.dumps({"path": path}))


def weights_at(folder: Path) -> str:
    """Where the weights of a checkpoint are: its folder, or the path at the server that `keep_remote` wrote down."""
    if not (folder / REMOTE).exists():
        return str(folder)
    path = read_json(folder / REMOTE, "the path of weights that a server keeps").get("path")
    if not isinstance(path, str) or "://" not in path:
        raise ValueError(f"{folder / REMOTE}: {path!r:.80} is no path at a server, such as tinker://run/weights/name")
    return path


def stored_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run that may be at work right now: read only, no lock."""
    events, _ = _events(folder)
    return next((place for e in _standing(events) if not verified(place := folder / e["path"])), None)


def nothing_done(folder: Path) -> bool:
    """Whether a run folder has neither a checkpoint nor a metric row yet."""
    rows = folder / "metrics.jsonl"
    return stored_checkpoint(folder) is None and not (rows.exists() and rows.stat().st_size)


def set_aside(folder: Path) -> Path:
    """Rename a run folder that no process works in to `<name>.old-N`: starting anew never deletes anything."""
    with locked(folder):
        number = 1
        while (target := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        return folder.rename(target)


def holds_no_run(folder: Path) -> bool:
    """Whether `folder` holds something else than a run, a run that was only begun, or nothing."""
    if not folder.exists() or (folder / "resolved.yaml").exists():
        return False
    return any(not _BEGUN.fullmatch(entry.name) for entry in folder.iterdir())


def from_environment(values: Any, raw: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in a config that was not written as it is: `${oc.env:...}` had a part in it."""
    if isinstance(values, Mapping) and isinstance(raw, Mapping):
        for name, value in values.items():
            yield from from_environment(value, raw.get(name), f"{key}.{name}" if key else str(name))
    elif isinstance(values, list) and isinstance(raw, list):
        for number, pair in enumerate(zip(values, raw, strict=True)):
            yield from from_environment(*pair, f"{key}[{number}]")
    elif isinstance(raw, str) and raw != (values.replace("${", r"\${") if isinstance(values, str) else values):
        yield key, values


def keep_environment(folder: Path, values: Mapping[str, Any]) -> None:
    """Store values that came from the environment, by dotted key, so that they can be compared and not read."""
    salt = secrets.token_hex(16)
    hashes = {key: _hashed(value, salt) for key, value in values.items()}
    write_atomic(folder / "environment.json", json.dumps({"salt": salt, "hashes": hashes}, indent=2))


def changed_environment(folder: Path, values: Mapping[str, Any]) -> list[str]:
    """The keys whose values from the environment are not those that `keep_environment` stored."""
    path = folder / "environment.json"
    if not path.exists():
        return []
    remedy = "delete it to go on unchecked"
    stored = read_json(path, "hashes of what came from the environment", remedy)
    salt, hashes = stored.get("salt"), stored.get("hashes")
    if not isinstance(salt, str) or not isinstance(hashes, dict):
        raise ValueError(f"{path}: not what was written there; {remedy}")
    return [key for key, value in values.items() if key in hashes and hashes[key] != _hashed(value, salt)]


def _hashed(value: Any, salt: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", repr(value).encode(), salt.encode(), 100_000).hex()


def run_folder(root: str, name: str) -> Path:
    return Path(root).expanduser() / checked_name(name, "run.name")
