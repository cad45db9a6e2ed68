"""Whether two values are the same: True, False, or None where this cannot be told here.

`python -m pytest tests/test_math_compare.py` exercises it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from rlvr.reward.math import algebra, numeric
from rlvr.reward.math.algebra import Ratio, TooLarge, atom, number
from rlvr.reward.math.intervals import merged
from rlvr.reward.math.kinds import Choice, Matrix, Ordered, Quantity, Relation, Text, Union, Unordered, Value
from rlvr.reward.math.losses import loses
from rlvr.reward.math.spelling import spelled, words
from rlvr.reward.math.values import read

PERCENT = ("either", "exact", "ignore")
DECIMALS = ("exact", "rounded")
UNITS = ("optional", "required", "ignored")
_PROSE = re.compile(
    r"\\(?:text|mbox|hbox|mathrm|textbf|textit)[a-z]*\s*\{|[A-Za-z]{2,} [A-Za-z]{2,}|\b(?:not|no|is|but)\b"
)
LONG_DECIMALS = 6  # that agree with a value which has no exact form here; math-verify looks at no more
MIN_DECIMALS = 2  # of an answer that may be a rounded one


@dataclass(frozen=True)
class Conventions:
    """What counts as the same where people disagree; docs/mathematics.md says what each means."""

    percent: str = "either"
    decimals: str = "exact"
    units: str = "optional"


_LETTER_UNIT = re.compile(r"[-+]?[0-9][0-9.]* (?:m|g|s|h|l|L)")


def same(gold: str, answer: str, conventions: Conventions) -> bool | None:
    """Whether the answer says what the gold says. TooLarge where the answer is beyond every cap and the gold is not."""
    if gold == answer or spelled(gold) == spelled(answer):
        return True
    try:
        wanted = read(gold)
    except TooLarge:
        return False  # only the same spelling is taken for a gold beyond the caps
    found = read(answer)
    if wanted is None or found is None:
        if isinstance(wanted, (Text, Choice)) or (wanted is not None and ("\\" not in answer or _PROSE.search(answer))):
            return False  # not written as mathematics, or with words that math-verify would drop
        lost = (found is None and loses(answer, gold)) or (wanted is None and loses(gold, answer))
        return False if lost else None
    if isinstance(wanted, Text) and isinstance(found, Text):
        return wanted.words == found.words
    if isinstance(wanted, Text) or isinstance(found, Text):
        return words(spelled(gold)) == words(spelled(answer))
    wanted, found = _with_letter(gold, wanted, found), _with_letter(answer, found, wanted)
    algebra.start()
    return _same(wanted, found, conventions)


def _with_letter(text: str, value: Value, other: Value) -> Value:
    """`5 m` is five metres beside a number without variables, else five times m."""
    if isinstance(other, Quantity) and not algebra.variables(other.value) and _LETTER_UNIT.fullmatch(spelled(text)):
        number_, _, letter = spelled(text).rpartition(" ")
        return read(f"{number_}\\text{{{letter}}}") or value
    return value


def _same(a: Value, b: Value, c: Conventions) -> bool | None:
    if isinstance(a, Choice) or isinstance(b, Choice):
        return _letter(a) == _letter(b) is not None
    if isinstance(a, Unordered) and len(a.items) == 1 and not isinstance(b, Unordered):
        return False
    if isinstance(a, Relation) and isinstance(b, Quantity) and b.name:
        b = Relation("=", atom(b.name) - b.value)
    elif isinstance(b, Relation) and isinstance(a, Quantity) and a.name:
        a = Relation("=", atom(a.name) - a.value)
    if isinstance(a, Union) or isinstance(b, Union):
        return _unions(a, b, c)
    if type(a) is not type(b):
        return _named(a, b, c) if {type(a), type(b)} == {Ordered, Unordered} else _vectors(a, b, c)
    if isinstance(a, Quantity) and isinstance(b, Quantity):
        return _quantities(a, b, c)
    if isinstance(a, Ordered) and isinstance(b, Ordered):
        if (a.opening, a.closing) != (b.opening, b.closing) or (a.name and b.name and a.name != b.name):
            return False
        return _in_order(a.items, b.items, c)
    if isinstance(a, Unordered) and isinstance(b, Unordered):
        return _without_order(a.items, b.items, c)
    if isinstance(a, Matrix) and isinstance(b, Matrix):
        if len(a.rows) != len(b.rows):
            return False
        return _every(_in_order(x, y, c) for x, y in zip(a.rows, b.rows, strict=True))
    if isinstance(a, Relation) and isinstance(b, Relation):
        return _relations(a, b)
    return a == b


def _letter(value: Value) -> str | None:
    """The letter of a choice, in brackets or bare."""
    if isinstance(value, Choice):
        return value.letter
    if isinstance(value, Quantity):
        names = algebra.variables(value.value)
        if len(names) == 1 and value.value == atom(name := next(iter(names))) and len(name) == 1:
            return name if name.isupper() else None
    return None


def _vectors(a: Value, b: Value, c: Conventions) -> bool | None:
    """A matrix of one column is the same vector as a tuple; nothing else of two kinds is the same."""
    if isinstance(a, Ordered) and isinstance(b, Matrix):
        a, b = b, a
    if isinstance(a, Matrix) and isinstance(b, Ordered) and all(len(row) == 1 for row in a.rows):
        column = [row[0] for row in a.rows]
        return _in_order(column, b.items, c) if (b.opening, b.closing) == ("(", ")") else False
    return False


def _named(a: Value, b: Value, c: Conventions) -> bool | None:
    """`x = 3, y = -1` is the point (3, -1): the letters of coordinates have an order of their own, others none."""
    point, given = (a, b) if isinstance(a, Ordered) else (b, a)
    if not (isinstance(point, Ordered) and isinstance(given, Unordered)) or (point.opening, point.closing) != (
        "(",
        ")",
    ):
        return False
    named = {item.name: replace(item, name="") for item in given.items if isinstance(item, Quantity)}
    if len(given.items) != len(point.items) or sorted(named) not in (["x", "y"], ["x", "y", "z"]):
        return False
    in_order = [named[name] for name in sorted(named)]
    return _in_order(point.items, in_order, c) if point is a else _in_order(in_order, point.items, c)


def _unions(a: Value, b: Value, c: Conventions) -> bool | None:
    """Unions and single intervals as sets, after joining what touches; a list of intervals only as it is written."""
    left, right = (side.parts if isinstance(side, Union) else (side,) for side in (a, b))
    written = _without_order(left, right, c) if isinstance(a, Union) and isinstance(b, Union) else False
    if written or not all(isinstance(side, Ordered) or (isinstance(side, Union) and side.joined) for side in (a, b)):
        return written
    return _without_order(merged(left), merged(right), c)


def _every(verdicts: Iterable[bool | None]) -> bool | None:
    doubt = False
    for verdict in verdicts:
        if verdict is False:
            return False
        doubt |= verdict is None
    return None if doubt else True


def _in_order(a: Sequence[Value], b: Sequence[Value], c: Conventions) -> bool | None:
    return len(a) == len(b) and _every(_same(x, y, c) for x, y in zip(a, b, strict=True))


def _without_order(a: Sequence[Value], b: Sequence[Value], c: Conventions) -> bool | None:
    """As sets: what is said twice counts once."""
    doubt = False
    for some, others in ((a, b), (b, a)):
        for value in some:
            verdicts = [_same(value, other, c) if some is a else _same(other, value, c) for other in others]
            if True not in verdicts:
                if None not in verdicts:
                    return False
                doubt = True
    return None if doubt else True


def _quantities(gold: Quantity, answer: Quantity, c: Conventions) -> bool | None:
    if gold.name != answer.name and _symbol(gold.name) and _symbol(answer.name):
        return False
    if gold.base and gold.base != answer.base:  # the problem named the base, so its digits alone will do
        return answer.base == 0 and c.units != "required" and gold.digits == answer.digits
    if gold.unit != answer.unit and answer.doubtful:
        return False  # "5 is wrong" does not say 5
    differ = c.units != "ignored" and gold.unit != answer.unit
    if differ and ((gold.unit and answer.unit) or c.units == "required"):
        return False
    hundred = number(100)
    pairs: list[tuple[Ratio, Ratio]] = []
    if gold.percent == answer.percent:
        pairs = [(gold.value, answer.value)]
    else:
        if c.percent != "exact":
            pairs.append((gold.value, answer.value))
        if c.percent != "ignore":
            marked = (gold.value / hundred, answer.value) if gold.percent else (gold.value, answer.value / hundred)
            pairs.append(marked)
    verdicts = [_equal(x, y, answer.decimals, c) for x, y in pairs]
    if None in verdicts and max(gold.decimals or 0, answer.decimals or 0) >= LONG_DECIMALS:
        return False  # a value that is known to be no fraction here, and so many of its decimals: rounded
    return True if True in verdicts else None if None in verdicts else False


def _symbol(name: str) -> bool:
    """Whether it is a name in a formula (`x`, `P(A)`), and not the problem's words (`The area`)."""
    return bool(name) and not re.search(r"[A-Za-z]{4}", name)


def _equal(gold: Ratio, answer: Ratio, decimals: int | None, c: Conventions) -> bool | None:
    exact = numeric.equal(gold, answer)
    if exact is not False or c.decimals == "exact" or decimals is None or decimals < MIN_DECIMALS:
        return exact
    given = answer.rational
    if given is None or algebra.variables(gold):
        return False
    half = Fraction(1, 2 * 10**decimals)
    if gold.rational is not None:
        return abs(gold.rational - given) <= half
    near = numeric.approximate(gold)
    return near is not None and abs(near - float(given)) <= float(half)


def _relations(a: Relation, b: Relation) -> bool | None:
    """Equal up to a factor: any for an equation, a positive number for an inequality."""
    if a.sign != b.sign or not a.form.num or not b.form.num:
        return a == b
    quotient = a.form / b.form
    constant = _constant(a.form, b.form)
    if constant is None:
        return None if numeric.opaque(quotient) else False
    return a.sign in ("=", "!=") or constant > 0


def _constant(a: Ratio, b: Ratio) -> Fraction | None:
    """c where a = c * b with a rational c."""
    guess = a.num[0][1] / b.num[0][1] if a.num[0][0] == b.num[0][0] else None
    if guess is None:
        return None
    return guess if numeric.equal(a, b * number(guess)) is True else None
