"""The final answer in a text, and numbers exactly. Linear time under a length cap: the text is a model's, so hostile.

No float, no unbounded `int()`, no exponent, no `eval`; ASCII digits only. Full mathematics (roots, units, sets,
intervals) is not here. `python -m pytest tests/test_reward_math.py` exercises it.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

MAX_TEXT = 100_000  # characters looked at, from the end: that is where a final answer stands
MAX_ANSWER = 200  # characters of an extracted answer
MAX_DIGITS = 100  # of one number

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(rf"([+-]?)\s?\$?\s?([+-]?)({_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:\s?/\s?([0-9]+))?\s?%?")
_UNIT = re.compile(r"\s?(?:[A-Za-z][^0-9+*/=^<>\\(){}\[\]-]*|\\text\{[^0-9\\{}]*\}\.?)")
_ANSWER_IS = re.compile(r"answer is\b[\s:=*$\\(\[]{0,8}", re.IGNORECASE | re.ASCII)
# What may follow the number after "answer is": closing marks, then the end, a word, or a space before no operator.
_ENDS = re.compile(
    r"(?:\*\*|\\[)\]]|[$)\]}\"'.,;:!?])*(?:$|(?=[A-Za-z]{2})|\s(?!\s*(?:[+*/^=<>]|-\s*[0-9(])))", re.ASCII
)
_TEX = (("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\,", ""), ("\\!", ""), ("\u2212", "-"))


def parse_number(text: str) -> Fraction | None:
    """An integer, decimal or fraction, exactly: `"$1,234.50."` is 2469/2; None for anything else.

    Allowed around it: white space, one `$` before, one `%` after (dropped: "20%" is 20, as GSM8K counts), a trailing
    period. Commas must group thousands. At most 100 digits.
    """
    text = text.strip()
    if len(text) > MAX_ANSWER:
        return None
    found = _NUMBER.fullmatch(text.removesuffix(".").rstrip())
    return _value(found) if found else None


def final_answer(text: str) -> Fraction | None:
    """The number a solution ends on, by the first rule that yields one:

    1. the rest of the line after the last `####`;  2. the last `\\boxed{...}`;
    3. the number after the last "answer is";  4. the whole text, if it is nothing but a number.

    After the number in 1 and 2, words without digits or operators are taken for its unit (`#### 18 dollars`).
    """
    text = text[-MAX_TEXT:]
    for found in (_hash_line(text), _last_box(text)):
        number = None if found is None else _with_unit(found)
        if number is not None:
            return number
    number = _after_answer_is(text)
    return parse_number(_plain(text)) if number is None else number


def _hash_line(text: str) -> str | None:
    at = text.rfind("####")
    return None if at < 0 else text[at + 4 :].partition("\n")[0]


def _last_box(text: str) -> str | None:
    """What stands between the braces of the last box; None where they do not close within the cap."""
    at = text.rfind("\\boxed{")
    if at < 0:
        return None
    start, depth = at + len("\\boxed{"), 1
    for i in range(start, min(len(text), start + MAX_ANSWER)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None


def _after_answer_is(text: str) -> Fraction | None:
    places = deque(_ANSWER_IS.finditer(text), maxlen=1)
    if not places:
        return None
    rest = _plain(text[places[0].end() : places[0].end() + MAX_ANSWER])
    found = _NUMBER.match(rest)
    return _value(found) if found and _ENDS.match(rest, found.end()) else None


def _with_unit(text: str) -> Fraction | None:
    text = _plain(text.strip())
    found = _NUMBER.match(text) if len(text) <= MAX_ANSWER else None
    if found is None:
        return None
    rest = text[found.end() :]
    return _value(found) if rest in ("", ".") or _UNIT.fullmatch(rest) else None


def _plain(text: str) -> str:
    for tex, plain in _TEX:
        text = text.replace(tex, plain)
    return text


def _value(found: re.Match[str]) -> Fraction | None:
    before, after, digits, denominator = found.groups()
    digits = digits.replace(",", "")
    if len(digits) + len(denominator or "") > MAX_DIGITS or (before and after):
        return None
    whole, _, decimals = digits.partition(".")
    value = Fraction(int((whole + decimals) or "0"), 10 ** len(decimals))
    if denominator is not None:
        if not int(denominator):
            return None
        value /= int(denominator)
    return -value if "-" in (before, after) else value
