"""What verifiers say of an answer, in the words of a refinement loop: how sure, how right, how good, and what is wrong.

`Feedback` is the record; `rlvr.reward.blend` makes one from the scores of several verifiers by weight.
Exercised by tests/test_reward_blend.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlvr.types import Score


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
