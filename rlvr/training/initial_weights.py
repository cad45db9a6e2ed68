"""Resolves `model.start_from`: the weights that a run starts from instead of the model's own.

Of a run folder, its newest whole checkpoint; `RUN/checkpoints/best` is the best one; anything else is what it says it
is. The clients check what they find (`rlvr.clients.local_engine`, `rlvr.clients.tinker`).
"""

from __future__ import annotations

from pathlib import Path

from rlvr.core.weights_place import CHECKPOINTS, find_run
from rlvr.training.journal import newest_checkpoint, weights_path


def resolve_start(given: str) -> str:
    """The folder of the weights, or their path at a server; of a run or checkpoint, the path it wrote down."""
    return given if "://" in given else weights_path(newest_weights(given, "model.start_from"))


def newest_weights(given: str, key: str) -> Path:
    """The newest undamaged checkpoint of a run folder, else the folder itself, or the best one for `checkpoints/best`;
    `key` is for messages."""
    place = Path(given).expanduser()
    if place.parent.name == CHECKPOINTS:
        from rlvr.training.best_checkpoint import resolve_best  # here: it takes a tenth of a second

        place = resolve_best(place)
    if find_run(place) != place:
        return place
    newest = newest_checkpoint(place)
    if newest is None:
        raise ValueError(f"{key}={given!r}: this run has no checkpoint yet")
    return newest
