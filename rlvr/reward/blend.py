"""Several verifiers as one: `Blend` weighs their scores and puts what they say into a `Feedback`.

    blend = Blend([(resolve_reward("draft"), 0.3), (resolve_reward("judge", ...), 0.7)])
    feedback = blend.judge("Write a haiku.", answer)
    session_reward(feedback, iteration=1)

Confidence is the mean, by weight, of the verifiers' values, each clipped to [0, 1]. A verifier that broke, or to which
the task is invalid, has no vote: the weights of the others are scaled up. Where none is left there is no confidence,
because an answer that could not be judged is not a bad one. `correctness_score` and `quality_score` are the same mean
over the parts `correctness` and `quality` of each score, or its value where it has no such part. A verifier of weight 0
has no vote: it watches, and limits the confidence if it knows the truth.

`truth` comes from verifiable rewards (`RewardSpec.verifiable`): the answer is right exactly where all of them that
could judge passed it. A judge's opinion and rules on form are never truth, and cannot outvote it: the confidence in an
answer that is known to be wrong is at most what the verifiers that failed it give it.

`advisory` verifiers object to an answer and cannot tell that it is right: where only they could judge there is a
quality, but no confidence and no correctness (`Feedback.is_unverified`).

The policy is shown reason codes, suggestions, and the details of verifiers that know no right answer: the details of
one that does (a failed hidden test, a judge that was shown a reference) could give it away.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from rlvr.core.types import Outcome, Score
from rlvr.reward.composite import WeightedReward, resolve_weighted
from rlvr.reward.feedback import Feedback, sanitize
from rlvr.reward.registry import Reward
from rlvr.reward.signatures import Case
from rlvr.reward.text.quality import SUGGESTIONS as RULES

SUGGESTIONS = RULES | {
    "no_answer": "Give a final answer, in the form that the task asks for.",
    "wrong_value": "Check every step: the final answer is wrong.",
    "many_answers": "Give one final answer only.",
    "truncated": "Come to the answer sooner: it was cut off.",
    "syntax_error": "Correct the syntax: the program does not compile.",
    "wrong_name": "Define the function under the name that the task asks for.",
    "assertion": "Correct what the program computes: a test of its result fails.",
    "wrong_output": "Correct what the program prints: it differs from what is expected.",
    "exception": "Correct the program: it raises an exception.",
    "timeout": "Make it faster, or make sure that it ends.",
    "memory": "Use less memory.",
    "too_large": "Shorten the answer.",
    "unreadable": "Write the answer as one plain formula.",
    "low_score": "Improve the answer where the judge objects.",
    "missing_word": "Use every word that the task asks for.",
    "forbidden_word": "Leave out the words that the task forbids.",
}
PROGRAMS = ("code",)  # the verifiers that run the answer
SLOW_TO_READ = {  # the same codes from a verifier that only reads the answer
    "timeout": "Shorten or simplify the answer: checking it took too long.",
    "memory": "Shorten or simplify the answer: checking it took too much memory.",
}
_UNDECIDED = ("undecided", "unreadable")  # reasons of a verifiable reward that came to no verdict: no truth either way

Observe = Callable[[str, float, Sequence[Score]], None]
"""Called after each call of a verifier with its name, the seconds it took, and its scores."""


class Blend:
    """Verifiers with their weights. `reveal` names those whose details are shown although they know what is right,
    `advisory` the rewards whose votes alone give no confidence, `decisive` those without whose pass no confidence is
    enough (`Feedback.is_refused`). `observe` may be set to measure them."""

    observe: Observe | None = None

    def __init__(
        self,
        verifiers: Sequence[tuple[Reward, float]],
        *,
        reveal: Collection[str] = (),
        advisory: Collection[str] = (),
        decisive: Collection[str] = (),
    ) -> None:
        entries = [{"name": reward, "weight": weight} for reward, weight in verifiers]
        self._verifiers = resolve_weighted("blend", entries)
        if unknown := [name for name in reveal if name not in self.names]:
            known = ", ".join(self.names)
            raise ValueError(f"blend: reveal={unknown[0]!r}, expected some of its verifiers: {known}")
        self._reveal, self._advisory, self._decisive = frozenset(reveal), frozenset(advisory), frozenset(decisive)

    @classmethod
    def of(cls, verifiers: Sequence[str | Mapping[str, Any]], *, reveal: Collection[str] = ()) -> Blend:
        """From names, or from dictionaries {name, weight = 1, kwargs = {}} as `composite` takes them."""
        entries = [{"name": one} if isinstance(one, str) else one for one in verifiers]
        return cls([(one.reward, one.weight) for one in resolve_weighted("verifiers", entries)], reveal=reveal)

    @property
    def names(self) -> list[str]:
        """The verifiers, as `Feedback.scores` calls them: `name#2` for the second of a name."""
        return list(self.weights)

    @property
    def weights(self) -> dict[str, float]:
        return {one.label: one.weight for one in self._verifiers}

    @property
    def voters(self) -> list[str]:
        """The names of the verifiers that count in the confidence; the others only watch."""
        return [name for name, weight in self.weights.items() if weight > 0]

    @property
    def opinions(self) -> list[str]:
        """The names of the verifiers that do not know the right answer."""
        return [one.label for one in self._verifiers if not one.reward.spec.verifiable]

    @property
    def can_verify(self) -> bool:
        """Whether one of the voters can tell that an answer is right."""
        return any(one.weight > 0 and one.reward.name not in self._advisory for one in self._verifiers)

    @property
    def verifiable(self) -> bool:
        """Whether one of them can know the truth."""
        return any(one.reward.spec.verifiable for one in self._verifiers)

    def start(self) -> None:
        """Start what the verifiers depend on; ValueError where that is impossible here."""
        for one in self._verifiers:
            one.reward.start()

    def judge(self, prompt: str, answer: str, meta: dict[str, Any] | None = None) -> Feedback:
        """The feedback on one answer; never raises for a verifier."""
        return self.judge_many([Case(prompt, answer, meta)])[0]

    def judge_many(self, cases: Sequence[Case], awaited: Mapping[str, Sequence[Score]] | None = None) -> list[Feedback]:
        """The feedback on each of many answers, all at once where a verifier takes lists. `awaited` has the scores that
        `await_judges` returned."""
        known = awaited or {}
        columns = [known.get(one.label) or self._judge_by(one.reward, cases) for one in self._verifiers]
        return [self._feedback(case, row) for case, row in zip(cases, zip(*columns, strict=True), strict=True)]

    async def await_judges(self, cases: Sequence[Case]) -> dict[str, list[Score]]:
        """The scores of the verifiers that need no thread, by their labels."""

        async def ask(reward: Reward) -> list[Score]:
            began = time.perf_counter()
            return self._report(reward, began, await reward.await_all(cases))

        asked = {one.label: ask(one.reward) for one in self._verifiers if one.reward.spec.is_awaited}
        return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))

    def _judge_by(self, reward: Reward, cases: Sequence[Case]) -> list[Score]:
        began = time.perf_counter()
        return self._report(reward, began, reward.judge_all(cases))

    def _report(self, reward: Reward, began: float, scores: list[Score]) -> list[Score]:
        if self.observe is not None:
            self.observe(reward.name, time.perf_counter() - began, scores)
        return scores

    def _feedback(self, case: Case, row: Sequence[Score]) -> Feedback:
        counted: list[tuple[float, Score]] = []
        errors: list[str] = []
        suggestions: list[str] = []
        lines: list[str] = []
        truths: list[bool] = []
        limit, can_tell, is_refused = 1.0, False, False
        for one, score in zip(self._verifiers, row, strict=True):
            knows = one.reward.spec.verifiable
            if knows and score.value is not None and score.reason not in _UNDECIDED:
                truths.append(score.outcome is Outcome.PASSED)
            if knows and score.value is not None and score.outcome is not Outcome.PASSED:
                limit = min(limit, max(0.0, score.value))
            if not one.weight:
                if knows and score.value is not None and score.outcome is not Outcome.PASSED:  # why it is limited
                    lines.append(f"{one.label}: {self._describe(one, case, score)}")
                continue
            if score.value is not None:
                counted.append((one.weight, score))
                can_tell = can_tell or one.reward.name not in self._advisory
                if score.outcome is not Outcome.PASSED:
                    is_refused = is_refused or one.reward.name in self._decisive
                    codes = (score.reason or score.outcome.value).split("+")
                    errors += codes
                    known = SUGGESTIONS if one.reward.name in PROGRAMS else SUGGESTIONS | SLOW_TO_READ
                    suggestions += [known[code] for code in codes if code in known]
            lines.append(f"{one.label}: {self._describe(one, case, score)}")

        def mean_of(part: str) -> float | None:
            return _mean((weight, score.parts.get(part, score.value)) for weight, score in counted)

        confidence, correctness = _mean((weight, score.value) for weight, score in counted), mean_of("correctness")
        return Feedback(
            confidence=min(confidence, limit) if can_tell and confidence is not None else None,
            correctness_score=min(correctness, limit) if can_tell and correctness is not None else None,
            quality_score=mean_of("quality"),
            detailed_feedback="\n".join(lines),
            error_types=tuple(dict.fromkeys(errors)),
            suggestions=tuple(dict.fromkeys(suggestions)),
            scores=dict(zip(self.names, row, strict=True)),
            truth=all(truths) if truths else None,
            is_refused=is_refused,
        )

    def _describe(self, verifier: WeightedReward, case: Case, score: Score) -> str:
        """One line on one verdict, without what would give the right answer away."""
        reason = sanitize(score.reason.replace("_", " ").replace("+", ", "))
        if score.value is None:  # a traceback of ours is no advice
            return f"could not judge ({reason or score.outcome.value})"
        verdict = "passed" if score.outcome is Outcome.PASSED else reason or score.outcome.value
        hidden = verifier.label not in self._reveal and _knows_answer(verifier.reward, case.meta)
        detail = "" if hidden else sanitize(score.detail)
        return f"{verdict}: {detail}" if detail else verdict


def _knows_answer(reward: Reward, meta: Mapping[str, Any] | None) -> bool:
    """Whether a verifier is shown the right answer."""
    gold = reward.spec.gold
    return reward.spec.verifiable or bool(gold and (meta or {}).get(gold) not in (None, ""))


def _mean(weighed: Iterable[tuple[float, float | None]]) -> float | None:
    """The mean by weight of numbers clipped to [0, 1], to nine places; None of nothing."""
    values = [(weight, min(1.0, max(0.0, value))) for weight, value in weighed if value is not None]
    if not values:
        return None
    total = math.fsum(weight for weight, _ in values)
    return min(1.0, max(0.0, round(math.fsum(weight * value for weight, value in values) / total, 9)))


def session_reward(feedback: Feedback, iteration: int) -> float | None:
    """The reward of one iteration of a session, counted from 1: in [0, 2], None where the answer could not be judged.

    confidence + 0.3 correctness + 0.2 quality - 0.1 for each error + 0.1 from the second iteration on.
    """
    if iteration < 1:
        raise ValueError(f"session_reward: iteration={iteration}, expected at least 1: the first answer is number 1")
    if feedback.confidence is None or feedback.correctness_score is None or feedback.quality_score is None:
        return None
    reward = feedback.confidence + 0.3 * feedback.correctness_score + 0.2 * feedback.quality_score
    reward += 0.1 * (iteration > 1) - 0.1 * len(feedback.error_types)
    return round(min(2.0, max(0.0, reward)), 9)
