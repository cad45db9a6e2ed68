"""Reward `draft`: a few rules on the form of an answer, for tasks that carry nothing to check it by.

    resolve_reward("draft").judge(Case("Write f.", "def f(x): pass"))     # 0.9: incomplete_code

Two scores start at 1.0 and rules only lower them: a clean answer is worth 1.0, and a longer one never more.

| rule | correctness | quality | code |
|---|---|---|---|
| no text | 0 | 0 | `empty_output` |
| under 10 characters, blanks at both ends aside | at most 0.3 | at most 0.3 | `too_short` |
| over 10,000 characters | at most 0.7 | at most 0.6 | `too_long` |
| a function is defined and nothing says `return` or `print` | x 0.8 | | `incomplete_code` |
| three line breaks in a row | | x 0.9 | |

These rules cannot tell a right answer from a wrong one: blend them with a judge, or give tasks an answer or tests
(`rlvr.reward.blend`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlvr.core.types import Outcome, Score
from rlvr.reward.registry import register_reward
from rlvr.reward.signatures import Case
from rlvr.reward.text.form import count_of

SHORTEST, LONGEST = 10, 10_000  # characters
# The head of a definition in the languages that have a word for it; the word alone stands in prose as well.
_DEFINITION = re.compile(r"\b(?:def|function|func|fn)\s+[A-Za-z_]\w*\s*[(<]|\bfunction\s*\(")

SUGGESTIONS = {
    "empty_output": "Give an answer: nothing was written.",
    "too_short": "Lengthen the answer.",  # the verifier's detail has its limit
    "too_long": "Shorten the answer.",
    "incomplete_code": "Complete the function: nothing is returned or printed.",
}


@dataclass(frozen=True)
class Draft:
    """The scores that the rules leave of an answer, each in [0, 1], and the codes of the rules that it broke."""

    correctness: float
    quality: float
    errors: tuple[str, ...] = ()

    @property
    def confidence(self) -> float:
        """The mean of both, to six places: 0.8 x 0.9 and the like leave no dust."""
        return round((self.correctness + self.quality) / 2, 6)


def examine_form(text: str) -> Draft:
    """The rules, in the order of the table. Linear in the length of the text, whatever it holds."""
    if not text.strip():
        return Draft(0.0, 0.0, ("empty_output",))
    correctness = quality = 1.0
    errors: list[str] = []
    if len(text.strip()) < SHORTEST:
        correctness, quality = min(correctness, 0.3), min(quality, 0.3)
        errors.append("too_short")
    if len(text) > LONGEST:
        correctness, quality = min(correctness, 0.7), min(quality, 0.6)
        errors.append("too_long")
    if _DEFINITION.search(text) and "return" not in text and "print" not in text:
        correctness *= 0.8
        errors.append("incomplete_code")
    if "\n\n\n" in text:
        quality *= 0.9
    return Draft(round(correctness, 6), round(quality, 6), tuple(errors))


@register_reward(
    "draft",
    caution="its rules look at the form of an answer alone, so any text of a decent length earns it; blend it with a "
    "judge, or watch what you mean with reward.watch",
)
def draft(case: Case) -> Score:
    """The mean of what rules on form leave of correctness and quality, from 0 to 1; passed where none was broken.

    Reasons: `empty_output`, `too_short`, `too_long`, `incomplete_code`, joined by + where several apply. Parts:
    `correctness`, `quality`. The detail has the limit that the answer exceeds.
    """
    marks = examine_form(case.response)
    limits = {
        "too_short": f"{count_of(len(case.response.strip()), 'characters')}, expected at least {SHORTEST}",
        "too_long": f"{count_of(len(case.response), 'characters')}, expected at most {LONGEST:,}",
    }
    return Score(
        marks.confidence,
        Outcome.FAILED if marks.errors else Outcome.PASSED,
        "+".join(marks.errors),
        {"correctness": marks.correctness, "quality": marks.quality},
        "; ".join(limits[code] for code in marks.errors if code in limits),
    )
