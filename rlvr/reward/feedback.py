"""`Feedback`: what verifiers say of an answer, for a refinement loop and its next prompt.

`rlvr.reward.blend` makes one from the scores of several verifiers by weight. `sanitize` makes a text safe to show in a
prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rlvr.chat.special_tokens import strip_special
from rlvr.core.types import Outcome, Score

MAX_DETAIL = 300  # characters of one verifier's detail that the policy is shown
GRADER_FAULTS = ("grader_failed", "no_value")  # of the program or formula that the request gave


@dataclass(frozen=True)
class Feedback:
    """What verifiers say of an answer. `confidence`, `correctness_score` and `quality_score` are in [0, 1]; None where
    no verifier could judge.

    `error_types` are reason codes to group by, `suggestions` sentences for the next attempt, `detailed_feedback`
    one text for the next prompt. `scores` has each verifier's score by its name; `truth` is whether the answer is right
    where the task itself says what is right (tests, an answer), else None; `is_refused` whether a verifier with a pass
    mark of its own (a grader) did not pass it. Without a confidence there may be a
    `quality_score` and `error_types`: those of advisory verifiers (`is_unverified`).
    """

    confidence: float | None
    correctness_score: float | None
    quality_score: float | None
    detailed_feedback: str = ""
    error_types: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    scores: dict[str, Score] = field(default_factory=dict[str, Score])
    truth: bool | None = None
    is_refused: bool = False

    @property
    def is_unverified(self) -> bool:
        """Whether only verifiers judged that cannot tell whether the answer is right."""
        return self.confidence is None and self.quality_score is not None

    @property
    def failures(self) -> str:
        """The verifiers that could not judge, and why, for the client; not for the policy."""
        failed = {name: score for name, score in self.scores.items() if score.value is None}
        why = (f"{name}: {score.reason} {detail_for_client(score)}".rstrip() for name, score in failed.items())
        return "; ".join(why)[:600]

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


def is_request_fault(score: Score) -> bool:
    """Whether a verifier could not judge because of what the request gave it."""
    return score.outcome is Outcome.INVALID or score.reason in GRADER_FAULTS


def detail_for_client(score: Score) -> str:
    """The detail, without that of a failure of the service's own, which names the judge's address and quotes it."""
    return score.detail if score.value is not None or is_request_fault(score) else ""


def sanitize(text: str, special: Iterable[str] = ()) -> str:
    """One printable line of at most `MAX_DETAIL` characters, without `special` texts and without addresses in memory.

    The policy may have written this text too (an exception's message, a judge's quotation): it must not end a turn,
    open another or flood the prompt. `special` are texts with a meaning of their own there, such as control tokens.
    """
    line = " ".join(
        "".join(c if c.isprintable() else " " for c in strip_special(text[: 4 * MAX_DETAIL], special)).split()
    )
    return line if len(line) <= MAX_DETAIL else f"{line[: MAX_DETAIL - 3]}..."
