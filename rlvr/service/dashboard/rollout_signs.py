"""Signs of a reward that is earned without solving the task, as far as one stored rollout shows them.

A sign is a bit of `read_signs`; `rlvr.service.dashboard.suspicions` counts them and says what each means.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlvr.reward.text.final_answer import parse_number
from rlvr.service.dashboard.dashboard_data import VerifierVerdict, as_mapping, finite_number

WATCHED_FAILS, OTHER_NUMBER, NO_CONTENT, IS_PROMPT = 1, 2, 4, 8
ENDS_OTHERWISE = 16  # has the expected number, and ends with another one
HOLDS_ANSWER = 32  # no sign, but what excuses others: the expected answer is in the text
LOOKED_AT = 100_000  # characters of a completion, from its end
_FORM = re.compile(r"<[^<>]{0,80}>|\\[A-Za-z]{1,30}|[^\w]|_")
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?: ?/ ?[0-9]+)?")
_DIGITS = re.compile(r"[0-9]+")
_GROUPED = re.compile(r"(?<=[0-9])(?:,|\{,\}|\\[,!;]|[ \u2009\u202f\u00a0'_])(?=[0-9]{3}(?![0-9]))")


def read_signs(row: Mapping[str, Any], verdicts: list[VerifierVerdict]) -> int:
    """The signs of a stored rollout; the first verdict is the one that rewards."""
    if not verdicts:
        return 0
    if verdicts[0].outcome != "passed":
        is_paid = (finite_number(row.get("reward")) or 0) > 0
        return NO_CONTENT if is_paid and not _FORM.sub("", _read_text(row)) else 0
    signs = WATCHED_FAILS if any(one.outcome in ("failed", "timeout") for one in verdicts[1:]) else 0
    text = _read_text(row)
    expected = as_mapping(row.get("reference")).get("answer")
    expected = expected.strip() if isinstance(expected, str) else ""
    place = find_number(expected, text)
    if place in ("within", "last") or (not place and expected and _plain(expected) in _plain(text)):
        return signs | HOLDS_ANSWER | (ENDS_OTHERWISE if place == "within" else 0)
    if not _FORM.sub("", text):
        signs |= NO_CONTENT
    elif place == "nowhere":
        signs |= OTHER_NUMBER
    prompt = row.get("prompt")
    if isinstance(prompt, str) and len(prompt.strip()) > 1 and _plain(text).startswith(_plain(prompt)):
        rest = _plain(text)[len(_plain(prompt)) :]
        signs |= 0 if _FORM.sub("", rest) else IS_PROMPT
    return signs


def find_number(expected: str, text: str) -> str:
    """Where an expected integer is among the numbers of a text: "last", "within" or "nowhere"; "" for no integer, or
    a text without numbers."""
    number, written = parse_number(expected), _NUMBER.findall(_GROUPED.sub("", text))
    if number is None or number.denominator != 1 or not written:
        return ""
    if str(abs(number)) not in _DIGITS.findall(text) and abs(number) not in map(parse_number, written):
        return "nowhere"
    return "last" if parse_number(written[-1]) == abs(number) else "within"


def _read_text(row: Mapping[str, Any]) -> str:
    given = row.get("response"), row.get("answer")
    return "\n".join(part[-LOOKED_AT:] for part in given if isinstance(part, str))


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
