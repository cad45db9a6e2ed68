"""What a name with a colon means: a reference to an environment of another project, or a path to a class of your own.

    openenv:http://127.0.0.1:8000        a kind, and what it calls the environment
    my_game:Game                         a task source, or a class by one of three contracts: `reset` and `step` (Gym),
                                         with `turn` and `rewards` too (a game of several roles), `reset` and methods
                                         that are tools (TRL)

A kind is one entry in `KINDS`, and one file in `rlvr.envs.ecosystems` with a factory that takes the reference first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from rlvr.core.registry import did_you_mean, load_path

KINDS = {
    "trl": "rlvr.envs.ecosystems.trl:trl_source",
    "openenv": "rlvr.envs.ecosystems.openenv:openenv_source",
    "reasoning_gym": "rlvr.envs.procedural:ReasoningGym",
    "textarena": "rlvr.envs.ecosystems.guest_games:textarena_source",
    "gem": "rlvr.envs.ecosystems.guest_games:gem_source",
    "inspect": "rlvr.envs.ecosystems.inspect_tasks:InspectSource",
    "harbor": "rlvr.envs.ecosystems.harbor:harbor_source",
    "nemo_gym": "rlvr.envs.ecosystems.nemo_gym:nemo_gym_source",
    "verifiers": "rlvr.envs.ecosystems.verifiers_env:VerifiersSource",
}
_CONTRACTS = {
    ("reset", "turn", "step", "rewards"): "rlvr.envs.games.game_source:ClassGameSource",
    ("reset", "step"): "rlvr.envs.gym.gym_source:ClassGymSource",
    ("reset",): "rlvr.envs.tools.tool_source:ToolSource",
}


def is_reference(name: str) -> bool:
    """Whether a name is `KIND:...` of one of the `KINDS`."""
    kind, colon, _ = name.partition(":")
    return bool(colon) and kind in KINDS


def find_reference(name: str) -> Callable[..., Any]:
    """The factory of a name with a colon, which takes the environment's options."""
    kind, _, rest = name.partition(":")
    if is_reference(name):
        if not rest.strip():
            raise ValueError(f"environment {name!r}: nothing stands after the colon; give {kind}:NAME")
        return partial(load_path("environment", KINDS[kind]), rest)
    try:
        found = load_path("environment", name)
    except ValueError as error:
        if nearest := did_you_mean(kind, KINDS, cutoff=0.75):
            raise ValueError(f"{error}{nearest}") from error
        raise
    return adapt_class(found, name)


def adapt_class(found: Any, path: str) -> Callable[..., Any]:
    """The factory of what is at a path: itself, or for a class by one of the contracts the source that plays it."""
    if not inspect.isclass(found) or hasattr(found, "heldout"):
        return found  # a task source, or a function that makes one
    for methods, source in _CONTRACTS.items():
        if all(callable(getattr(found, method, None)) for method in methods):
            return partial(load_path("environment", source), environment=path)
    return found
