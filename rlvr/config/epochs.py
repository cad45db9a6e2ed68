"""How long a run trains: `training.steps`, or `training.epochs`, from which the steps follow.

Of the two the one of the higher rank counts: the command line before a file, a user's file before a shipped one. Once
the tasks are counted, `rlvr.runs.run_tasks.resolve_epochs` puts steps in the place of epochs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlvr.config.alias_values import rank
from rlvr.config.compose import LoadedConfig
from rlvr.config.interpolate import describe_origin

STEPS, EPOCHS = "training.steps", "training.epochs"


def choose_length(loaded: LoadedConfig) -> LoadedConfig:
    """The config with steps or epochs, not both; ValueError, naming both, if they have the same rank."""
    training = loaded.values.get("training")
    if not isinstance(training, Mapping) or None in (training.get("steps"), training.get("epochs")):
        return loaded
    origins = {key: loaded.origin.get(key, loaded.origin.get("training", "")) for key in (STEPS, EPOCHS)}
    if rank(origins[STEPS]) == rank(origins[EPOCHS]):
        said = [
            f"{loaded.typed.get(key, key)}={json.dumps(training[key.partition('.')[2]])}{describe_origin(origin)}"
            for key, origin in origins.items()
        ]
        raise ValueError(f"{' and '.join(said)} both say how long to train; leave one of them out")
    weaker = min(origins, key=lambda key: rank(origins[key]))
    return set_length(loaded, {weaker: None})


def set_length(loaded: LoadedConfig, changes: Mapping[str, int | None]) -> LoadedConfig:
    """The composed config with these keys set, or left out (None)."""

    def change(values: dict[str, Any]) -> dict[str, Any]:
        training = dict(values.get("training") or {})
        for key, value in changes.items():
            training.pop(key.partition(".")[2], None)
            if value is not None:
                training[key.partition(".")[2]] = value
        return {**values, "training": training}

    return replace(loaded, values=change(loaded.values), raw=change(loaded.raw))
