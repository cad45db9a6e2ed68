"""Read what an answer says into one small typed value.

`read_value("[0, 1)")` is `OrderedItems`, `read_value("5 \\text{ cm}")` a `Quantity`.

The kind of a value follows from its form alone, never from what it is compared with. docs/verify/mathematics.md
lists the conventions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from rlvr.reward.math import algebra, numeric
from rlvr.reward.math.algebra import Ratio, TooLarge, atom, number
from rlvr.reward.math.congruences import make_residue, remainder, split_congruence
from rlvr.reward.math.kinds import (
    ChoiceLetter,
    IntervalUnion,
    Matrix,
    OrderedItems,
    Quantity,
    Relation,
    TextValue,
    UnorderedItems,
    Value,
)
from rlvr.reward.math.parse import Reader, Unreadable
from rlvr.reward.math.real_sets import (
    all_reals,
    is_interval,
    make_complement,
    make_interval,
    make_union,
    solve_inequality,
)
from rlvr.reward.math.spelling import normalize, split, words
from rlvr.reward.math.units import CURRENCIES, ORDINAL, PERCENT_SIGN, SCALES, STOPS, unit_of

MAX_ITEMS = 200

_CHOICE = re.compile(
    r"(?:\\text\s*\{\s*)?\(\s*(?:\\text\s*\{\s*)?([A-Ja-j])\s*\}?\s*\)\s*\}?(?:(?=\s|\\)(?!.*[()]).*)?"
    r"|\\text\s*\{\s*([A-J])\s*\.?\s*\}|([A-J])[).:](?:\s.*)?",
    re.DOTALL,
)
# In a choice's own text ("(C) 42"): another choice, or a retraction.
_OTHER_CHOICE = re.compile(
    r"\b(?:[B-J]|not|no|nor|or|and|but|wrong|incorrect|false|either|neither|maybe|except)\b|n't\b|\b[A-J][.):]",
    re.IGNORECASE,
)
_TEXT = re.compile(r"(?:\\text\s*\{[^{}\\]*\}\s*)+")
_DATED = re.compile(r"(?:\\text\s*\{\s*)?[A-Z][a-z]{2,20} [0-9]{1,4}\s*\}?", re.IGNORECASE)  # "March 14"
_REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\\text\s*\{all real numbers\}|all real numbers")
_TIME = re.compile(r"([0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?)\s*(?:\\text\s*\{\s*)?([ap])\.?\s?m\b\.?\s*\}?", re.IGNORECASE)
_BUILT = re.compile(r"\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?[|:](.*)", re.DOTALL)
_ARRAY = re.compile(r"[(\[|]\s*\\begin\s*\{(array|(?:small)?matrix)\}.*\\end\s*\{\1\}\s*[)\]|]", re.DOTALL)
_SAID = frozenset(("yes", "no", "true", "false", "none", "all", "odd", "even"))  # no products of variables
_PROSE = re.compile(r"[A-Za-z][A-Za-z'. -]*")
_BASE = re.compile(
    r"(?:\(\s*([0-9][0-9A-Za-z]{0,200}|[0-9A-Z]{1,200})\s*\)"
    r"|(?:\\text\s*\{\s*)?([0-9][0-9A-Za-z]{0,200}|[0-9A-Z]{1,200})\}?)\s*"
    r"(?:_\s*\{?\s*(?:\\text\s*\{\s*)?([0-9]{1,2}|[a-z]{2,11})\s*\}*"
    r"|\s(?:\\text\s*\{\s*)?\(?(?:in )?base(?:[- ]|\s*\}\s*)([0-9]{1,2})\)?\s*\}?)"
)
_NAMED = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_BASE_NAMES = {name: base for base, name in enumerate(_NAMED, start=2)} | {"sixteen": 16}
ROUNDED = 0.1  # "pi is about 3" is half of that off
_ABOUT = re.compile(r"\\(?:approx|sim)(?![A-Za-z])")
_SIGNS = re.compile(r"\\(?:le|ge|ne|approx|equiv|sim)(?![A-Za-z])|[=<>]")
_ORDER = re.compile(r"\\(?:le|ge|ne|leq|geq|neq|lt|gt)(?![A-Za-z])|[<>]")
_POINT = r"[A-Z](?:_\{?\w{1,3}\}?)?'?\s*"
_SEGMENT = rf"\\overline\s*\{{\s*{_POINT}{_POINT}\}}"  # of letters of points: `|x| = 1` is an equation with two roots
_NAME = re.compile(
    r"\s*(?:\\text\s*\{[^{}=]*\}|(?:\\angle\s*|m\\angle\s*)?[A-Za-z]{1,3}(?:_\{?\w{1,5}\}?)?'?|\\[a-z]+"
    rf"|\|\s*(?:{_SEGMENT}|{_POINT}{_POINT})\s*\||{_SEGMENT}"
    r"|[A-Za-z]{1,3}\s*(?:\^\s*\{\s*-1\s*\}\s*)?\([^()=]{1,20}\)"
    r"|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z]){1,5}\s*\)|[A-Za-z]+(?: [A-Za-z]+){0,5})\s*"
)
_NEGATION = re.compile(r"\b(?:not|never|no|isn't|cannot)\b", re.IGNORECASE)
_ENVIRONMENT = re.compile(
    r"\\begin\s*\{([pbvB]?matrix|smallmatrix|array)\}(?:\s*\{[lcr|]*\})?(.*)\\end\s*\{\1\}", re.DOTALL
)
_PLAIN_DECIMAL = re.compile(r"[-+]?[0-9]*\.([0-9]+)")
_OPENING = {"(": "(", "[": "[", "]": "(", "\\langle": "("}  # ]0, 1[ is (0, 1)
_CLOSING = {")": ")", "]": "]", "[": ")", "\\rangle": ")"}
_SCALE = re.compile(rf"(?:\\text\s*\{{\s*)?({'|'.join(SCALES)})(?![A-Za-z-])", re.IGNORECASE)
_SUM = re.compile(r"(?<=[^\s])\s*[-+]|\\[pm][mp](?![A-Za-z])")  # "2 + 3 million" is not 5 million
_SHARE = re.compile(r"(?:\\text\s*\{\s*)?(?:of|per)\b")  # what may follow a percent sign: 28% miles is nothing
ORDERED = {**{sign: sign for sign in ("=", "<", ">")}, "\\le": "<=", "\\ge": ">=", "\\ne": "!="}


@lru_cache(maxsize=8192)
def read_value(text: str) -> Value | None:
    """The value that a text spells, None where its form is unknown. Raises TooLarge only."""
    algebra.reset_budget()
    text = normalize(text)
    try:
        return _read(text)
    except TooLarge:
        raise
    except (Unreadable, ValueError, ArithmeticError, RecursionError):
        return TextValue(words(text)) if _DATED.fullmatch(text) else None


def _read(text: str) -> Value | None:
    if not text:
        return None
    if match := _CHOICE.fullmatch(text):
        letter = next(filter(None, match.groups())).upper()
        return None if _OTHER_CHOICE.search(text[max(match.end(i) for i in (1, 2, 3)) :]) else ChoiceLetter(letter)
    if _TEXT.fullmatch(text):
        inner = words(text)
        if not any(sign.isdigit() for sign in inner):
            return TextValue(inner)
        text = " ".join(re.findall(r"\{([^{}]*)\}", text)).strip()
    if text.casefold() in _SAID:
        return TextValue(text.casefold())
    based = _BASE.fullmatch(text)
    if based and (value := _in_base(based[1] or based[2], based[3] or based[4])):
        return value
    if text in ("{}", "{ }", "\\emptyset", "\\lbrace \\rbrace", "\\lbrace\\rbrace"):
        return UnorderedItems(())
    if _REALS.fullmatch(text):
        return all_reals()
    if _ORDER.search(text) and len(split(text, (" and ",))) > 1:
        raise Unreadable("inequalities joined by `and`: both hold, so they are no list")
    parts = split(text, (",", ";", " or ", " and "))
    if len(parts) > 1 and not (_PROSE.fullmatch(text) and not _short(parts)):
        joined = "," not in text and ";" not in text and len(split(text, (" and ",))) == 1
        value = _read_list([part for part in parts if part.strip()], joined)
        if isinstance(value, UnorderedItems) and len(split(text, (" or ",))) > 1:
            return replace(value, either=True)
        return value
    return _single(text)


def _short(parts: list[str]) -> bool:
    """Whether all of them could be symbols rather than prose."""
    return all(len(part.strip()) <= 2 for part in parts)


def _single(text: str) -> Value | None:
    text = text.strip()
    member = split(text, ("\\in ",))
    if len(member) == 2 and _NAME.fullmatch(member[0]):
        return _read(member[1].strip())
    parts = split(text, ("\\cup", " U "))
    if len(parts) > 1:
        return make_union([_single(part) for part in parts])
    if congruence := split_congruence(text):
        forms = _expression(congruence.residue), _expression(congruence.modulus)
        return make_residue(congruence.name, *forms)
    if text.startswith("\\mathbb"):
        minuend, *others = split(text, ("\\setminus", "-"))
        if _REALS.fullmatch(minuend.strip()) and len(others) == 1:
            return make_complement(_single(others[0]))
    if "\\text" in text and (ordinal := ORDINAL.fullmatch(text)):
        return Quantity(number(int(ordinal[1])), "th", doubtful=True)
    if match := _TIME.fullmatch(text):
        return TextValue(f"{match[1]} {match[2].lower()}m")
    if text.startswith("\\lbrace") and text.endswith("\\rbrace"):
        return _read_set(text[7:-7])
    if _SIGNS.search(text):
        return _read_relation(text)
    bars = text.startswith("|") and text.endswith("|")
    if _ARRAY.fullmatch(text):
        text = text[1:-1].strip()
    if match := _ENVIRONMENT.fullmatch(text):
        rows = [row for row in re.split(r"\\newline(?![A-Za-z])", match[2].replace("\\hline", "")) if row.strip()]
        cells = tuple(tuple(_all(row.split("&"))) for row in rows)
        return Quantity(_determinant(cells)) if bars or match[1] == "vmatrix" else Matrix(cells)
    if re.fullmatch(r"[0-9. ]+(?::[0-9. ]+)+", text):  # a ratio or a time of day: as written, never divided
        return OrderedItems(":", ":", tuple(_all(text.split(":"))))
    dividend, *moduli = split(text, ("\\bmod",))
    if len(moduli) == 1:
        if re.search(r"[-+]", dividend):
            raise Unreadable("a remainder of a sum without brackets")
        return Quantity(number(remainder(_expression(dividend), _expression(moduli[0]))))
    bracketed = _read_brackets(text)
    if bracketed is not None:
        return bracketed
    if re.search(r"\\(pm|mp)(?![A-Za-z])", text):
        return UnorderedItems((_quantity(text, 1), _quantity(text, -1)))
    try:
        return _quantity(text)
    except Unreadable:
        if _PROSE.fullmatch(text) and len(text) > 1:
            return TextValue(words(text))
        raise


def _read_set(text: str) -> Value | None:
    """Read what stands between the braces of a set: elements (`1, 2`), or a condition (`x | x > 2`) as its interval."""
    built = _BUILT.fullmatch(text)
    if built is None:
        return _read_list(split(text, (",", ";")))
    value = _single(built[2])
    parts = value.parts if isinstance(value, IntervalUnion) else (value,)
    if not all(isinstance(part, OrderedItems) and part.name == built[1] for part in parts):
        raise Unreadable("the condition of a set is not an interval")
    return value


def _read_list(parts: list[str], joined: bool = False) -> Value | None:
    """A list or set; intervals `joined` by "or" are a union, others stay apart."""
    if len(parts) > MAX_ITEMS:
        raise TooLarge(f"{len(parts)} items, at most {MAX_ITEMS}")
    items: list[Value] = []
    for part, value in zip(parts, _all(parts), strict=True):
        if isinstance(value, UnorderedItems) and "\\lbrace" not in part:  # a plus-minus, not a set
            items.extend(value.items)
        else:
            items.append(value)
    if items and all(isinstance(item, IntervalUnion) or is_interval(item) for item in items):
        return make_union(items, joined)
    units = {item.unit for item in items if isinstance(item, Quantity)}
    if len(units) == 2 and "" in units:  # 3 and 5 cm
        unit = max(units)
        items = [replace(item, unit=unit) if isinstance(item, Quantity) else item for item in items]
    return UnorderedItems(tuple(items))


def _all(parts: Iterable[str]) -> list[Value]:
    values = [_single(part) for part in parts]
    if any(value is None for value in values):
        raise Unreadable("an item of the set or list cannot be read")
    return [value for value in values if value is not None]


def _determinant(rows: Sequence[Sequence[Value]]) -> Ratio:
    """By the first row; up to 4 x 4."""
    if not 0 < len(rows) <= 4 or any(len(row) != len(rows) for row in rows):
        raise Unreadable("a determinant that is not square, or too large")
    total = number(0)
    for at, cell in enumerate(rows[0]):
        if not isinstance(cell, Quantity) or cell.unit or cell.percent:
            raise Unreadable("a determinant of more than numbers")
        minor = [[*row[:at], *row[at + 1 :]] for row in rows[1:]]
        term = cell.value * (_determinant(minor) if minor else number(1))
        total = total - term if at % 2 else total + term
    return total


def _read_brackets(text: str) -> OrderedItems | None:
    """A tuple or interval, where brackets stand around commas."""
    for opening in _OPENING:
        if not text.startswith(opening):
            continue
        for closing in _CLOSING:
            if len(text) > len(opening + closing) and text.endswith(closing):
                parts = split(text[len(opening) : -len(closing)], (",", ";"))
                if len(parts) < 2 or len(parts) > MAX_ITEMS:
                    return None
                return make_interval(_OPENING[opening], _CLOSING[closing], _all(parts))
    return None


def _read_relation(text: str) -> Value | None:
    text, *rounded = (side.strip() for side in _ABOUT.split(text))
    if rounded:
        exact = _single(text)
        if not all(_near(exact, _single(side)) for side in rounded):
            raise Unreadable("the value after an approximation sign is not near the exact value")
        return exact
    signs = [ORDERED.get(match[0], match[0]) for match in _SIGNS.finditer(text)]
    sides = [side.strip() for side in _SIGNS.split(text)]
    if not signs:
        return _single(text)
    if set(signs) == {"="}:
        return _read_equation(sides)
    if len(signs) == 1:
        return solve_inequality(signs[0], _expression(sides[0]), _expression(sides[1]))
    if len(signs) == 2 and (set(signs) <= {"<", "<="} or set(signs) <= {">", ">="}):
        if signs[0][0] == ">":
            signs, sides = [s.replace(">", "<") for s in reversed(signs)], sides[::-1]
        low, middle, high = map(_expression, sides)
        if len(algebra.variables(middle)) == 1 and middle == atom(next(iter(algebra.variables(middle)))):
            opening, closing = "[" if signs[0] == "<=" else "(", "]" if signs[1] == "<=" else ")"
            name = next(iter(algebra.variables(middle)))
            return make_interval(opening, closing, (Quantity(low), Quantity(high)), name)
    raise Unreadable("several relations in a chain")


def _near(exact: Value | None, rounded: Value | None) -> bool:
    """Whether the second is the first, rounded; another unit is not converted."""
    if not (isinstance(exact, Quantity) and isinstance(rounded, Quantity)):
        return False
    if exact.unit and rounded.unit and exact.unit != rounded.unit:
        return True
    x, y = (numeric.approximate(side.value / number(100 if side.percent else 1)) for side in (exact, rounded))
    return x is not None and y is not None and abs(x - y) <= ROUNDED * abs(x)


def _read_equation(sides: list[str]) -> Value | None:
    """`x = 5` is the value 5 named x, `a:b = 1:2` the ratio named a:b, any other equation of names a `Relation`."""
    if len(sides) == 2 and "|" in sides[1] and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        sides = sides[::-1]  # 1 = |AB|
    names = sides[0].split(":")
    if "|" in sides[0] and "|" in sides[-1]:
        names = [""]  # |AB| = |CD| names no value
    if all(map(_NAME.fullmatch, names)) and not _NEGATION.search(sides[0]) and len(sides) >= 2:
        values = [_read(side) for side in sides[1:]]
        name = re.sub(r"\\overline|[{}|\s]", "", sides[0])
        if len(sides) == 2 and isinstance(values[0], Quantity) and name in algebra.variables(values[0].value):
            return Relation("=", atom(name) - values[0].value)
        if not all(value == values[0] for value in values[1:]):
            raise Unreadable("the sides of the equation have different values")
        value = values[0]
        if len(names) > 1:
            terms = name.replace("\\text", "").split(":")
            if not isinstance(value, OrderedItems) or value.opening != ":":
                raise Unreadable("the name of a ratio (a:b) before a value that is no ratio")
            if not len(set(terms)) == len(terms) == len(value.items):
                raise Unreadable("the names do not match the parts of the ratio")
            return replace(value, name=":".join(terms))
        if name.startswith("("):  # (x, y) = (4, 7): in the alphabet's order, else the gold's order would be a guess
            letters = re.findall("[A-Za-z]", name)
            fits = isinstance(value, OrderedItems) and len(value.items) == len(letters)
            if not fits or letters != sorted(set(letters)):
                raise Unreadable("the names do not match the coordinates")
        if isinstance(value, Quantity):
            return replace(value, name=name)
        return value
    forms = [_expression(side) for side in sides]
    if not any(algebra.variables(form) for form in forms):
        if any(numeric.equal(forms[0], form) is not True for form in forms[1:]):
            raise Unreadable("the sides of the equation have different values")
        return Quantity(forms[-1])
    if len(forms) != 2:
        raise Unreadable("several equations in a chain, a = b = c")
    return Relation("=", forms[0] - forms[1])


def _expression(text: str) -> Ratio:
    value = _quantity(text)
    if value.percent or value.doubtful:
        raise Unreadable("a side of the relation is more than one expression")
    return value.value


def _quantity(text: str, sign: int = 1) -> Quantity:
    unit, doubtful, text = "", False, text.strip()
    head = re.match(r"([-+]?)\s*([$\u20ac\u00a3\u00a5])\s*(?=[-0-9.\\(])", text)
    if head:
        unit = CURRENCIES[head[2]]
        text = head[1] + text[head.end() :]
    if text.startswith("\\text"):  # the words before a number: \text{Area } 5 is not read
        raise Unreadable("words stand before the number")
    reader = Reader(text, sign, STOPS)
    value = reader.expression()
    rest = text[reader.at :].strip()
    percent = PERCENT_SIGN.fullmatch(rest)
    scale = None if _SUM.search(text[: reader.at]) or algebra.variables(value) else _SCALE.match(rest)
    if percent:
        rest = (percent[1] or "").strip()
    elif scale:
        value = value * number(SCALES[scale[1].lower()])
        rest = rest[scale.end() :].strip(" {}")
    if rest:
        named = unit_of(rest)
        if named is None or algebra.variables(value):
            raise Unreadable(f"more after the number: {rest[:40]!r}")
        doubtful = not named[1] or bool(percent and (not _SHARE.match(rest) or PERCENT_SIGN.match(rest)))
        unit = unit or named[0]
    decimal = _PLAIN_DECIMAL.fullmatch(text[: reader.at].strip()) if not scale else None
    digits = text if text.isdigit() else ""
    return Quantity(value, unit, bool(percent), "", len(decimal[1]) if decimal else None, doubtful, digits)


def _in_base(digits: str, base: str) -> Quantity | None:
    radix = _BASE_NAMES.get(base) or (int(base) if base.isdigit() else 0)
    try:
        return Quantity(number(int(digits, radix)), digits=digits.upper(), base=radix) if radix > 1 else None
    except ValueError:  # no base, or not its digits: `A_2` is a name
        return None
