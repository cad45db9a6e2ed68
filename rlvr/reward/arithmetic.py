"""Rewards for arithmetic: the RPN process (`boxed`, `correct`, `combined`), `gsm8k`, and `exact_match` for any text.

A missing gold answer makes the task invalid, never the answer wrong. Equality of formulas is `rlvr.reward.math`.
`python -m pytest tests/test_reward_arithmetic.py` exercises it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rlvr.reward.extract import final_answer, parse_number
from rlvr.reward.registry import register_reward
from rlvr.types import Outcome, Score, StopReason, Trajectory

Meta = dict[str, Any] | None
END = "<eoe>"


def _verdict(value: float, reason: str, parts: dict[str, float] | None = None) -> Score:
    return Score(value, Outcome.FAILED if reason else Outcome.PASSED, reason, parts or {})


def _no_gold(reason: str, detail: str) -> Score:
    return Score(None, Outcome.INVALID, reason, detail=detail)


def _operand(word: str, p: int) -> int | None:
    """The operand that a word spells, as the vocabulary spells it (no sign, no leading zero, ASCII), below `p`."""
    if len(word) > len(str(p)) or not (word.isascii() and word.isdigit()):
        return None
    value = int(word)
    return value if value < p and str(value) == word else None


def _rpn(
    prompt: str,
    response: str,
    meta: Meta,
    trajectory: Trajectory | None,
    value: Callable[[float, float], float],
    gold: bool,
) -> Score:
    """Judge one RPN sequence; `value(boxed, correct)` is the reward, and `gold` says whether it needs the answer."""
    meta = meta or {}
    p, expected = meta.get("modulus"), None
    if not isinstance(p, int) or p < 2:
        return _no_gold("no_modulus", f"meta['modulus'] is {p!r}, expected an integer of at least 2")
    if gold:
        expected = _operand(str(meta.get("answer", "")).strip(), p)
        if expected is None:
            return _no_gold("no_gold", f"meta['answer'] is {meta.get('answer')!r}, expected an operand below {p}")
    words = f"{prompt} {response}".split()
    truncated = trajectory is not None and trajectory.stop_reason is StopReason.LENGTH
    if trajectory is not None and trajectory.stop_reason is StopReason.STOP and words[-1:] != [END]:
        words.append(END)
    end = 0 if truncated else len(words) - 1 - words[::-1].index(END) if END in words else 0
    answer = _operand(words[end - 1], p) if end >= 2 and words[end - 2] == "=" else None
    boxed, correct = float(answer is not None), float(answer is not None and answer == expected)
    parts = {"boxed": boxed, "correct": correct} if gold else {"boxed": boxed}
    reason = "" if answer is not None and (correct or not gold) else "wrong_value" if boxed else "no_answer"
    return _verdict(value(boxed, correct), "truncated" if truncated else reason, parts)


@register_reward(
    "boxed",
    caution="it pays for the form of an answer and never looks at its value, so it can be earned without computing "
    "anything; use reward.type=combined, or watch what you mean with reward.watch=[correct]",
)
def boxed(prompt: str, response: str, meta: Meta = None, trajectory: Trajectory | None = None) -> Score:
    """1.0 if the sequence ends in `= operand <eoe>` with an operand below p, else 0.0.

    The sequence is prompt + response; at its last `<eoe>` (position e >= 2) token e-2 must be `=` and token e-1 an
    operand. A trajectory that the sampler stopped counts as ending in `<eoe>`; one cut short counts 0. p is
    `meta["modulus"]`. THIS REWARD ALONE CAN BE HACKED: nothing checks the value, so `= 0 <eoe>` earns it on every
    problem. Use `combined`.
    """
    return _rpn(prompt, response, meta, trajectory, lambda b, c: b, gold=False)


@register_reward("correct", gold="answer", computes=True)
def correct(prompt: str, response: str, meta: Meta = None, trajectory: Trajectory | None = None) -> Score:
    """1.0 if the sequence is boxed (see `boxed`) and the boxed operand is `meta["answer"]`, else 0.0.

    Intermediate steps are not checked, here and in `combined`: a right answer by a wrong or missing chain counts.
    """
    return _rpn(prompt, response, meta, trajectory, lambda b, c: c, gold=True)


def _weights(boxed_weight: float = 0.3, correct_weight: float = 0.7) -> dict[str, Any]:
    given = {"boxed_weight": boxed_weight, "correct_weight": correct_weight}
    for name, weight in given.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise ValueError(f"reward 'combined': {name}={weight!r}, expected a finite number, at least 0")
    return given


@register_reward("combined", prepare=_weights, gold="answer", computes=True)
def combined(
    prompt: str,
    response: str,
    meta: Meta = None,
    trajectory: Trajectory | None = None,
    *,
    boxed_weight: float = 0.3,
    correct_weight: float = 0.7,
) -> Score:
    """boxed_weight * boxed + correct_weight * boxed * correct; passed when both are 1. Parts: boxed, correct."""
    return _rpn(prompt, response, meta, trajectory, lambda b, c: boxed_weight * b + correct_weight * b * c, gold=True)


@register_reward("gsm8k", gold="answer", computes=True)
def gsm8k(prompt: str, response: str, meta: Meta = None, trajectory: Trajectory | None = None) -> Score:
    """1.0 if the final number of the response equals the gold exactly (as rationals), else 0.0.

    The gold is `meta["answer"]`: a number, or a whole solution whose last line is `#### 1,234`. Where the final
    number is looked for: `rlvr.reward.extract.final_answer`. Only the answer is judged, never the way to it.
    """
    given = (meta or {}).get("answer")
    gold = _gold_number(given)
    if gold is None:
        return _no_gold("no_gold", f"meta['answer'] ends on no number: {str(given)[-200:]!r}")
    found = final_answer(response)
    if found is None:
        truncated = trajectory is not None and trajectory.truncated
        return _verdict(0.0, "truncated" if truncated else "no_answer")
    return _verdict(1.0, "") if found == gold else _verdict(0.0, "wrong_value")


def _gold_number(given: Any) -> Fraction | None:
    if isinstance(given, str):
        return parse_number(given.rpartition("####")[2])
    if isinstance(given, bool) or not isinstance(given, (int, float, Fraction)):
        return None
    if isinstance(given, float):
        return Fraction(repr(given)) if math.isfinite(given) else None
    return Fraction(given)


@register_reward("exact_match", gold="answer", computes=True)
def exact_match(prompt: str, response: str, meta: Meta = None, *, ignore_case: bool = False) -> Score:
    """1.0 if the response is `meta["answer"]`, white space at both ends aside (and case, if asked), else 0.0."""
    given = (meta or {}).get("answer")
    if given is None:
        return _no_gold("no_gold", "meta has no 'answer'")
    answer, gold = response.strip(), str(given).strip()
    if ignore_case:
        answer, gold = answer.casefold(), gold.casefold()
    if answer == gold:
        return _verdict(1.0, "")
    return _verdict(0.0, "wrong_value" if answer else "no_answer")
