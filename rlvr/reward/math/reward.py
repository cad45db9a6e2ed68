"""The reward `math`: finds the final answer, and compares it with the gold by value.

    resolve_reward("math")("", "so x is \\boxed{0.5}", {"answer": "\\frac{1}{2}"})   # -> 1.0

An exact comparison of our own decides nearly all pairs, in this thread. What it cannot decide goes to `math-verify` in
a guarded worker that is killed when it is late. Whatever an answer does, its score is a failure, never an `error`.
docs/mathematics.md lists the conventions. `python -m pytest tests/test_math_reward.py` exercises it.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from rlvr.reward.extract import MANY_BOXES, MAX_FORMULA, PLACES, find_answer
from rlvr.reward.math.algebra import TooLarge
from rlvr.reward.math.compare import DECIMALS, PERCENT, UNITS, Conventions, same
from rlvr.reward.options import is_list, is_number, one_of
from rlvr.reward.registry import register_reward
from rlvr.types import Outcome, Score, Trajectory

Meta = dict[str, Any] | None
AUTO = ("boxed", "hash", "answer_is", "whole")
USE = ("auto", "never", "required")
SECONDS = 0.5  # of processor time that math-verify has for a pair
# A tower of powers of numbers, an exponent of four digits, a large or bracketed factorial.
_HUGE = re.compile(r"\^[\s{(]*[0-9]+[\s})]*\^|\^[\s{(]*[0-9]{4}|(?:[0-9]{3}|[0-9!][\s})]+)\s*!")
MAX_ASKED = 300  # characters of either side that math-verify is given


def _options(
    extract: str | Sequence[str] = "auto",
    on_many_boxes: str = "last",
    percent: str = "either",
    decimals: str = "exact",
    units: str = "optional",
    use_math_verify: str = "auto",
    timeout_s: float = SECONDS,
) -> dict[str, Any]:
    what = "reward 'math'"
    places = AUTO if extract == "auto" else (extract,) if isinstance(extract, str) else extract
    if not is_list(places):
        raise ValueError(f"{what}: extract={extract!r}, expected 'auto' or a list of: {', '.join(PLACES)}")
    for place in places:
        one_of(f"{what}: extract", place, PLACES)
    one_of(f"{what}: on_many_boxes", on_many_boxes, MANY_BOXES)
    one_of(f"{what}: percent", percent, PERCENT)
    one_of(f"{what}: decimals", decimals, DECIMALS)
    one_of(f"{what}: units", units, UNITS)
    one_of(f"{what}: use_math_verify", use_math_verify, USE)
    if not (is_number(timeout_s) and 0 < timeout_s <= 60 and math.isfinite(timeout_s)):
        raise ValueError(f"{what}: timeout_s={timeout_s!r}, expected a number above 0, at most 60")
    if use_math_verify == "required" and not _installed():
        raise ValueError(f"{what} with use_math_verify=required needs math-verify: pip install 'rlvr[math]'")
    return {
        "extract": tuple(places), "on_many_boxes": on_many_boxes, "percent": percent, "decimals": decimals,
        "units": units, "use_math_verify": use_math_verify, "timeout_s": float(timeout_s),
    }  # fmt: skip


@register_reward("math", prepare=_options, gold="answer", computes=True)
def verify_math(
    prompt: str,
    response: str,
    meta: Meta = None,
    trajectory: Trajectory | None = None,
    *,
    extract: str | Sequence[str] = AUTO,
    on_many_boxes: str = "last",
    percent: str = "either",
    decimals: str = "exact",
    units: str = "optional",
    use_math_verify: str = "auto",
    timeout_s: float = SECONDS,
) -> Score:
    """1.0 if the final answer of the response equals the gold in value, else 0.0.

    The gold is `meta["answer"]`: an answer, a solution with its box, or one with its `####` line. Where the answer is
    looked for, and what counts as equal: docs/mathematics.md. Reasons: `no_answer`, `truncated`, `many_answers`,
    `wrong_value`, `too_large`, `undecided` (no exact comparison, and math-verify cannot be asked), `timeout`, `memory`.
    """
    gold = gold_of((meta or {}).get("answer"))
    if gold is None:
        given = str((meta or {}).get("answer"))[-200:]
        return Score(None, Outcome.INVALID, "no_gold", detail=f"meta['answer'] holds no answer: {given!r}")
    found = find_answer(response, extract, on_many_boxes)
    if found.problem:
        cut = trajectory is not None and trajectory.truncated and found.problem in ("no_answer", "unclosed")
        return _failed("truncated" if cut else "no_answer" if found.problem == "unclosed" else found.problem)
    try:
        verdict = same(gold, found.text, Conventions(percent, decimals, units))
    except TooLarge as error:
        return _failed("too_large", str(error))
    except Exception as error:  # of the answer's making, whatever it is, so never an `error`
        return _failed("undecided", f"{type(error).__name__}: {error}"[:300])
    if verdict is not None:
        return _failed("wrong_value") if not verdict else Score(1.0, Outcome.PASSED)
    if use_math_verify == "never" or not _installed() or not _may_ask(gold, found.text):
        return _failed("undecided")
    return _asked(gold, found.text, timeout_s)


@lru_cache(maxsize=4096)
def _gold(text: str) -> str | None:
    if "\\boxed" in text or "\\fbox" in text or "####" in text:
        text = find_answer(text, ("boxed", "hash")).text
    text = text.strip()
    return text if 0 < len(text) <= MAX_FORMULA else None


def gold_of(given: Any) -> str | None:
    """The gold answer in what a task gives, None where there is none."""
    if is_number(given) and math.isfinite(given):
        return str(given)
    return _gold(given) if isinstance(given, str) else None


def _failed(reason: str, detail: str = "") -> Score:
    return Score(0.0, Outcome.FAILED, reason, detail=detail)


@cache
def _installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def _may_ask(gold: str, answer: str) -> bool:
    """Whether neither is so long, or asks for such large numbers, that math-verify would surely be killed over it."""
    return not any(
        len(text) > MAX_ASKED or text.count("^") > 10 or text.count("{") > 40 or _HUGE.search(text)
        for text in (gold, answer)
    )


def _asked(gold: str, answer: str, seconds: float) -> Score:
    from rlvr.reward.math.pool import ask  # only where a pair is left undecided

    reply = ask(gold, answer, seconds)
    if reply.failure == "not_started":
        return Score(None, Outcome.ERROR, "no_worker", detail=reply.detail)
    if reply.failure == "timeout" or (not reply.failure and reply.value is None):
        return Score(0.0, Outcome.TIMEOUT, "timeout", detail=reply.detail or f"math-verify took {seconds:g} s")
    if reply.failure:
        return _failed("memory" if reply.failure == "died" else "undecided", f"{reply.failure}: {reply.detail}")
    return Score(1.0, Outcome.PASSED) if reply.value else _failed("wrong_value")
