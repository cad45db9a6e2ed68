"""Registers optimizers, losses, advantages, samplers, trackers, curricula and schedules of a user's by name.

@rlvr.register
@dataclass(frozen=True)
class Lion(Optimizer):
    name = "lion"
"""

from __future__ import annotations

from typing import Any, TypeVar

from rlvr.algorithms.advantages import ADVANTAGES
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.optimizers import OPTIMIZERS
from rlvr.clients.samplers import SAMPLERS
from rlvr.core.variants import Variant, Variants
from rlvr.tracking.trackers import TRACKERS
from rlvr.training.curriculum import CURRICULA
from rlvr.training.schedules import SCHEDULES

V = TypeVar("V", bound=type[Variant])
TABLES: tuple[Variants[Any], ...] = (ADVANTAGES, LOSSES, OPTIMIZERS, SAMPLERS, TRACKERS, CURRICULA, SCHEDULES)


def register(variant: V) -> V:
    """Register a class under its `name`, which a config then takes like a built-in one.

    It is the class of an advantage, a loss, an optimizer, a sampler, a tracker, a curriculum or a schedule. Its options
    are in `kwargs` of the section.

    ValueError for a class of another kind, one without a name, and a name that another class has.
    """
    table = next((one for one in TABLES if isinstance(variant, type) and issubclass(variant, one.base)), None)
    if table is None:
        bases = ", ".join(one.base.__name__ for one in TABLES)
        raise ValueError(
            f"register: {variant!r:.120}, expected a subclass of {bases}; functions have decorators of their "
            "own: rlvr.register_reward, register_environment, register_advantage, register_callback; clients "
            "rlvr.clients.registry.register_client"
        )
    if not variant.name or variant.name == table.base.name:
        raise ValueError(f"register: {variant.__name__} has no name; give the class one: name = 'mine'")
    table.add(variant)
    return variant
