"""Rewards on the form of a text: keywords, length and format. Each docstring is the formula.

Checks in this process take linear time; a user's regular expression runs in a guarded worker (`rlvr.sandbox`).
Keywords, lengths and formats are easy to satisfy without being right: they shape, they do not verify.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlvr.core.types import Score
from rlvr.reward.registry import register_reward
from rlvr.reward.reward_options import check_choice, check_integer, check_number, is_list
from rlvr.reward.signatures import Case
from rlvr.reward.text.guarded_rules import MAX_CHARS, rule_score
from rlvr.reward.text.json_schema import MAX_DEPTH, refuse_constant
from rlvr.reward.text.pattern import SECONDS, check_pattern, match_pattern


def count_of(number: int, units: str) -> str:
    """A number with its unit, which is given in the plural: 1 word, 2 words."""
    return f"{number:,} {units if number != 1 else units.removesuffix('s')}"


@dataclass(frozen=True)
class KeywordOptions:
    keywords: Sequence[str]
    mode: str = "any"

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, ("any", "all"))
        if not is_list(self.keywords) or not all(isinstance(k, str) and k for k in self.keywords):
            given = str(self.keywords)[:200]
            raise ValueError(f"keywords={given}, expected a non-empty list of words (a number in quotes)")


@register_reward("keyword_contains", options=KeywordOptions)
def keyword_contains(case: Case, options: KeywordOptions) -> float:
    """1.0 if the response contains any (`mode="any"`) or all (`mode="all"`) of the keywords, else -0.5.

    A keyword is found anywhere in the response, inside longer words too ("key" in "monkey"), and may hold spaces; upper
    and lower case are the same (both are compared in lower case). The prompt does not count. Passed at 1.0.
    """
    text = case.response.lower()
    return 1.0 if (any if options.mode == "any" else all)(k.lower() in text for k in options.keywords) else -0.5


@dataclass(frozen=True)
class LengthPenaltyOptions:
    target_length: int = 50
    penalty_per_token: float = 0.01

    def __post_init__(self) -> None:
        check_integer("target_length", self.target_length, 0)
        check_number("penalty_per_token", self.penalty_per_token, 0)


@register_reward("length_penalty", passed_at=0.0, options=LengthPenaltyOptions)
def length_penalty(case: Case, options: LengthPenaltyOptions) -> float:
    """max(-1, 1 - penalty_per_token * |n - target_length|) with n the response's words, split at white space.

    A token is such a word here, whatever the model's tokenizer makes of it; the prompt does not count. 1.0 at the
    target, `penalty_per_token` less for each word more or fewer, never below -1.0. Passed where it is not negative.
    """
    off_by = abs(len(case.response.split()) - options.target_length)
    return max(-1.0, 1.0 - options.penalty_per_token * off_by)


@dataclass(frozen=True)
class FormatOptions:
    """The last three only have an effect with `required_format="regex"`, and default to "full" and 1 second there."""

    required_format: str
    pattern: str | None = None
    match: str | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_choice("required_format", self.required_format, [*sorted(_FORMATS), "regex"])
        if self.required_format == "regex":
            check_pattern(self.pattern, self.match_mode, self.time_limit)
            return
        for name in ("pattern", "match", "seconds"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} has no effect with required_format={self.required_format!r}; leave it out, or set "
                    "required_format to 'regex'"
                )

    @property
    def match_mode(self) -> str:
        return "full" if self.match is None else self.match

    @property
    def time_limit(self) -> float:
        return SECONDS if self.seconds is None else self.seconds


@register_reward("format_compliance", batched=True, options=FormatOptions)
def format_compliance(cases: Sequence[Case], options: FormatOptions) -> list[Score]:
    """1.0 if the whole response has the format, else 0.0; over 100,000 characters nothing has.

    `json`: one JSON object or array and nothing else but white space (no code fence, no NaN), nested at most
    100 deep.
    `numbered_list`: at least half of the lines that are not blank are items `1. text` or `1) text`, and the items are
    numbered 1, 2, 3, ... in order.
    `regex`: Python's `re` matches `pattern` to the whole response, nothing stripped (`match="full"`), or to some part
    of it (`match="search"`). `.` matches no end of line unless the pattern begins with `(?s)`; `(?i)` ignores case.

    Patterns run in a guarded process. An answer on which one needs more than `seconds` or too much memory does not have
    the format (`timeout`, `memory`), unless the pattern fails on the task's reference too: then it is an error
    (`rule_timeout`, `rule_failed`). `seconds` (1.0) covers compiling the pattern, too. Once 20 answers of a batch in a
    row were late, the rest of the batch is not tried and is an error (`not_run`), which a training run's error budget
    counts.
    """
    if options.required_format != "regex":
        complies = _FORMATS[options.required_format]
        responses = [case.response for case in cases]
        return [rule_score("too_large") if len(r) > MAX_CHARS else _format_score(complies(r)) for r in responses]
    return match_pattern(cases, options, _format_score)


def _format_score(fits: bool) -> Score:
    return rule_score("" if fits else "wrong_format")


_MARK = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


def _is_deep(text: str) -> bool:
    """Whether brackets outside strings are nested deeper than MAX_DEPTH, too deep for the recursive JSON parser."""
    depth, quoted = 0, False
    for mark in _MARK.findall(text):
        if mark == '"':
            quoted = not quoted
        elif not quoted and mark in ("[", "{"):
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif not quoted and mark in ("]", "}"):
            depth -= 1
    return False


def _is_json(text: str) -> bool:
    if _is_deep(text):
        return False
    try:  # Numbers stay text: no digit string, however long, becomes an integer.
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=refuse_constant)
    except ValueError:  # a RecursionError is the caller's, whose stack is nearly full, and no verdict
        return False
    return isinstance(value, (dict, list))


_ITEM = re.compile(r"\s*([0-9]{1,6})[.)]\s+\S")


def _is_numbered_list(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    items = [int(found[1]) for found in map(_ITEM.match, lines) if found]
    return bool(items) and 2 * len(items) >= len(lines) and items == list(range(1, len(items) + 1))


_FORMATS = {"json": _is_json, "numbered_list": _is_numbered_list}
