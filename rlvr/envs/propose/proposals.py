"""What is accepted as a proposed task, and what the proposer earns by one that the solver tried.

A proposal is text of the policy, so it is data: the environment's own parser reads it, and nothing evaluates it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Protocol, runtime_checkable

from rlvr.core import rng
from rlvr.core.types import Task

MOST_CHARACTERS = 2000  # a longer proposal is refused before it is parsed


@runtime_checkable
class ProposableSource(Protocol):
    """What an environment needs beside the members of a task source, so that its tasks can be proposed."""

    levels: tuple[str, ...]

    def parse_task(self, text: str) -> Task | None:
        """The task that a text states, with its level and all that its reward needs; None if it states none."""
        ...

    def is_heldout(self, id: str) -> bool:
        """Whether the task of this id is on the held-out side, also if no evaluation happens to ask it."""
        ...


class ProposalRefusal(str, Enum):
    """Why a proposal is no task for the solver."""

    UNREADABLE = "unreadable"
    """The environment's parser finds no task in it."""
    SIZE = "size"
    """It is longer than `MOST_CHARACTERS`, of none of the environment's levels, or beyond the policy's context."""
    HELDOUT = "heldout"
    """It is on the held-out side."""
    COPIED = "copied"
    """It is an example of the proposer's own prompt."""
    REPEATED = "repeated"
    """An episode of the same group proposed it before."""


class Proposals:
    """The proposals of one group of episodes, each checked when it comes."""

    def __init__(self, source: ProposableSource, examples: Collection[str]) -> None:
        self._source, self._examples = source, frozenset(examples)
        self._seen: set[str] = set()

    def check(self, text: str) -> Task | ProposalRefusal:
        """The task that a proposal states, or why it is refused."""
        if len(text) > MOST_CHARACTERS:
            return ProposalRefusal.SIZE
        task = self._source.parse_task(text)
        if task is None:
            return ProposalRefusal.UNREADABLE
        if task.level not in self._source.levels:
            return ProposalRefusal.SIZE
        if self._source.is_heldout(task.id):
            return ProposalRefusal.HELDOUT
        if task.id in self._examples:
            return ProposalRefusal.COPIED
        if task.id in self._seen:
            return ProposalRefusal.REPEATED
        self._seen.add(task.id)
        return task


def pay_learnability(rate: float, key: int) -> float:
    """0 if the rate is 0 or 1, else 1 - rate. Absolute Zero, arXiv:2505.03335, section 3.1, eq. 4."""
    return 0.0 if rate in (0, 1) else 1 - rate


def pay_uncertainty(rate: float, key: int) -> float:
    """1 - 2 |rate - 1/2|: the most for a task that is solved every other time. R-Zero, arXiv:2508.05004."""
    return 1 - 2 * abs(rate - 0.5)


def pay_coin(rate: float, key: int) -> float:
    """0 or 1 with equal chance, whatever the solver does: a control."""
    return float(rng.uniform(key) < 0.5)


PAYS: Mapping[str, Callable[[float, int], float]] = {
    "learnability": pay_learnability,
    "uncertainty": pay_uncertainty,
    "random": pay_coin,
}
"""What the proposer earns by a task that is solved at a rate, by name. The key is that of random draws."""
