"""The reward `math`: finds the final answer, and compares it with the gold by value.

    resolve_reward("math")("", "so x is \\boxed{0.5}", {"answer": "\\frac{1}{2}"})   # -> 1.0

An exact comparison decides nearly all pairs, in this thread. Others go to `math-verify` in one of a few guarded workers
(`ask_math_verify`). A worker loads sympy (about half a second) before it is given a pair, so a timeout is always the
fault of its own answer: the job counts the processor time of the pair, and the worker is killed where that does not end
it (a multiplication in C). A problem that an answer causes is a failure of the answer; a gold that cannot be compared
with itself makes the task `invalid`, and what fails on well-formed sides is an `error`. docs/verify/mathematics.md
lists the conventions.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from rlvr.core.types import Outcome, Score
from rlvr.reward.math.algebra import TooLarge
from rlvr.reward.math.compare import DECIMALS, PERCENT, UNITS, Conventions, compare_answers, find_gold_fault, has_values
from rlvr.reward.math.tails import join_tail
from rlvr.reward.math.values import read_value
from rlvr.reward.registry import register_reward
from rlvr.reward.reward_options import check_choice, check_number, is_list, is_number
from rlvr.reward.signatures import Case
from rlvr.reward.text.final_answer import MANY_BOXES, MAX_FORMULA, PLACES, find_answer
from rlvr.sandbox.warm_pool import WarmPool
from rlvr.sandbox.worker import Worker, WorkerReply

AUTO = ("boxed", "hash", "answer_is", "whole")
USE = ("auto", "never", "required")
PROFILES = ("strict", "lenient")
SECONDS = 0.5  # of processor time that math-verify has for a pair
# A tower of powers of numbers, an exponent of four digits, a large or bracketed factorial.
_HUGE = re.compile(r"\^[\s{(]*[0-9]+[\s})]*\^|\^[\s{(]*[0-9]{4}|(?:[0-9]{3}|[0-9!][\s})]+)\s*!")
MAX_ASKED = 300  # characters of either side that math-verify is given
WORKERS = 4  # at most, one per thread that asks; each holds about 100 MB
MEMORY = 512 << 20  # that each may use
GRACE_SECONDS = 1.2  # that a pair may take on top of its processor time: a kill costs more than waiting


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
        if not is_list(self.searched_places):
            raise ValueError(f"extract={self.extract!r}, expected 'auto' or a list of: {', '.join(PLACES)}")
        for place in self.searched_places:
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
    def searched_places(self) -> Sequence[str]:
        if isinstance(self.extract, str):
            return AUTO if self.extract == "auto" else (self.extract,)
        return self.extract


@register_reward("math", options=MathOptions, gold="answer", verifiable=True, reward_range=(0.0, 1.0))
def verify_math(case: Case, options: MathOptions) -> Score:
    """1.0 if the final answer of the response equals the gold in value, else 0.0.

    The gold is `meta["answer"]`: an answer, a solution with its box, or one with its `####` line. Where the answer is
    looked for, and what counts as equal: docs/verify/mathematics.md. Reasons: `no_answer`, `truncated`, `many_answers`,
    `wrong_value`, `too_large`, `unreadable`, `timeout`, `memory`. Of the task: `no_gold`, `unreadable_gold`. Of the
    verifier: `undecided` (both sides are well formed, their numbers agree, no comparison decides), `exception`,
    `no_worker`.
    """
    given = (case.meta or {}).get("answer")
    gold = gold_answer(given)
    if gold is None:
        fault = "is missing" if given is None else f"holds no answer: {str(given)[-200:]!r}"
        return Score(None, Outcome.INVALID, "no_gold", detail=f"meta['answer'] {fault}")
    answer = find_answer(case.response, options.searched_places, options.on_many_boxes)
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
            boxes = find_answer(case.response, options.searched_places, "join").boxes
            verdict = any(_says(gold, reading, lenient) for reading in (text, *_join_boxes(boxes))) or verdict
    except TooLarge as error:
        return _gold_fault(gold, options) or _failure("too_large", str(error))
    except Exception as error:
        return _gold_fault(gold, options) or _score_exception(text, error)
    if verdict is True:
        return Score(1.0, Outcome.PASSED)
    if verdict is None and _is_asked(options) and _may_ask(gold) and _may_ask(text):
        return _ask_math_verify(gold, text, options)
    if verdict is None:
        return _score_undecided(gold, text, options)
    return _gold_fault(gold, options) or _failure("wrong_value")


@register_reward("math_flexible", gold="answer", verifiable=True, reward_range=(0.0, 1.0))
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


def _is_asked(options: MathOptions) -> bool:
    return options.use_math_verify != "never" and _has_math_verify()


def _may_ask(text: str) -> bool:
    """Whether it is short enough, and its numbers small enough, for math-verify to finish."""
    return not (len(text) > MAX_ASKED or text.count("^") > 10 or text.count("{") > 40 or _HUGE.search(text))


def _gold_fault(gold: str, options: MathOptions) -> Score | None:
    """The verdict on the task, where its gold cannot be compared even with itself."""
    fault = find_gold_fault(gold)
    if fault == "unread" and _is_asked(options) and _may_ask(gold):
        reply = _ask_about_gold(gold, options.timeout_s)
        if isinstance(reply, Score):
            return reply
        fault = "" if reply else "math-verify does not read it either"
    if not fault:
        return None
    detail = f"meta['answer'] = {gold[:200]!r} can only be compared by its spelling ({fault}): write it as one formula"
    if fault == "unread":
        detail += ", or let math-verify read it: pip install 'rlvr[math]', use_math_verify=auto"
    return Score(None, Outcome.INVALID, "unreadable_gold", detail=detail)


@lru_cache(maxsize=4096)
def _ask_about_gold(gold: str, seconds: float) -> bool | Score:
    """Whether math-verify finds the gold equal to itself; a Score where no worker could start."""

    reply = ask_math_verify(gold, gold, float(seconds))
    return _no_worker(reply.detail) if reply.failure == "not_started" else reply.value is True


def _no_worker(detail: str) -> Score:
    return Score(None, Outcome.ERROR, "no_worker", detail=detail)


def _is_computable(text: str) -> bool:
    """Whether it is read here, and all of it has a number."""
    try:
        value = read_value(text)
        return value is not None and has_values(value)
    except Exception:
        return False


def _score_exception(text: str, error: Exception) -> Score:
    """An exception while comparing: ours, where the answer is well formed."""
    detail = f"{type(error).__name__}: {error}"[:300]
    return (
        Score(None, Outcome.ERROR, "exception", detail=detail)
        if _is_computable(text)
        else _failure("unreadable", detail)
    )


def _score_undecided(gold: str, text: str, options: MathOptions, reason: str = "undecided", detail: str = "") -> Score:
    """Neither comparison decides. Two sides that are both computed get here only where their numbers agree.

    So an answer cannot choose to end as an error: one that is not read, has no number or is too large has failed.
    """
    if fault := _gold_fault(gold, options):
        return fault
    if _is_computable(gold) and _is_computable(text):
        return Score(None, Outcome.ERROR, reason, detail=detail or "the numbers agree, and no comparison decides")
    if not _may_ask(text):
        return _failure("too_large", f"more than {MAX_ASKED} characters, or too many powers or groups, to be decided")
    if reason == "timeout":
        return Score(0.0, Outcome.TIMEOUT, reason, detail=detail)
    return _failure(reason if detail else "unreadable", detail)


def _ask_math_verify(gold: str, answer: str, options: MathOptions) -> Score:

    seconds = float(options.timeout_s)
    reply = ask_math_verify(gold, answer, seconds)
    if reply.failure == "not_started":
        return _no_worker(reply.detail)
    if reply.failure == "timeout" or (not reply.failure and reply.value is None):
        late = reply.detail or f"math-verify took {seconds:g} s"
        return _score_undecided(gold, answer, options, "timeout", late)
    if reply.failure:
        reason = "memory" if reply.failure == "died" else "undecided"
        return _score_undecided(gold, answer, options, reason, f"{reply.failure}: {reply.detail}")
    if reply.value:
        return Score(1.0, Outcome.PASSED)
    return _gold_fault(gold, options) or _failure("wrong_value")


def _worker_setup(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "paths": [path for path in sys.path if os.path.isabs(path)]}


@cache
def _worker_pool() -> WarmPool:
    return WarmPool(
        lambda: Worker("rlvr.reward.math.math_verify_job", memory=MEMORY), WORKERS, _worker_setup(0.0), None, spare=True
    )


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_worker_pool.cache_clear)


def ask_math_verify(gold: str, answer: str, seconds: float) -> WorkerReply:
    """math-verify's verdict on a pair: True, False, or None where it used up `seconds`; or a failure.

    The failure `not_started` is not the fault of the pair; every other is.
    """
    return _worker_pool().ask(_worker_setup(seconds), [gold, answer], seconds + GRACE_SECONDS)
