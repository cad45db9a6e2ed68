"""The reward `math`: finds the final answer, and compares it with the gold by value.

    resolve_reward("math")("", "so x is \\boxed{0.5}", {"answer": "\\frac{1}{2}"})   # -> 1.0

An exact comparison decides nearly all pairs, in this thread. Others go to `math-verify` in a guarded worker that is
killed when it is late. A problem that an answer causes is a failure of the answer, never an `error`.
docs/mathematics.md lists the conventions. `python -m pytest tests/test_math_reward.py` exercises it.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from rlvr.core.types import Outcome, Score
from rlvr.reward.math.algebra import TooLarge
from rlvr.reward.math.compare import DECIMALS, PERCENT, UNITS, Conventions, compare_answers
from rlvr.reward.math.tails import join_tail
from rlvr.reward.math.values import read_value
from rlvr.reward.registry import register_reward
from rlvr.reward.reward_options import check_choice, check_number, is_list, is_number
from rlvr.reward.signatures import Case
from rlvr.reward.text.final_answer import MANY_BOXES, MAX_FORMULA, PLACES, find_answer

AUTO = ("boxed", "hash", "answer_is", "whole")
USE = ("auto", "never", "required")
PROFILES = ("strict", "lenient")
SECONDS = 0.5  # of processor time that math-verify has for a pair
# A tower of powers of numbers, an exponent of four digits, a large or bracketed factorial.
_HUGE = re.compile(r"\^[\s{(]*[0-9]+[\s})]*\^|\^[\s{(]*[0-9]{4}|(?:[0-9]{3}|[0-9!][\s})]+)\s*!")
MAX_ASKED = 300  # characters of either side that math-verify is given


@dataclass(frozen=True)
class MathOptions:
    profile: str = "strict"
    extract: str | Sequence[str] = "auto"
    on_many_boxes: str = "last"
    percent: str = "either"
    decimals: str = "exact"
    units: str = "optional"
    use_math_verify: str = "auto"
    timeout_s: float = SECONDS

    def __post_init__(self) -> None:
        check_choice("profile", self.profile, PROFILES)
        if self.profile == "lenient" and self.on_many_boxes != "last":
            raise ValueError(
                f"on_many_boxes={self.on_many_boxes!r} has no effect with profile=lenient, which takes the last box or "
                "all of them: leave it out"
            )
        if not is_list(self.places):
            raise ValueError(f"extract={self.extract!r}, expected 'auto' or a list of: {', '.join(PLACES)}")
        for place in self.places:
            check_choice("extract", place, PLACES)
        check_choice("on_many_boxes", self.on_many_boxes, MANY_BOXES)
        check_choice("percent", self.percent, PERCENT)
        check_choice("decimals", self.decimals, DECIMALS)
        check_choice("units", self.units, UNITS)
        check_choice("use_math_verify", self.use_math_verify, USE)
        check_number("timeout_s", self.timeout_s, 0, 60, above=True)
        if self.use_math_verify == "required" and not _has_math_verify():
            raise ValueError("use_math_verify=required needs math-verify: pip install 'rlvr[math]'")

    @property
    def places(self) -> Sequence[str]:
        if isinstance(self.extract, str):
            return AUTO if self.extract == "auto" else (self.extract,)
        return self.extract


@register_reward("math", options=MathOptions, gold="answer", verifiable=True)
def verify_math(case: Case, options: MathOptions) -> Score:
    """1.0 if the final answer of the response equals the gold in value, else 0.0.

    The gold is `meta["answer"]`: an answer, a solution with its box, or one with its `####` line. Where the answer is
    looked for, and what counts as equal: docs/mathematics.md. Reasons: `no_answer`, `truncated`, `many_answers`,
    `wrong_value`, `too_large`, `undecided` (no exact comparison, and math-verify cannot be asked), `timeout`, `memory`.
    """
    given = (case.meta or {}).get("answer")
    gold = gold_answer(given)
    if gold is None:
        return Score(None, Outcome.INVALID, "no_gold", detail=f"meta['answer'] holds no answer: {str(given)[-200:]!r}")
    answer = find_answer(case.response, options.places, options.on_many_boxes)
    if answer.problem:
        cut = case.truncated and answer.problem in ("no_answer", "unclosed")
        return _failure("truncated" if cut else "no_answer" if answer.problem == "unclosed" else answer.problem)
    text = answer.text
    conventions = Conventions(options.percent, options.decimals, options.units)
    try:
        joined = join_tail(text, answer.tail) if answer.tail else text
        if joined is None:
            return _failure("wrong_value")
        text = joined
        verdict = compare_answers(gold, text, conventions)
        if verdict is not True and options.profile == "lenient":
            lenient = replace(conventions, decimals="rounded", any_names=True)
            boxes = find_answer(case.response, options.places, "join").boxes
            verdict = any(_says(gold, reading, lenient) for reading in (text, *_join_boxes(boxes))) or verdict
    except TooLarge as error:
        return _failure("too_large", str(error))
    except Exception as error:  # caused by the answer, whatever it is, so never an `error`
        return _failure("undecided", f"{type(error).__name__}: {error}"[:300])
    if verdict is not None:
        return Score(1.0, Outcome.PASSED) if verdict else _failure("wrong_value")
    if options.use_math_verify == "never" or not _has_math_verify() or not _may_ask(gold, text):
        return _failure("undecided")
    return _ask_math_verify(gold, text, float(options.timeout_s))


@register_reward("math_flexible", gold="answer", verifiable=True)
def math_flexible(case: Case) -> Score:
    """1.0 if the answer of the response, wherever it stands, equals the gold in value, else 0.0.

    As `math`, which looks in the same places and compares alike; where none of them exists, the last line counts. For
    `reward.watch`, beside a reward that asks for one form.
    """
    return verify_math(case, _FLEXIBLE)


_FLEXIBLE = MathOptions(extract=("boxed", "hash", "answer_is", "last_line"))


def _join_boxes(boxes: Sequence[str]) -> tuple[str, ...]:
    """Several boxes as one list and as one tuple. A box that is nothing by itself, `(1`, joins nothing."""
    try:
        if len(boxes) < 2 or any(read_value(box) is None for box in boxes):
            return ()
    except TooLarge:
        return ()
    return ", ".join(boxes), f"({', '.join(boxes)})"


def _says(gold: str, reading: str, conventions: Conventions) -> bool:
    try:
        return compare_answers(gold, reading, conventions) is True
    except TooLarge:
        return False


@lru_cache(maxsize=4096)
def _gold(text: str) -> str | None:
    if "\\boxed" in text or "\\fbox" in text or "####" in text:
        text = find_answer(text, ("boxed", "hash")).text
    text = text.strip()
    return text if 0 < len(text) <= MAX_FORMULA else None


def gold_answer(given: Any) -> str | None:
    """The gold answer in `meta["answer"]`, None where there is none."""
    if is_number(given) and math.isfinite(given):
        return str(given)
    return _gold(given) if isinstance(given, str) else None


def _failure(reason: str, detail: str = "") -> Score:
    return Score(0.0, Outcome.FAILED, reason, detail=detail)


@cache
def _has_math_verify() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _may_ask(gold: str, answer: str) -> bool:
    """Whether both are short enough, and their numbers small enough, for math-verify to finish."""
    return not any(
        len(text) > MAX_ASKED or text.count("^") > 10 or text.count("{") > 40 or _HUGE.search(text)
        for text in (gold, answer)
    )


def _ask_math_verify(gold: str, answer: str, seconds: float) -> Score:
    from rlvr.reward.math.math_verify_workers import ask  # only where a pair is left undecided

    reply = ask(gold, answer, seconds)
    if reply.failure == "not_started":
        return Score(None, Outcome.ERROR, "no_worker", detail=reply.detail)
    if reply.failure == "timeout" or (not reply.failure and reply.value is None):
        return Score(0.0, Outcome.TIMEOUT, "timeout", detail=reply.detail or f"math-verify took {seconds:g} s")
    if reply.failure:
        return _failure("memory" if reply.failure == "died" else "undecided", f"{reply.failure}: {reply.detail}")
    return Score(1.0, Outcome.PASSED) if reply.value else _failure("wrong_value")
