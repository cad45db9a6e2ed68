"""Decide whether two answers are the same in value: True, False, or None where the exact comparison cannot decide."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from rlvr.reward.math import algebra, numeric
from rlvr.reward.math.algebra import Ratio, TooLarge, atom, number
from rlvr.reward.math.congruences import same_residue
from rlvr.reward.math.kinds import (
    ChoiceLetter,
    IntervalUnion,
    Matrix,
    OrderedItems,
    Quantity,
    Relation,
    Residue,
    TextValue,
    UnorderedItems,
    Value,
)
from rlvr.reward.math.real_sets import merge_intervals
from rlvr.reward.math.spelling import normalize, words
from rlvr.reward.math.units import ORDINAL
from rlvr.reward.math.values import read_value

PERCENT = ("either", "exact", "ignore")
DECIMALS = ("exact", "rounded")
UNITS = ("optional", "required", "ignored")
_PROSE = re.compile(
    r"\\(?:text|mbox|hbox|mathrm|textbf|textit)[a-z]*\s*\{|[A-Za-z]{2,} [A-Za-z]{2,}|\b(?:not|no|is|but)\b"
)
LONG_DECIMALS = 6  # that agree with a value which has no exact form here; math-verify looks at no more
MIN_DECIMALS = MIN_SIGNIFICANT = 2  # of an answer that may be a rounded one


@dataclass(frozen=True)
class Conventions:
    """What counts as the same where opinions differ; docs/verify/mathematics.md says what each option means.

    `any_names`: `a = 1, b = 2` says (1, 2) like `x = 1, y = 2`, in the order of the alphabet.
    """

    percent: str = "either"
    decimals: str = "exact"
    units: str = "optional"
    any_names: bool = False


_INDEXED = re.compile(r"([a-z](_[0-9]{1,2})?( |$))+|([A-Z](_[0-9]{1,2})?( |$))+")  # names of one case
_LETTER_UNIT = re.compile(r"[-+]?[0-9][0-9.]* (?:m|g|s|h|l|L)")


def compare_answers(gold: str, answer: str, conventions: Conventions) -> bool | None:
    """Whether the answer equals the gold. TooLarge where the answer is beyond the caps and the gold is not."""
    if gold == answer or normalize(gold) == normalize(answer):
        return True
    if (order := ORDINAL.fullmatch(normalize(gold))) and (said := ORDINAL.fullmatch(normalize(answer))):
        return order[1] == said[1]
    try:
        a = read_value(gold)
    except TooLarge:
        return False  # a gold beyond the caps is compared by its spelling alone
    b = read_value(answer)
    if a is None or b is None:
        if isinstance(a, (TextValue, ChoiceLetter)) or (
            a is not None and ("\\" not in answer or _PROSE.search(answer))
        ):
            return False  # not written as mathematics, or with words that math-verify would drop
        lost = (b is None and drops_part(answer, gold)) or (a is None and drops_part(gold, answer))
        return False if lost else None
    if isinstance(a, TextValue) and isinstance(b, TextValue):
        return a.words == b.words
    if isinstance(a, TextValue) or isinstance(b, TextValue):
        return words(normalize(gold)) == words(normalize(answer))
    a, b = _with_letter(gold, a, b), _with_letter(answer, b, a)
    algebra.reset_budget()
    return _same(a, b, conventions)


def has_values(value: Value) -> bool:
    """Whether every formula in the value can be computed, with made-up values for its variables."""
    match value:
        case Quantity() | Residue():
            return numeric.has_value(value.value)
        case Relation():
            return numeric.has_value(value.form)
        case OrderedItems() | UnorderedItems():
            return all(map(has_values, value.items))
        case IntervalUnion():
            return all(map(has_values, value.parts))
        case Matrix():
            return all(has_values(cell) for row in value.rows for cell in row)
        case _:
            return True


@lru_cache(maxsize=4096)
def find_gold_fault(gold: str) -> str:
    """Why no answer in another spelling can be compared with this gold: `unread`, or words; empty where one can."""
    try:
        value = read_value(gold)
        algebra.reset_budget()
        if value is None:
            return "unread"
        return "" if _same(value, value, Conventions()) is True else "it is not equal to itself"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


def _with_letter(text: str, value: Value, other: Value) -> Value:
    """`5 m` is five metres if the other side is a number without variables, else five times m."""
    if isinstance(other, Quantity) and not algebra.variables(other.value) and _LETTER_UNIT.fullmatch(normalize(text)):
        number_, _, letter = normalize(text).rpartition(" ")
        return read_value(f"{number_}\\text{{{letter}}}") or value
    return value


def _same(a: Value, b: Value, c: Conventions) -> bool | None:
    if isinstance(a, ChoiceLetter) or isinstance(b, ChoiceLetter):
        return _letter(a) == _letter(b) is not None
    if isinstance(a, UnorderedItems) and len(a.items) == 1 and not isinstance(b, UnorderedItems):
        return False
    if isinstance(a, Relation) and isinstance(b, Quantity) and b.name:
        b = Relation("=", atom(b.name) - b.value)
    elif isinstance(b, Relation) and isinstance(a, Quantity) and a.name:
        a = Relation("=", atom(a.name) - a.value)
    match a, b:
        case (IntervalUnion(), _) | (_, IntervalUnion()):
            return _unions(a, b, c)
        case Quantity(), Quantity():
            return _quantities(a, b, c)
        case OrderedItems(), OrderedItems():
            if (a.opening, a.closing) != (b.opening, b.closing) or (a.name and b.name and a.name != b.name):
                return False
            if a.opening == ":" and a.name != b.name and not _in_order_of_names((a.name or b.name).split(":")):
                return False  # 1:2 does not say of what, so its order would be a guess
            return _in_order(a.items, b.items, c)
        case UnorderedItems(), UnorderedItems():
            return _without_order(a.items, b.items, c)
        case OrderedItems(), UnorderedItems():
            return _in_order(a.items, _coordinates(b, a, c), c)
        case UnorderedItems(), OrderedItems():
            return _in_order(_coordinates(a, b, c), b.items, c)
        case Matrix(), Matrix():
            return len(a.rows) == len(b.rows) and _every(
                _in_order(x, y, c) for x, y in zip(a.rows, b.rows, strict=True)
            )
        case Matrix(), OrderedItems():
            return _vectors(a, b, c)
        case OrderedItems(), Matrix():
            return _vectors(b, a, c)
        case Relation(), Relation():
            return _relations(a, b)
        case Residue(), Residue():
            return same_residue(a, b)
        case _:
            return a == b


def _letter(value: Value) -> str | None:
    """The letter of a choice, in brackets or bare."""
    if isinstance(value, ChoiceLetter):
        return value.letter
    if isinstance(value, Quantity):
        names = algebra.variables(value.value)
        if len(names) == 1 and value.value == atom(name := next(iter(names))) and len(name) == 1:
            return name if name.isupper() else None
    return None


def _vectors(matrix: Matrix, point: OrderedItems, c: Conventions) -> bool | None:
    """A matrix of one column is the same vector as a tuple."""
    if (point.opening, point.closing) != ("(", ")") or any(len(row) != 1 for row in matrix.rows):
        return False
    return _in_order([row[0] for row in matrix.rows], point.items, c)


def _coordinates(given: UnorderedItems, point: OrderedItems, c: Conventions) -> list[Quantity]:
    """`x = 3, y = -1` as the items of the point (3, -1); none for letters whose order is unknown."""
    named = {item.name: replace(item, name="") for item in given.items if isinstance(item, Quantity)}
    names = sorted(named, key=_place)
    known = names in (["x", "y"], ["x", "y", "z"]) or (c.any_names and _INDEXED.fullmatch(" ".join(names)))
    fits = known and not given.either and len(given.items) == len(point.items) == len(names)
    return [named[name] for name in names] if fits and (point.opening, point.closing) == ("(", ")") else []


def _place(name: str) -> tuple[str, int, str]:
    """Where the alphabet has a name: a, b, x_2, x_10."""
    letters, _, index = name.partition("_")
    return letters, int(index) if index.isdecimal() else -1, index


def _in_order_of_names(names: Sequence[str]) -> bool:
    return list(names) == sorted(names, key=_place)


def _unions(a: Value, b: Value, c: Conventions) -> bool | None:
    """Unions and single intervals as sets, after joining what touches; a list of intervals only as it is written."""
    left, right = (side.parts if isinstance(side, IntervalUnion) else (side,) for side in (a, b))
    written = _without_order(left, right, c) if isinstance(a, IntervalUnion) and isinstance(b, IntervalUnion) else False
    if written or not all(
        isinstance(side, OrderedItems) or (isinstance(side, IntervalUnion) and side.joined) for side in (a, b)
    ):
        return written
    return _without_order(merge_intervals(left), merge_intervals(right), c)


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
    """As sets: an item that comes twice counts once."""
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
    if answer.doubtful and (gold.unit != answer.unit or not answer.unit):
        return False  # "5 is wrong" does not say 5
    differ = c.units != "ignored" and gold.unit != answer.unit
    if differ and ((gold.unit and answer.unit) or c.units == "required"):
        return False
    if differ and gold.percent != answer.percent and (answer.unit if gold.percent else gold.unit):
        return False  # 28 miles are not 28 %
    if gold.percent != answer.percent and gold.unit and answer.unit:
        return False  # nor are 28 people 28 % of people
    verdicts = [_equal(*pair, c) for pair in _readings(gold, answer, c)]
    if None in verdicts and max(gold.decimals or 0, answer.decimals or 0) >= LONG_DECIMALS:
        return False  # a value that is known to be no fraction here, and so many of its decimals: rounded
    return True if True in verdicts else None if None in verdicts else False


def _readings(gold: Quantity, answer: Quantity, c: Conventions) -> list[tuple[Ratio, Ratio, int | None]]:
    """The values to compare, and the decimals of the answer's.

    Where one side alone has a percent sign, a bare number up to 1 is a share (0.25 is 25%, never 0.25%), and a larger
    bare gold is a percentage without its sign (40 is 40%, never 4000%). So the sign of an answer has one meaning. A
    larger bare answer may be either: 1.5 and 150 both say 150%.
    """
    hundred, places = number(100), answer.decimals
    if gold.percent == answer.percent:
        return [(gold.value, answer.value, places)]
    bare = answer if gold.percent else gold
    size = None if algebra.variables(bare.value) else numeric.approximate(bare.value)
    share = size is not None and abs(size) <= 1
    readings: list[tuple[Ratio, Ratio, int | None]] = []
    if c.percent == "ignore" or (c.percent == "either" and not share):
        readings.append((gold.value, answer.value, places))
    if gold.percent and c.percent != "ignore":
        readings.append((gold.value / hundred, answer.value, places))
    elif c.percent == "exact" or (c.percent == "either" and share):
        readings.append((gold.value, answer.value / hundred, None if places is None else places + 2))
    return readings


def _symbol(name: str) -> bool:
    """Whether it is a name in a formula (`x`, `P(A)`) and not words of the problem (`The area`)."""
    return bool(name) and not re.search(r"[A-Za-z]{4}", name)


def _equal(gold: Ratio, answer: Ratio, decimals: int | None, c: Conventions) -> bool | None:
    exact = numeric.equal(gold, answer)
    if exact is not False or c.decimals == "exact" or decimals is None or decimals < MIN_DECIMALS:
        return exact
    given = answer.rational
    if given is None or algebra.variables(gold) or abs(given) * 10**decimals < 10 ** (MIN_SIGNIFICANT - 1):
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
        return None if algebra.opaque(quotient) and numeric.may_be_constant(quotient) else False
    return a.sign in ("=", "!=") or constant > 0


def _constant(a: Ratio, b: Ratio) -> Fraction | None:
    """c where a = c * b with a rational c."""
    guess = a.num[0][1] / b.num[0][1] if a.num[0][0] == b.num[0][0] else None
    if guess is None:
        return None
    return guess if numeric.equal(a, b * number(guess)) is True else None


# Whether math-verify would drop a part of a text and judge the rest: `\ne 5` and `5 \\ 6` are 5 to it. Only text that
# it computes with from end to end is handed over. So these are the commands that may stand in it; others are refused.
_FUNCTIONS = "log ln exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh int sum prod lim max min gcd"
_BETWEEN = "cdot times div pm mp to cup cap newline over choose"  # something has to stand on their right
_COMPUTED = frozenset(
    f"{_FUNCTIONS} {_BETWEEN} frac sqrt pi infty binom circ lfloor rfloor lceil rceil "
    "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi "
    "omega Gamma Delta Theta Lambda Sigma Phi Psi Omega "
    "lbrace rbrace langle rangle emptyset mathbb begin end le ge ne in".split()
)
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_MATRIX = re.compile(r"\\begin\{([a-zA-Z]?matrix|array)\}.*?\\end\{\1\}")
_STARTS = re.compile(
    rf"[*/^_,;:&|!'%]|\\(?:{'|'.join(_BETWEEN.replace(' pm', '').split())}|circ|pmod|bmod|mod)(?![A-Za-z])"
)
_STOPS = re.compile(rf"(?:[-+*/^_,;:&]|\\(?:{'|'.join((_BETWEEN + ' frac sqrt binom ' + _FUNCTIONS).split())}))\s*$")
_BARE = re.compile(r"\\(?:sum|prod|lim|max|min|gcd)(?!\s*[_(]|[A-Za-z])")  # of nothing
_RELATION = re.compile(r"[<>=~]|\\(?:le|ge|ne|in)(?![A-Za-z])")
_BELOW = re.compile(r"_\s*\{[^{}]*\}")  # `k = 1` under a sum
_NAMED = re.compile(r"^[A-Za-z](?:\([a-z]\))?\s*=")
_BUT = re.compile(r"^\\mathbb\s*\{R\}\s*\\(?:setminus|backslash)(?=\s*\\lbrace)")  # the one difference that is computed
# Infinity as a number, of which it says that its power of 0 is 1; not the end of a sum, an integral or a limit.
_INFINITE = re.compile(r"(?<![_^])(?<![_^]\{)(?<![_^]\{[-+])(?<!\\to)(?<!\\to )(?<!\\to[-+])(?<!\\to [-+])\\infty")
_BOUND = re.compile(r"(\\(?:sum|prod|int)\s*_\s*(?:\{[^{}]*\}|\w)\s*\^\s*)\\infty")  # what follows is under the sum
# `120^5\circ`, `145\pm^\circ`: a sign of degrees stands behind a number, alone in its exponent.
_NO_DEGREES = re.compile(
    r"\^\s*\{?[^\s{}\\]+\s*\\circ|(?<![\^{0-9\s])\s*\\circ|\\circ\s*\^"
    rf"|\\(?:{'|'.join((_BETWEEN + ' ' + _FUNCTIONS).split())})\s*\^?\s*\\circ"
)
_DROPPED = (  # unless the other side has it, too
    re.compile("[%#&?]"),
    re.compile(r"'|\.\.\."),
    re.compile(r"\^\s*\{?\s*[cC](?![A-Za-z])"),  # a complement
    _NO_DEGREES,
    re.compile(r"\\infty\s*[0-9A-Za-z({]|[0-9)}]\s*\\infty"),
    re.compile(r"(?<![\\A-Za-z])(?:and|or|not|no|is|but|if|[A-Za-z]{5,})(?![A-Za-z])"),
)


def drops_part(text: str, other: str) -> bool:
    """Whether math-verify, comparing `text` with `other`, would ignore a part of `text`."""
    if "\\phantom" in text or "\\hspace" in text:
        return True
    text, other = (_BOUND.sub(r"\1{\\infty}", normalize(one)) for one in (text, other))
    if text.count("$") > 1:
        return True  # formulas in prose: it would take one of them
    outside, others = _MATRIX.sub("M", text), _MATRIX.sub("M", other)
    if set(_COMMAND.findall(_BUT.sub("", text))) - _COMPUTED or "\\newline" in outside:
        return True
    if re.search(r"%[\s{}]*%", text) or _STARTS.match(text) or _STOPS.search(text) or _BARE.search(text):
        return True
    if any(text.count("\\l" + name) != text.count("\\r" + name) for name in ("floor", "ceil")):
        return True
    if any(sign.search(outside) and not sign.search(others) for sign in _DROPPED):
        return True
    if other.startswith(("(", "[", "]", "\\lbrace", "\\mathbb")) or "\\cup" in other:
        return False  # a set, which relations may describe as well
    if _INFINITE.search(text) and "\\infty" not in other and not _RELATION.search(other):
        return True
    related = set(_RELATION.findall(_NAMED.sub("", _BELOW.sub("", text))))
    return bool(related - set(_RELATION.findall(other))) or "\\cup" in text or "\\cap" in text
