"""The parts of an algorithm's spec: what a loss, an advantage and a term have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from rlvr.core.variants import Variant


class SpecView(Protocol):
    """The spec that a part belongs to, as its parts see it (`rlvr.algorithms.specs.Algorithm`)."""

    @property
    def advantage(self) -> Any: ...
    @property
    def loss(self) -> Any: ...
    @property
    def terms(self) -> tuple[Any, ...]: ...
    @property
    def reduction(self) -> str: ...
    @property
    def mask_truncated(self) -> bool: ...


@dataclass(frozen=True)
class Part(Variant):
    """A part of a spec. Its options are keys of a config's section `algorithm`."""

    section = "algorithm"

    @property
    def least_group(self) -> int:
        """The fewest completions of a group that it can be computed of."""
        return 1

    def check(self, algorithm: SpecView) -> None:
        """ValueError for what an algorithm with this part cannot have."""
