"""Cases of a test of which the quick suite runs a few, and the slow part the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mark_slow_but(quick: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of a `parametrize`: all are marked slow but `quick` of them, which lie evenly among the others."""
    held = list(cases)
    kept = {place * len(held) // quick for place in range(quick)}
    return [case if place in kept else _mark_slow(case) for place, case in enumerate(held)]


def _mark_slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
