"""Checks of the options that rewards take, made once, when a reward is resolved.

`python -m pytest tests/test_reward_text.py tests/test_reward_rules.py` exercises them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlvr.registry import nearest


def one_of(what: str, given: Any, known: Sequence[str]) -> None:
    """ValueError, naming the nearest, unless `given` is one of the `known` words."""
    if given not in known:
        raise ValueError(f"{what}={given!r}{nearest(str(given), known)}; known: {', '.join(known)}")


def is_list(given: Any) -> bool:
    """Whether it is a list with something in it; a lone word is not."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes)) and len(given) > 0


def is_number(given: Any) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)
