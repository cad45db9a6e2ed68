"""What a config gives for one key by several spellings, and which of it counts.

A value typed on the command line overrides what files say, a user's file what a shipped one says, and a file what is
only a default; two of the same rank that disagree are an error.

Exercised by `python -m pytest tests/test_spellings.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rlvr.config.compose import CLI

SHIPPED_FILES = "rlvr/configs/"  # how the origins of shipped files begin
DEFAULT, SHIPPED, FILE, TYPED = range(4)  # each gives way to the next


@dataclass(frozen=True)
class Given:
    """One value for a key: as typed (`key`, `said`) and as we mean it (`value`; `raw` where it may be written)."""

    key: str
    said: Any
    value: Any
    raw: Any
    origin: str
    rank: int

    @property
    def words(self) -> str:
        said = self.said if isinstance(self.said, str) else json.dumps(self.said)
        return f"{self.key}={said}{came(self.origin)}"


def rank(origin: str) -> int:
    return TYPED if origin == CLI else SHIPPED if origin.startswith(SHIPPED_FILES) else FILE


def came(origin: str) -> str:
    return " (from the command line)" if origin == CLI else f" (from {origin})" if origin else ""


@dataclass
class Pool:
    """What was given for every key that another spelling touches, and for what is worked out from several words."""

    given: dict[str, list[Given]] = field(default_factory=dict[str, list[Given]])
    idle: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])

    def add(self, target: str, given: Given) -> None:
        self.given.setdefault(target, []).append(given)

    def pick(self, target: str) -> Given | None:
        """The value that counts, of those of the highest rank; ValueError where these disagree."""
        every = self.given.get(target, [])
        if not every:
            return None
        highest = max(given.rank for given in every)
        best = [given for given in every if given.rank == highest]
        best = [given for given in best if given.value is not None] or best[:1]
        for other in best[1:]:
            if not _equal(best[0].value, other.value):
                what = "" if target.startswith("~") else f" of {target}"
                raise ValueError(f"{best[0].words} and {other.words} say different things{what}; leave one of them out")
        return best[0]

    def leave_out(self, word: Given, why: str) -> None:
        """Take what was typed as `word` out again, and remember that it did nothing."""
        for every in self.given.values():
            every[:] = [given for given in every if given.key != word.key]
        self.idle[word.key] = (word.origin, why)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, bool) != isinstance(b, bool):
        return False
    if isinstance(a, str) != isinstance(b, str):
        try:
            return float(a) == float(b)
        except (TypeError, ValueError):
            return False
    return a == b
