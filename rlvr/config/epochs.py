"""How long a run trains: `training.steps`, or `training.epochs`, from which the steps follow.

Of the two the one of the higher rank counts: the command line before a file, a user's file before a shipped one.
`resolve_epochs` puts steps in the place of epochs once the tasks are counted, before `resolved.yaml` is written: a
resumed run compares steps, and other data under the same name are another config.
`python -m pytest tests/test_epochs.py` exercises it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

from rlvr.config.alias_values import describe_origin, rank
from rlvr.config.compose import LoadedConfig
from rlvr.config.run_tasks import count_tasks
from rlvr.config.schema import RunConfig
from rlvr.core.protocols import TaskSource

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
    return _set(loaded, {weaker: None})


def resolve_epochs(loaded: LoadedConfig, config: RunConfig, source: TaskSource) -> tuple[LoadedConfig, RunConfig]:
    """The config with the number of steps that its epochs come to; ValueError if the source has no fixed tasks.

    Prompts that are too long for the run count: which these are is known once there is a tokenizer.
    """
    epochs = config.training.epochs
    if epochs is None:
        return loaded, config
    if (tasks := count_tasks(source)) is None:
        raise ValueError(
            f"training.epochs={epochs:g}: the environment {config.env.name!r} generates its tasks without a fixed "
            "number; give training.steps"
        )
    # Exact: as a float, 1.1 x 100 / 10 is a little over 11.
    steps = math.ceil(Fraction(str(epochs)) * tasks / config.training.prompts_per_step)
    training = replace(config.training, steps=steps, epochs=None)
    return _set(loaded, {STEPS: steps, EPOCHS: None}), replace(config, training=training)


def _set(loaded: LoadedConfig, changes: Mapping[str, int | None]) -> LoadedConfig:
    """The composed config with these keys set, or left out (None)."""

    def change(values: dict[str, Any]) -> dict[str, Any]:
        training = dict(values.get("training") or {})
        for key, value in changes.items():
            training.pop(key.partition(".")[2], None)
            if value is not None:
                training[key.partition(".")[2]] = value
        return {**values, "training": training}

    return replace(loaded, values=change(loaded.values), raw=change(loaded.raw))
