"""Names for the reasons of verdicts in metrics and tables, few enough to plot.

    names = ReasonNames()
    names.name_of(Outcome.ERROR, "sandbox")     # "sandbox"; after `MAX_NAMES` others of this outcome "other"

A reason is a short code by contract, but a user's function may return any text, such as one with the answer in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlvr.core.types import Outcome, Score

MAX_NAMES = 20  # for each outcome
MAX_CHARS = 40
OTHER = "other"
EPISODE_FAILED = "episode_failed"  # the episode broke before there was anything to judge
_NO_CODE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass
class ReasonNames:
    """The names given so far: at most `MAX_NAMES` for each outcome, first come, first served."""

    _given: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def name_of(self, outcome: Outcome | str, reason: str) -> str:
        """The reason as a name of at most `MAX_CHARS` characters without spaces or slashes; "" for no reason."""
        name = _NO_CODE.sub("_", reason[: 4 * MAX_CHARS])[:MAX_CHARS]
        given = self._given.setdefault(str(getattr(outcome, "value", outcome)), set())
        if name and name not in given:
            if len(given) >= MAX_NAMES:
                return OTHER
            given.add(name)
        return name

    def count(self, verdicts: Iterable[Score]) -> dict[str, float]:
        """How many verdicts that are not passed have each reason: {"error/sandbox": 2.0, "failed/no_answer": 5.0}."""
        not_passed = (v for v in verdicts if v.reason and v.outcome is not Outcome.PASSED)
        counts = Counter(f"{v.outcome.value}/{self.name_of(v.outcome, v.reason)}" for v in not_passed)
        return {name: float(count) for name, count in sorted(counts.items())}
