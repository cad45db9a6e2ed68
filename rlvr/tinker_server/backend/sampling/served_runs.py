"""Training runs as models to sample from: always the newest whole checkpoint, also while the run trains.

    place = Path("runs/mine")                   # a run, its `checkpoints/best`, or one of its checkpoints
    base = base_of_run(place, "auto", "auto")   # what an engine is built on: `Engine(base.load())`
    weights = RunWeights(place, engine)
    snapshot = weights.newest()                 # read again when the run has a newer checkpoint

A request keeps the snapshot that it began with. Earlier ones are dropped when no request needs them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr.clients.local_engine import BUILT_TOKENIZERS, base_names, plan_model
from rlvr.config import load
from rlvr.core.files import find_damage
from rlvr.core.weights_place import SETTINGS, find_run, is_model
from rlvr.runs.assembly import assemble, client_request
from rlvr.runs.weights import read_run
from rlvr.tinker_server.protocol.errors import ServerError
from rlvr.training.best_checkpoint import BEST, resolve_best
from rlvr.training.initial_weights import newest_weights
from rlvr.training.journal import list_checkpoints, weights_path

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine
    from rlvr.engine.policy import Snapshot

log = logging.getLogger(__name__)
IN_MEMORY = 3  # checkpoints of one run: the newest, and earlier ones that requests still sample from
_UNREADABLE = (OSError, ValueError, RuntimeError)  # the last is torch's, for memory that is used up among others
Stamp = tuple[int, int, int] | None


@dataclass(frozen=True)
class BaseOfRun:
    """What a run's checkpoints are loaded on. Runs with the same `key` share an engine."""

    key: str
    load: Callable[[], Any]


def is_followed(place: Path) -> bool:
    """Whether a folder is served as a run. A checkpoint with all weights is a model like any other."""
    return find_run(place) is not None and (place.name == BEST or not is_model(place))


def base_of_run(place: Path, device: str, dtype: str) -> BaseOfRun:
    """What a run's checkpoints are loaded on; ValueError without a checkpoint, or if a server keeps the weights."""
    run, newest = find_run(place), newest_weights(str(place), "--model")
    assert run is not None
    if "://" in (path := weights_path(newest)):
        raise ValueError(f"--model {place}: its weights are kept by a server, as {path}; sample from them there")
    if is_model(newest):
        from rlvr.engine.model_loading import load_model
        from rlvr.engine.tokenizer import load_tokenizer

        def load_newest() -> Any:
            folder = str(newest_weights(str(place), "--model"))
            return load_model(folder, load_tokenizer(folder), device=device, dtype=dtype)

        return BaseOfRun(f"{run.resolve()}: all weights", load_newest)
    if wrong := find_damage(newest):
        raise ValueError(f"--model {place}: checkpoint {newest} is damaged or missing ({wrong}); give another one")
    config = read_run(run)
    # The tasks are read only where the tokenizer is made of their words.
    source: Any = assemble(config).source if config.model.tokenizer in BUILT_TOKENIZERS else None
    request = client_request(config, source)
    request = replace(request, model=replace(request.model, device=device, dtype=dtype))
    name, tokenizer = base_names(request)
    if name and tokenizer == name:
        place = Path(name).expanduser()
        return BaseOfRun(str(place.resolve()) if place.exists() else name, lambda: plan_model(request).load())
    return BaseOfRun(f"{run.resolve()}: base", lambda: plan_model(request).load())


class RunWeights:
    """The weights of one run. Thread-safe; reading a checkpoint does not stop requests for the one before.

    A checkpoint that could not be read is tried again after `retry_seconds`: its disk or memory may be back.
    """

    retry_seconds = 30.0

    def __init__(self, place: Path, engine: Engine) -> None:
        run = find_run(place)
        assert run is not None
        self.place, self._run, self._engine = place, run, engine
        self._watched = run / "journal.jsonl" if place == run else place.parent / f"{BEST}.json"
        self._base = _describe_base(run)
        self._current: Snapshot | None = None
        self._read: tuple[Path, Stamp] | None = None  # where `_current` is from
        self._looked_at: Stamp = None
        self._retry_at = math.inf  # by the monotonic clock; never unless something could not be read
        self._alive: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._lock = threading.Lock()

    def newest(self) -> Snapshot:
        """The weights of the newest whole checkpoint; ServerError if none could be read yet."""
        stamp, is_first = _stamp(self._watched), self._current is None
        is_due = is_first or stamp != self._looked_at or time.monotonic() >= self._retry_at
        if is_due and self._lock.acquire(blocking=is_first):
            try:
                if len(self._alive) < IN_MEMORY:  # else it looks again with a later request
                    is_read = self._refresh()
                    self._retry_at = math.inf if is_read else time.monotonic() + self.retry_seconds
                    self._looked_at = stamp
            finally:
                self._lock.release()
        if self._current is None:
            raise ServerError(
                f"{self.place.name}: no complete checkpoint is there; the server's log says what is wrong"
            )
        return self._current

    def _refresh(self) -> bool:
        """Whether the newest checkpoint is the one that is served now."""
        try:
            folders = list_checkpoints(self._run) if self.place == self._run else [resolve_best(self.place)]
            if _describe_base(self._run) != self._base:
                raise ValueError("another run is in this folder now, with another model; start the server again")
        except _UNREADABLE as error:
            log.warning("%s: %s", self.place, error)
            return False
        for place, folder in enumerate(folders):
            origin = folder, _stamp(folder / "checksums.json")
            if self._current is not None and origin == self._read:
                return place == 0
            try:
                self._current, self._read = self._load(folder), origin
            except _UNREADABLE as error:
                log.warning("%s: %s; an older checkpoint is served", self.place, error)
                continue
            self._alive.add(self._current)
            log.info("%s: %s is served", self.place, self._current.fingerprint)
            return place == 0
        return False

    def _load(self, folder: Path) -> Snapshot:
        if not folder.is_dir():
            raise ValueError(f"checkpoint {folder} was deleted")
        if is_model(folder):
            policies = self._engine.policies
            policy = next(iter(policies.values())) if policies else self._engine.create_policy("all weights")
            snapshot = self._engine.load_weights(folder, policy)
        else:
            if wrong := find_damage(folder):  # the engine takes adapters without checksums too, from elsewhere
                raise ValueError(f"checkpoint {folder} is damaged: {wrong}; give another one")
            snapshot = self._engine.load_snapshot(folder)
        snapshot.fingerprint = f"{self._run.name}/{folder.name}@{snapshot.fingerprint.rpartition('@')[2]}"
        return snapshot


def _describe_base(run: Path) -> tuple[Any, Any]:
    """The model that a run trains; with a seed, its random weights too."""
    values = load(None, str(run / SETTINGS), []).values
    return values.get("model"), values.get("seed")


def _stamp(path: Path) -> Stamp:
    """Differs when a file was written or replaced; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
