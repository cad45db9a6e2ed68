"""Reward `repetition`: whether a text says the same thing over and over, as models do that are paid for length.

    resolve_reward("repetition", words=4, at_most=0.05)("", text)     # 1.0 or 0.0

It counts runs of words that came before in the same text, in linear time; a rule like those of
`rlvr.reward.text.rules`. Left out on purpose: the same thing said in other words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlvr.core.types import Outcome, Score
from rlvr.reward.registry import register_reward
from rlvr.reward.reward_options import check_integer, is_number
from rlvr.reward.signatures import Case
from rlvr.reward.text.guarded_rules import MAX_CHARS

MOST_WORDS = 20  # of a run
_WORDS = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class RepetitionOptions:
    words: int = 4
    at_most: float = 0.05

    def __post_init__(self) -> None:
        check_integer("words", self.words, 1, MOST_WORDS)
        if not is_number(self.at_most) or not 0 <= self.at_most < 1:
            raise ValueError(f"at_most={self.at_most!r}, expected a share from 0 to below 1")


@register_reward("repetition", options=RepetitionOptions)
def repetition(case: Case, options: RepetitionOptions) -> Score:
    """1.0 unless more than a share `at_most` of the runs of `words` words came before in the response (`repetition`).

    Words are runs of letters and digits, in any case. A response of fewer words passes, an empty one too: ask for a
    `length` beside it. Part: `repeated`, the share.
    """
    if len(case.response) > MAX_CHARS:
        return Score(0.0, Outcome.FAILED, "too_large")
    words = _WORDS.findall(case.response.casefold())
    runs = list(zip(*(words[start:] for start in range(options.words)), strict=False))
    repeated = 1 - len(set(runs)) / len(runs) if runs else 0.0
    parts = {"repeated": repeated}
    if repeated > options.at_most:
        detail = f"a share of {repeated:.3g} of the runs of {options.words} words came before"
        return Score(0.0, Outcome.FAILED, "repetition", parts, f"{detail}, expected at most {options.at_most}")
    return Score(1.0, Outcome.PASSED, parts=parts)
