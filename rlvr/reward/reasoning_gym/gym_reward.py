"""The reward `reasoning_gym`: an answer passes where the library's own scorer gives 1 and no trick has made it do so.

The answer is the text between the last `<answer>` and `</answer>`, as the library itself extracts it. It never meets a
scorer in our process.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlvr.core.types import Outcome, Score
from rlvr.reward.reasoning_gym.answer_grammar import GRAMMARS, find_fault
from rlvr.reward.reasoning_gym.library_workers import GymTask, require_library, score_answer, start_workers
from rlvr.reward.reasoning_gym.second_checks import confirm
from rlvr.reward.registry import register_reward
from rlvr.reward.reward_options import check_number
from rlvr.reward.signatures import Case

META = "reasoning_gym"  # the key of a task's meta that says what its entry is made from
_CLOSE, _OPEN = "</answer>", "<answer>"
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d*")


@dataclass(frozen=True)
class GymScoring:
    """The options of the reward `reasoning_gym`. `partial_credit` gives the library's own score; else an answer gets 1
    or 0. `timeout_s` is processor time."""

    partial_credit: bool = False
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        check_number("timeout_s", self.timeout_s, 0, 600, above=True)
        require_library()

    @property
    def caution(self) -> str:
        if not self.partial_credit:
            return ""
        return (
            "partial_credit pays for text that is not right: many scorers of reasoning_gym give 0.01 to 0.1 to any "
            "answer, or the share of the right answer in a longer one"
        )


@register_reward(
    "reasoning_gym",
    "the score of a task of reasoning_gym by its own scorer: 1 or 0; the library's partial credit by `partial_credit`",
    options=GymScoring,
    caution=lambda options: options.caution,
    gold="answer",
    start=lambda options: start_workers(),
    verifiable=True,
    waits_for="processes",
)
def reasoning_gym(case: Case, options: GymScoring) -> Score:
    """The verdict of the library's own scorer on the text between the last `<answer>` and `</answer>`: 1 or 0.

    1 where the scorer gives 1, the answer is not the right one beside others, and no known hole of the scorer explains
    it. With `partial_credit` the value is the scorer's own, and what passes is the same. An answer to a family that
    evaluates it must first pass a grammar.
    """
    made_from = (case.meta or {}).get(META)
    if not isinstance(made_from, dict) or not {"family", "config", "level", "number", "question"} <= made_from.keys():
        return Score(None, Outcome.INVALID, "no_task", detail=f"meta has no {META!r}: use env=reasoning_gym")
    answer = extract_answer(case.response)
    if not answer:
        reason = "no_answer" if answer is None else "empty"
        return Score(0.0, Outcome.FAILED, reason)
    task = GymTask(**{key: made_from[key] for key in ("family", "config", "level", "number")})
    gold = (case.meta or {}).get("answer")
    if len(answer) > (longest := find_longest(gold)):
        return Score(0.0, Outcome.FAILED, "too_long", detail=f"{len(answer):,} characters, at most {longest:,}")
    if fault := find_fault(task.family, answer):
        return Score(0.0, Outcome.FAILED, "refused", detail=f"{task.family} evaluates answers: {fault}")
    reply = score_answer(task, made_from["question"], answer, options.timeout_s)
    if reply.failure:
        return Score(None, Outcome.ERROR, reply.failure, detail=reply.detail)
    return _judge(reply.value, task.family, answer, gold, options)


def _judge(report: dict[str, Any], family: str, answer: str, gold: str | None, options: GymScoring) -> Score:
    if failure := report.get("failure"):
        detail = report["detail"]
        if failure == "other_task":
            return Score(None, Outcome.INVALID, failure, detail=f"{detail}: another version of reasoning_gym made it")
        if not report["blames_answer"]:
            return Score(None, Outcome.ERROR, f"scorer_{failure}", detail=detail)
        outcome = Outcome.TIMEOUT if failure == "timeout" else Outcome.FAILED
        return Score(0.0, outcome, "timeout" if failure == "timeout" else "ungradeable", detail=detail)
    score = float(report["score"])
    reason = hole = ""
    if score != 1:
        reason = "wrong_value"
    elif is_superstring(family, answer, gold):
        reason = "superstring"
    elif hole := confirm(family, answer, gold):
        reason, hole = "unconfirmed", f"the scorer of {family}: {hole}"
    value = score if options.partial_credit else float(not reason)
    return Score(value, Outcome.FAILED if reason else Outcome.PASSED, reason, {"library_score": score}, hole)


def extract_answer(text: str) -> str | None:
    """The text between the tags, the last time that both are there; None if they never are."""
    for piece in reversed(text.split(_CLOSE)[:-1]):
        _, opened, answer = piece.partition(_OPEN)
        if opened:
            return answer.strip()
    return None


def find_longest(gold: str | None) -> int:
    """How long an answer may be, in characters: much longer than the library's own, where it gives one."""
    return 10_000 if gold is None else 1000 + 4 * len(gold)


def is_superstring(family: str, answer: str, gold: str | None) -> bool:
    """Whether an answer holds the right one and more words or numbers beside it, so that it may be several at once.

    Another way to write a number (`42.0` for `42`), and an expression, which has one value, are not.
    """
    if gold is None or ((grammar := GRAMMARS.get(family)) and grammar.is_expression):
        return False
    answer, gold = (" ".join(text.split()).lower() for text in (answer, gold))
    before, found, after = answer.partition(gold)
    if not (gold and found) or _NUMBER.fullmatch(answer):
        return False
    return any(character.isalnum() for character in before + after)
