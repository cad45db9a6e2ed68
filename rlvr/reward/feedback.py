"""What verifiers say of an answer, in the words of a refinement loop: how sure, how right, how good, and what is wrong.

`Feedback` is the record; `rlvr.reward.blend` makes one from the scores of several verifiers by weight. `cleaned` is
what a text has to pass before it may stand in a prompt. Exercised by tests/test_reward_blend.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rlvr.types import Score

MAX_TOLD = 300  # characters of one verifier's words that a policy is told
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Feedback:
    """`confidence`, `correctness_score` and `quality_score` are in [0, 1]; None where no verifier could judge.

    `error_types` are reason codes to group by, `suggestions` sentences for whoever tries again, `detailed_feedback`
    one text for the next prompt. `scores` is what each verifier said, by its name; `truth` whether the answer is right
    where the task itself says what is right (tests, an answer), and None where it does not.
    """

    confidence: float | None
    correctness_score: float | None
    quality_score: float | None
    detailed_feedback: str = ""
    error_types: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    scores: dict[str, Score] = field(default_factory=dict[str, Score])
    truth: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """The `verifier_feedback` of a service's answer."""
        return {
            "confidence": self.confidence,
            "correctness_score": self.correctness_score,
            "quality_score": self.quality_score,
            "detailed_feedback": self.detailed_feedback,
            "error_types": list(self.error_types),
            "suggestions": list(self.suggestions),
        }


def cleaned(text: str, special: Iterable[str] = (), limit: int = MAX_TOLD) -> str:
    """One printable line of at most `limit` characters, without the `special` texts and without addresses in memory.

    Whoever wrote the answer may have written this text too (an exception's message, a judge's quotation): it must not
    end a turn, open another or flood the prompt. `special` is what has a meaning of its own there.
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in without(text[: 4 * limit], special)).split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def without(text: str, special: Iterable[str]) -> str:
    """The text with a blank for each `special` one, those that only taking one out puts together among them."""
    text, known = _ADDRESS.sub("", text), [s for s in special if s.strip()]
    while held := [s for s in known if s in text]:
        for s in held:
            text = text.replace(s, " ")
    return text
