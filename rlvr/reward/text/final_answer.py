"""Find the final answer in a text, and read numbers exactly. Linear time under a length cap, as the text is hostile.

`find_answer` finds the text that a solution ends on; `final_answer` the number. No float, no unbounded `int()`, no
`eval`; ASCII digits only. What an answer means (roots, units, sets, intervals) is `rlvr.reward.math`'s business.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

MAX_TEXT = 100_000  # characters looked at, from the end: that is where a final answer stands
MAX_ANSWER = 200  # characters of an extracted answer
MAX_DIGITS = 100  # of one number
MAX_FORMULA = 1_000  # characters of an answer that is no mere number
MAX_BOXES = 1_000  # that are looked at, from the end
PLACES = ("boxed", "hash", "answer_is", "last_line", "whole")
MANY_BOXES = ("last", "first", "agree", "join")

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = re.compile(rf"([+-]?)\s?\$?\s?([+-]?)({_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:\s?/\s?([0-9]+))?\s?%?")
_ASKED = re.compile(r"#### (-?[0-9.,]+)")
_PLAIN_NUMBER = re.compile(rf"(-?)\$?({_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)")
_UNIT = re.compile(r"\s?(?:[A-Za-z][^0-9+*/=^<>\\(){}\[\]-]*|\\text\{[^0-9\\{}]*\}\.?)")
# Where the last of these stands, the answer follows: "the answer is", "Answer:", "the result was", and a line that is
# "Answer" and one formula.
_ANSWER = re.compile(
    r"(?:answer|result) (?:is|are|was)\b|\banswer\*{0,2}\s{0,3}:"
    r"|^[#* ]{0,8}(?:the |final |the final )?answer\*{0,2} {1,3}"
    r"(?=(?:\$[^$\n]{1,1000}\$|\\\((?:(?!\\\)).){1,1000}\\\))[*. ]{0,4}$)",
    re.IGNORECASE | re.ASCII | re.MULTILINE,
)
_OPENED = re.compile(r"[\s:=*$\\(\[]{0,8}")
_PERHAPS = r"\s+(?:(?:maybe|perhaps|possibly|probably|else|even|also|about)\s+)?"
# What may follow the number after it: closing marks, then the end, a word, or a space before no operator; not "or 6".
_ENDS = re.compile(
    rf"(?!(?:or|and){_PERHAPS}[-$*]{{0,3}}[0-9])"
    rf"(?:\*\*|\\[)\]]|[$)\]}}\"'.,;:!?])*"
    rf"(?:$|(?=[A-Za-z]{{2}})|\s(?!\s*(?:[+*/^=<>]|-\s*[0-9(]|(?:or|and){_PERHAPS}[-$*]{{0,3}}[0-9])))",
    re.ASCII | re.IGNORECASE,
)
# The end of a sentence that is no question.
_STOP = re.compile(rf"\.(?:\s|$|\*)|!(?:\s|$)|;(?!\s*(?:(?:or|and){_PERHAPS})?[-$\\0-9])(?:\s|$)")
_CLAUSE = re.compile(r",? (?:because|since|as|which|so|where|for|after|when)\b")
_GOES_ON = re.compile(r"\s*(?:[-+*/^=<>0-9]|,(?!\s+(?!and\b|or\b)[a-z]{2})|:\s*[0-9$\\]|and\b|or\b|\$|\\)")
_OTHER = re.compile(rf"\bor{_PERHAPS}(?:\$|\\|\*\*|-?[0-9])")  # a second answer, "$5$ apples or $6$ pears"
_BOLD_END = re.compile(r"(?<=\S)\*\*(?!\s*[-+({$\\]?\s*[0-9]|[\w({$\\])")  # of bold print, and no power: `5**2`
_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,5}(?:(\{)|([0-9A-Za-z])(?![A-Za-z]))")
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


def exact_decimal(digits: str) -> Fraction:
    """ASCII digits with at most one period, exactly. The caller has capped their number."""
    whole, _, decimals = digits.partition(".")
    return Fraction(int((whole + decimals) or "0"), 10 ** len(decimals))


def final_answer(text: str) -> Fraction | None:
    """The number a solution ends on, by the first rule that yields one:

    1. the rest of the line after the last `####`;  2. the last `\\boxed{...}`;
    3. the number after the last "answer is", "Answer:" or "result is", or after an "Answer" that one formula follows;
    4. the whole text, if nothing but a number.

    After the number in 1 and 2, words without digits or operators are taken for its unit (`#### 18 dollars`).
    """
    text = text[-MAX_TEXT:]
    for found in (_hash_line(text), *_boxes(text, 1)):
        number = None if found is None else _with_unit(found)
        if number is not None:
            return number
    number = _after_answer_is(text)
    return parse_number(_plain(text)) if number is None else number


def requested_number(text: str) -> Fraction | None:
    """The number right after the last `#### `, None unless it is written plainly: `18`, `1,234`; not `$18`, `18.00`."""
    places = deque(_ASKED.finditer(text[-MAX_TEXT:]), maxlen=1)
    found = _PLAIN_NUMBER.fullmatch(places[0][1]) if places else None
    number = _signed_value(found) if found else None
    return None if number is not None and number.denominator == 1 and "." in places[0][1] else number


def last_number(text: str) -> Fraction | None:
    """The last number of a text: `so 3 of the $1,234.50.` gives 2469/2."""
    places = deque(_PLAIN_NUMBER.finditer(_plain(text[-MAX_TEXT:])), maxlen=1)
    return _signed_value(places[0]) if places else None


@dataclass(frozen=True)
class ExtractedAnswer:
    """The answer's text, or why there is none: `no_answer`, `many_answers`, `too_large`, `unclosed` (a box).

    `boxes`: what `join` has joined. `tail`: what the sentence says after the formula or the words that are the answer.
    """

    text: str = ""
    problem: str = ""
    boxes: tuple[str, ...] = field(default=(), compare=False)
    tail: str = field(default="", compare=False)


def find_answer(text: str, places: Sequence[str], many: str = "last") -> ExtractedAnswer:
    """The answer that a solution ends on, from the first of `places` that exists.

    `boxed`: a `\\boxed{...}` or `\\fbox{...}`, chosen of several by `many`; `hash`: the line after the last `####`;
    `answer_is`: the sentence after the last "answer is"; `last_line`; `whole`: the text where it is one short line. The
    first place that exists decides, even if it is empty: an empty box is no answer, whatever the prose says. Text
    before the last `</think>` is ignored.
    """
    text = text[-MAX_TEXT:].rpartition("</think>")[2]
    for place in places:
        answer = _boxed_answer(text, many) if place == "boxed" else _PLACE[place](text)
        if answer is None:
            continue
        boxes, tail = (), ""
        if isinstance(answer, ExtractedAnswer):
            if answer.problem:
                return answer
            answer, boxes, tail = answer.text, answer.boxes, answer.tail
        answer = answer.strip()
        if len(answer) > MAX_FORMULA:
            return ExtractedAnswer(problem="too_large")
        return ExtractedAnswer(answer, "" if answer else "no_answer", boxes, tail)
    return ExtractedAnswer(problem="no_answer")


def _boxed_answer(text: str, many: str) -> str | ExtractedAnswer | None:
    boxes = [box for box in _boxes(text, 1 if many == "last" else MAX_BOXES)]
    if not boxes:
        return None
    if many in ("last", "first"):
        chosen = boxes[-1] if many == "last" else boxes[0]
        return ExtractedAnswer(problem="unclosed") if chosen is None else chosen
    closed = [box.strip() for box in boxes if box is not None]
    if len(closed) < len(boxes):
        return ExtractedAnswer(problem="unclosed")
    if many == "agree":
        return closed[-1] if len(set(closed)) == 1 else ExtractedAnswer(problem="many_answers")
    return ExtractedAnswer(", ".join(closed), boxes=tuple(closed))


def _boxes(text: str, most: int) -> list[str | None]:
    """The contents of the last `most` boxes, in order; None for one not closed within MAX_FORMULA characters."""
    boxes: list[str | None] = []
    places = deque(_BOX.finditer(text), maxlen=most)
    scanned = 0
    for place in places:
        if place.start() < scanned:
            continue  # a box inside a box
        inside = _text_in_braces(text, place.end(), MAX_FORMULA) if place[1] else place[2]
        boxes.append(inside)
        scanned = place.end() + len(inside or "")
    return boxes


def _text_in_braces(text: str, start: int, most: int) -> str | None:
    """The text from `start` to the closing brace; None if it is further than `most`. Escaped braces do not count."""
    depth, at, end = 1, start, min(len(text), start + most + 1)
    while at < end:
        sign = text[at]
        if sign == "\\":
            at += 2
            continue
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return text[start:at]
        at += 1
    return None


def _after_answer(text: str, most: int) -> str | None:
    """The next `most` characters after the last "answer is"."""
    places = deque(_ANSWER.finditer(text), maxlen=1)
    return text[places[0].end() : places[0].end() + most] if places else None


def _sentence(text: str) -> str | ExtractedAnswer | None:
    """The text after the last "answer is", up to the end of the sentence or line; the next line if that is empty."""
    rest = _after_answer(text, MAX_FORMULA)
    if rest is None:
        return None
    rest = rest.lstrip(" :=\r\n\t")
    if rest[:2] == "**" and rest[2:3].isspace():  # the end of "**Answer:**"
        rest = rest[2:].lstrip()
    line = rest.partition("\n")[0]
    if line.count("**") == 1 and _BOLD_END.search(line) and not _OTHER.search(line):  # the end of "**Answer: 5**"
        line = rest = line.partition("**")[0]
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**")):
        within = rest if opening in ("$$", "\\[") else line  # a display stands on lines of its own
        if within.startswith(opening) and (end := within.find(closing, len(opening))) > 0:
            tail = _STOP.split(within[end + len(closing) :].partition("\n")[0], 1)[0]
            head = _CLAUSE.split(tail, 1)[0]
            if not _GOES_ON.match(head) and not _OTHER.search(head):
                return ExtractedAnswer(within[len(opening) : end], tail=tail)
    sentence = _STOP.split(line, 1)[0]
    clause = _CLAUSE.search(sentence)
    at = clause.start() if clause else len(sentence)
    return ExtractedAnswer(sentence[:at], tail=sentence[at:])


def _last_line(text: str) -> str | None:
    return text.rstrip().rpartition("\n")[2] or None


def _one_line(text: str) -> str | None:
    """The whole text if it is one line of at most `MAX_ANSWER` characters."""
    text = text.strip()
    return text if 0 < len(text) <= MAX_ANSWER and "\n" not in text else None


def _hash_line(text: str) -> str | None:
    at = text.rfind("####")
    return None if at < 0 else text[at + 4 :].partition("\n")[0]


_PLACE = {"hash": _hash_line, "answer_is": _sentence, "last_line": _last_line, "whole": _one_line}


def _after_answer_is(text: str) -> Fraction | None:
    rest = _after_answer(text, MAX_ANSWER)
    if rest is None:
        return None
    rest = _plain(rest[_OPENED.match(rest).end() :])  # pyright: ignore[reportOptionalMemberAccess]
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


def _signed_value(found: re.Match[str]) -> Fraction | None:
    """The value of a match of `_PLAIN_NUMBER`."""
    digits = found[2].replace(",", "")
    if len(digits) > MAX_DIGITS:
        return None
    return -exact_decimal(digits) if found[1] else exact_decimal(digits)


def _value(found: re.Match[str]) -> Fraction | None:
    before, after, digits, denominator = found.groups()
    digits = digits.replace(",", "")
    if len(digits) + len(denominator or "") > MAX_DIGITS or (before and after):
        return None
    value = exact_decimal(digits)
    if denominator is not None:
        if not int(denominator):
            return None
        value /= int(denominator)
    return -value if "-" in (before, after) else value
