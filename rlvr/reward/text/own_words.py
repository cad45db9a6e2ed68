"""Reward `own_words`: whether a text is the policy's own, or copies the prompt that it answers.

    resolve_reward("own_words")("Name a river in a sentence.", "Name a river in a sentence.")     # 0.0

It is a rule for what is asked in words that would satisfy other rules themselves. Left out on purpose: the same words
in another order.
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
class OwnWordsOptions:
    words: int = 4
    at_most: float = 0.5

    def __post_init__(self) -> None:
        check_integer("words", self.words, 1, MOST_WORDS)
        if not is_number(self.at_most) or not 0 <= self.at_most < 1:
            raise ValueError(f"at_most={self.at_most!r}, expected a share from 0 to below 1")


@register_reward("own_words", options=OwnWordsOptions)
def own_words(case: Case, options: OwnWordsOptions) -> Score:
    """1.0 unless more than a share `at_most` of the response's words stand in runs of `words` words of the prompt
    (`copied`).

    Words are runs of letters and digits, in any case. A response of fewer words passes, an empty one too: ask for a
    `length` beside it. Part: `copied`, the share.
    """
    if len(case.response) > MAX_CHARS:
        return Score(0.0, Outcome.FAILED, "too_large")
    size, words = options.words, _WORDS.findall(case.response.casefold())
    asked = set(_list_runs(_WORDS.findall(case.prompt.casefold()), size))
    copied = {
        place
        for start, run in enumerate(_list_runs(words, size))
        if run in asked
        for place in range(start, start + size)
    }
    share = len(copied) / len(words) if words else 0.0
    parts = {"copied": share}
    if share > options.at_most:
        detail = f"a share of {share:.3g} of the words stands in runs of {size} words of the prompt"
        return Score(0.0, Outcome.FAILED, "copied", parts, f"{detail}, expected at most {options.at_most}")
    return Score(1.0, Outcome.PASSED, parts=parts)


def _list_runs(words: list[str], size: int) -> list[tuple[str, ...]]:
    return list(zip(*(words[start:] for start in range(size)), strict=False))
