"""Reward `repetition`: whether a text says the same thing over and over, as models do that are paid for length.

    resolve_reward("repetition", words=4, at_most=0.05)("", text)     # 1.0 or 0.0

It counts runs of words that came before in the same text, in linear time; a rule like those of `rlvr.reward.rules`.
Left out on purpose: the same thing said in other words. `python -m pytest tests/test_reward_repetition.py` exercises
it.
"""

from __future__ import annotations

import re
from typing import Any

from rlvr.reward.options import is_number
from rlvr.reward.registry import register_reward
from rlvr.reward.text import MAX_CHARS
from rlvr.types import Outcome, Score

MOST_WORDS = 20  # of a run
_WORDS = re.compile(r"[^\W_]+")


def _options(words: int = 4, at_most: float = 0.05) -> dict[str, Any]:
    what = "reward 'repetition'"
    if isinstance(words, bool) or not isinstance(words, int) or not 1 <= words <= MOST_WORDS:
        raise ValueError(f"{what}: words={words!r}, expected a whole number from 1 to {MOST_WORDS}")
    if not is_number(at_most) or not 0 <= at_most < 1:
        raise ValueError(f"{what}: at_most={at_most!r}, expected a share from 0 to below 1")
    return {"words": words, "at_most": float(at_most)}


@register_reward("repetition", prepare=_options)
def repetition(
    prompt: str, response: str, meta: dict[str, Any] | None = None, *, words: int = 4, at_most: float = 0.05
) -> Score:
    """1.0 unless more than a share `at_most` of the runs of `words` words came before in the response (`repetition`).

    Words are runs of letters and digits, in any case. A response of fewer words keeps this rule, an empty one too: ask
    for a `length` beside it. Part: `repeated`, the share.
    """
    if len(response) > MAX_CHARS:
        return Score(0.0, Outcome.FAILED, "too_large")
    found = _WORDS.findall(response.casefold())
    runs = list(zip(*(found[start:] for start in range(words)), strict=False))
    repeated = 1 - len(set(runs)) / len(runs) if runs else 0.0
    parts = {"repeated": repeated}
    if repeated > at_most:
        return Score(0.0, Outcome.FAILED, "repetition", parts)
    return Score(1.0, Outcome.PASSED, parts=parts)
