"""Rewards for arithmetic: the RPN process (`boxed`, `correct`, `combined`), `gsm8k` in three degrees of strictness, and
`exact_match` and `word_match` for any text.

A missing gold answer makes the task invalid, never the answer wrong. Equality of formulas is `rlvr.reward.math`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rlvr.core.types import Outcome, Score, StopReason
from rlvr.reward.registry import register_reward
from rlvr.reward.reward_options import check_number
from rlvr.reward.signatures import Case
from rlvr.reward.text.final_answer import final_answer, last_number, parse_number, requested_number

END = "<eoe>"


def _verdict(value: float, reason: str = "", parts: dict[str, float] | None = None) -> Score:
    return Score(value, Outcome.FAILED if reason else Outcome.PASSED, reason, parts or {})


def _no_gold(reason: str, detail: str) -> Score:
    return Score(None, Outcome.INVALID, reason, detail=detail)


def _operand(word: str, p: int) -> int | None:
    """The operand that a word spells, as the vocabulary spells it (no sign, no leading zero, ASCII), below `p`."""
    if len(word) > len(str(p)) or not (word.isascii() and word.isdigit()):
        return None
    value = int(word)
    return value if value < p and str(value) == word else None


def _judge_rpn(case: Case, value: Callable[[float, float], float], needs_gold: bool = True) -> Score:
    """Judge one RPN sequence; `value(boxed, correct)` is the reward."""
    meta, gold = case.meta or {}, None
    p = meta.get("modulus")
    if not isinstance(p, int) or p < 2:
        return _no_gold("no_modulus", f"meta['modulus'] is {p!r}, expected an integer of at least 2")
    if needs_gold:
        gold = _operand(str(meta.get("answer", "")).strip(), p)
        if gold is None:
            return _no_gold("no_gold", f"meta['answer'] is {meta.get('answer')!r}, expected an operand below {p}")
    words = f"{case.prompt} {case.response}".split()
    if case.stop_reason is StopReason.STOP and words[-1:] != [END]:
        words.append(END)
    end = 0 if case.truncated else len(words) - 1 - words[::-1].index(END) if END in words else 0
    answer = _operand(words[end - 1], p) if end >= 2 and words[end - 2] == "=" else None
    boxed, correct = float(answer is not None), float(answer is not None and answer == gold)
    parts = {"boxed": boxed, "correct": correct} if needs_gold else {"boxed": boxed}
    reason = "" if answer is not None and (correct or not needs_gold) else "wrong_value" if boxed else "no_answer"
    return _verdict(value(boxed, correct), "truncated" if case.truncated else reason, parts)


@register_reward(
    "boxed",
    caution="it pays for the form of an answer and never looks at its value, so it can be earned without computing "
    "anything; use reward.type=combined, or watch what you mean with reward.watch=[correct]",
)
def score_boxed(case: Case) -> Score:
    """1.0 if the sequence ends in `= operand <eoe>` with an operand below p, else 0.0.

    The sequence is prompt + response; at its last `<eoe>` (position e >= 2) token e-2 must be `=` and token e-1 an
    operand. A trajectory that the sampler stopped counts as ending in `<eoe>`; one cut short counts 0. p is
    `meta["modulus"]`. THIS REWARD ALONE CAN BE HACKED: nothing checks the value, so `= 0 <eoe>` earns it on every
    problem. Use `combined`.
    """
    return _judge_rpn(case, lambda boxed, correct: boxed, needs_gold=False)


@register_reward("correct", gold="answer", verifiable=True, reward_range=(0.0, 1.0))
def score_correct(case: Case) -> Score:
    """1.0 if the sequence is boxed (see `boxed`) and the boxed operand is `meta["answer"]`, else 0.0.

    Intermediate steps are not checked, here and in `combined`: a right answer by a wrong or missing chain counts.
    """
    return _judge_rpn(case, lambda boxed, correct: correct)


@dataclass(frozen=True)
class CombinedOptions:
    boxed_weight: float = 0.3
    correct_weight: float = 0.7

    def __post_init__(self) -> None:
        check_number("boxed_weight", self.boxed_weight, 0)
        check_number("correct_weight", self.correct_weight, 0)


@register_reward(
    "combined", options=CombinedOptions, gold="answer", verifiable=True,
    reward_range=lambda options: (0.0, options.boxed_weight + options.correct_weight),
)  # fmt: skip
def score_combined(case: Case, options: CombinedOptions) -> Score:
    """boxed_weight * boxed + correct_weight * boxed * correct; passed when both are 1. Parts: boxed, correct."""
    weights = options.boxed_weight, options.correct_weight
    return _judge_rpn(case, lambda boxed, correct: weights[0] * boxed + weights[1] * boxed * correct)


@register_reward("word_match", gold="answer", verifiable=True, reward_range=(0.0, 1.0))
def word_match(case: Case) -> Score:
    """The share of words that stand where `meta["answer"]` has them, of the longer text; passed when all do.

    Part of a right answer earns part of the reward: a policy that never gives a whole one finds the way to it.
    """
    gold = (case.meta or {}).get("answer")
    if not isinstance(gold, (str, int, float)) or not (answer := str(gold).split()):
        return _no_gold("no_gold", f"meta['answer'] is {gold!r:.80}, expected text with a word, or a number")
    words = case.response.split()
    if words == answer:
        return _verdict(1.0)
    matches = sum(one == other for one, other in zip(words, answer, strict=False))
    return _verdict(matches / max(len(words), len(answer)), "wrong_words" if words else "no_answer")


@register_reward("gsm8k", gold="answer", verifiable=True, reward_range=(0.0, 1.0))
def gsm8k(case: Case) -> Score:
    """1.0 if the final number of the response equals the gold exactly (as rationals), else 0.0.

    The gold is `meta["answer"]`: a number, or a whole solution whose last line is `#### 1,234`. Where the final
    number is looked for: `rlvr.reward.text.final_answer.final_answer`. Only the answer is judged, never the way to it.
    """
    return _judge_number(case, final_answer)


@register_reward("gsm8k_strict", gold="answer", verifiable=True, reward_range=(0.0, 1.0))
def gsm8k_strict(case: Case) -> Score:
    """1.0 if the response has the form that GSM8K's own solutions have and the right number in it, else 0.0.

    The number is the one right after the last `#### `: with a minus or thousands commas, without `$`, a period behind
    it or decimals that are zero. What follows it is not read. Else as `gsm8k`. Close to verl's strict score;
    docs/start/pretrained.md has what differs.
    """
    return _judge_number(case, requested_number)


@register_reward("gsm8k_flexible", gold="answer", verifiable=True, reward_range=(0.0, 1.0))
def gsm8k_flexible(case: Case) -> Score:
    """1.0 if the last number of the response is the gold, in whatever form, else 0.0.

    The reward for models that answer in sentences, and the lenient accuracy for `reward.watch`. It teaches no form, but
    one number of a completion counts, so a list of guesses earns what its last one earns. Numbers are compared, where
    verl's flexible score compares text. Else as `gsm8k`.
    """
    return _judge_number(case, last_number)


def _judge_number(case: Case, find: Callable[[str], Fraction | None]) -> Score:
    """Judge the number that `find` finds in the response."""
    answer = (case.meta or {}).get("answer")
    gold = _gold_number(answer)
    if gold is None:
        return _no_gold("no_gold", f"meta['answer'] ends on no number: {str(answer)[-200:]!r}")
    number = find(case.response)
    if number is None:
        return _verdict(0.0, "truncated" if case.truncated else "no_answer")
    return _verdict(1.0) if number == gold else _verdict(0.0, "wrong_value")


def _gold_number(given: Any) -> Fraction | None:
    if isinstance(given, str):
        return parse_number(given.rpartition("####")[2])
    if isinstance(given, bool) or not isinstance(given, (int, float, Fraction)):
        return None
    if isinstance(given, float):
        return Fraction(repr(given)) if math.isfinite(given) else None
    return Fraction(given)


@register_reward("exact_match", gold="answer", verifiable=True, reward_range=(0.0, 1.0))
def exact_match(case: Case, *, ignore_case: bool = False) -> Score:
    """1.0 if the response is `meta["answer"]`, white space at both ends aside (and case, if asked), else 0.0."""
    gold = (case.meta or {}).get("answer")
    if gold is None:
        return _no_gold("no_gold", "meta has no 'answer'")
    if isinstance(gold, (list, tuple, dict, set)):
        return _no_gold("no_gold", f"meta['answer'] is {gold!r:.80}, expected text or a number")
    # An integer column with a gap reads as floats: 3.0 is 3.
    golds = {str(gold).strip(), *([str(int(gold))] if isinstance(gold, float) and gold.is_integer() else [])}
    answer = case.response.strip()
    if ignore_case:
        answer, golds = answer.casefold(), {one.casefold() for one in golds}
    if answer in golds:
        return _verdict(1.0)
    return _verdict(0.0, "wrong_value" if answer else "no_answer")
