"""Checks of the options that rewards take, made once, when a reward is resolved.

Each raises ValueError with the option's name, what was given and what was expected; the registry puts the reward's name
in front.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.core.registry import did_you_mean


def check_choice(name: str, given: Any, known: Sequence[str]) -> None:
    """Check that `given` is one of the `known` words; ValueError naming the option otherwise."""
    if given not in known:
        raise ValueError(f"{name}={given!r}{did_you_mean(str(given), known)}; known: {', '.join(known)}")


def check_number(name: str, given: Any, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Check that `given` is a finite number from `low` to `high` (above `low` with `above`); else ValueError."""
    if not is_number(given) or not (low < given if above else low <= given) or not given <= high or math.isinf(given):
        bounds = f"above {low:g}" if above else f"at least {low:g}"
        bounds += f", at most {high:g}" if high < math.inf else ""
        raise ValueError(f"{name}={given!r}, expected a finite number {bounds}")


def check_integer(name: str, given: Any, low: int, high: int | None = None) -> None:
    """Check that `given` is a whole number from `low` to `high`; else ValueError."""
    if isinstance(given, bool) or not isinstance(given, int) or given < low or (high is not None and given > high):
        bounds = f"of at least {low:,}" if high is None else f"from {low:,} to {high:,}"
        raise ValueError(f"{name}={given!r}, expected a whole number {bounds}")


def check_flag(name: str, given: Any) -> None:
    """Check that `given` is true or false; else ValueError."""
    if not isinstance(given, bool):
        raise ValueError(f"{name}={given!r:.80}, expected true or false")


def check_mapping(name: str, given: Any, content: str) -> None:
    """Check that `given` is a mapping, or None; else ValueError, which says what `content` it maps."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"{name}={given!r:.80}, expected a mapping of {content}")


def is_list(given: Any) -> bool:
    """Whether the value is a list that is not empty; a text is not a list."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes)) and len(given) > 0


def is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)
