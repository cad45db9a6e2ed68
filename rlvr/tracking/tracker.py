"""What a tracker is: one more destination of the metrics of a run, and its options."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from rlvr.core.files import write_atomic
from rlvr.core.types import Trajectory
from rlvr.core.variants import Variant

Status = Literal["FINISHED", "KILLED", "FAILED"]  # MLflow's words
# Whole words between underscores: `key` and `token` as the last one, so neither `max_tokens` nor `key_points`.
_SECRET_KEY = re.compile(
    r"(?:^|_)(?:(?:api)?keys?(?:_?\d+)?$|(?:(?:api|auth|access)_?tokens|token)(?:_?\d+)?$"
    r"|(?:secrets?|passwords?|passwd|passphrase|pwd|credentials?|authorization)(?:_|$))"
)
_FILE_ADDRESS = re.compile(r"file:|[a-z][a-z0-9+.-]*:///", re.I)  # on this machine, as `sqlite:///rlvr.db`


@dataclass(frozen=True)
class MetricRow:
    """The metrics of one step of a phase; `time` is in seconds since 1970.

    The last row of a run is of the phase `summary`; it has the whole content of `summary.json` beside its numbers.
    """

    phase: str
    step: int
    time: float
    metrics: Mapping[str, float]
    summary: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Tracker(Protocol):
    """One destination of metrics. Any method may raise: `Trackers` then tries again later."""

    name: str
    interval: float  # seconds between two calls of `write`; 0 for at once

    def begin(self, kept: Sequence[MetricRow]) -> None:
        """Open the destination. `kept` are the rows of earlier attempts that still stand; later ones will be redone."""
        ...

    def write(self, rows: Sequence[MetricRow]) -> None: ...

    def close(self, status: Status) -> None: ...


@runtime_checkable
class Recorder(Tracker, Protocol):
    """A tracker that also gets the completions of each step, before the step's metrics."""

    def keep(self, step: int, trajectories: Sequence[Trajectory]) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows. `config` is the content of `resolved.yaml`; trackers show it by `mask_settings`.

    `say` takes where a tracker shows the run, `warn` what went wrong.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    warn: Callable[[str], None] = print
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class TrackerOptions(Variant):
    """The options of a tracker. A new one is a class with `open` and its entry in `TRACKERS`.

    `switch` is a key of the section `tracking` that asks for it too; the flat keys of its options stand beside that.
    """

    kind = "tracker"
    section = "tracking"
    switch: ClassVar[str] = ""

    @classmethod
    def place(cls) -> str:
        return "trackers"

    def open(self, run: TrackedRun) -> Tracker:
        """The tracker of a run. ValueError for what is not installed or cannot be; it connects to nothing."""
        raise NotImplementedError


class RunMemory:
    """Remembers in a file of the run folder which run of a tracker it is, so that a resumed attempt continues that one.

    With another config in the same folder it remembers none. The config itself is not stored.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path = path
        self._fingerprint = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()

    def read(self) -> str | None:
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            return str(stored["run_id"]) if stored["config"] == self._fingerprint else None
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or not what was written there
            return None

    def store(self, run_id: str) -> None:
        write_atomic(self._path, json.dumps({"run_id": run_id, "config": self._fingerprint}))


def without_passwords(text: str) -> str:
    """`http://user:password@host/x?key=1` as `http://***@host/x?***`. A password may have a slash."""

    def mask(address: re.Match[str]) -> str:
        if re.search("[?#].*@", address[1]):  # either may be a password's
            return "://***"
        return "://" + re.sub("[?#].+", "?***", re.sub("^(?:[^/:]*:.*|[^/]*)@", "***@", address[1]))

    return re.sub(r"://(\S+)", mask, text)


def mask_settings(value: Any) -> Any:
    """The settings of a run as others may read them: without secrets, and without the folders of this machine.

    A value under a key that names a secret (`api_key`, `hf_token`, `password`) is `***`, unless it is a whole
    `${oc.env:NAME}`. Addresses lose user and query, local paths all but their last part.
    """
    if isinstance(value, Mapping):
        return {key: "***" if _is_secret(str(key), v) else mask_settings(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask_settings(child) for child in value]
    if not isinstance(value, str):
        return value
    is_path = "://" not in value and (value.startswith(("/", "~")) or ".." in value.split("/"))
    if is_path or _FILE_ADDRESS.match(value):
        return f".../{Path(without_passwords(value)).name}"
    return without_passwords(value)


def _is_secret(key: str, value: Any) -> bool:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-.\s]", "_", key).lower()
    is_shown = value is None or isinstance(value, bool) or re.fullmatch(r"\$\{oc\.env:\w+\}", str(value))
    return not is_shown and _SECRET_KEY.search(words) is not None
