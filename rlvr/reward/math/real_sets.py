"""Sets of real numbers: intervals, their unions, and inequalities: `2x + 1 > 5` is (2, oo), `|x - 2| < 3` is (-1, 5).

Inequalities of several variables, or not linear, stay a `Relation`. `merge_intervals` brings unions into one form:
parts that touch or overlap are one, `[1,2] \\cup [2,3]` is `[1,3]`. Ends are compared exactly where they are rational
or equal, else in floating point with a margin; where the order of two ends is unknown (a variable, a unit, nearly equal
values) the parts stay as they were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key
from itertools import pairwise

from rlvr.reward.math import algebra, numeric
from rlvr.reward.math.algebra import Function, Ratio, atom, number
from rlvr.reward.math.kinds import IntervalUnion, OrderedItems, Quantity, Relation, UnorderedItems, Value

INFINITY = atom("oo")
_MIRRORED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}
MARGIN = 1e-9  # of the larger value, by which floating-point values have to differ


def make_interval(opening: str, closing: str, items: Iterable[Value], name: str = "") -> OrderedItems:
    """A tuple or interval. Infinite ends are open, whatever the bracket."""
    items = tuple(items)
    first, last = items[0], items[-1]
    if isinstance(first, Quantity) and first.value == -INFINITY:
        opening = "("
    if isinstance(last, Quantity) and last.value == INFINITY:
        closing = ")"
    return OrderedItems(opening, closing, items, name)


def all_reals(name: str = "") -> OrderedItems:
    return make_interval("(", ")", (Quantity(-INFINITY), Quantity(INFINITY)), name)


def solve_inequality(sign: str, left: Ratio, right: Ratio) -> Value:
    """`left sign right` as an interval or union, if linear in a variable or in the absolute value of one."""
    form = left - right
    linear = _linear(form)
    if linear is not None:
        variable, slope, rest = linear
        sign, bound = sign if slope > 0 else _MIRRORED[sign], -rest / number(slope)
        if isinstance(variable, str):
            return _half_line(variable, sign, bound)
        inner = _linear(variable.arguments[0]) if variable.name == "abs" else None
        if inner is not None and isinstance(inner[0], str) and bound.rational is not None:
            return _of_absolute(inner[0], sign, (inner[1], inner[2]), bound)
    if sign[0] == ">":
        sign, form = _MIRRORED[sign], -form
    return Relation(sign, form)


def _linear(form: Ratio) -> tuple[str | Function, Fraction, Ratio] | None:
    """`(atom, slope, rest)` of slope * atom + rest, where no other part holds a variable."""
    if len(algebra.variables(form)) != 1 or form.den != algebra.UNIT:
        return None
    moving = [(mono, value) for mono, value in form.num if algebra.variables(Ratio(((mono, value),)))]
    if len(moving) != 1 or len(moving[0][0]) != 1 or moving[0][0][0][1] != 1:
        return None
    name, slope = moving[0][0][0][0], moving[0][1]
    if not isinstance(name, (str, Function)):
        return None
    return name, slope, form - atom(name) * number(slope)


def _half_line(name: str, sign: str, bound: Ratio) -> Value:
    below = make_interval("(", "]" if sign == "<=" else ")", (Quantity(-INFINITY), Quantity(bound)), name)
    above = make_interval("[" if sign == ">=" else "(", ")", (Quantity(bound), Quantity(INFINITY)), name)
    if sign == "!=":
        return IntervalUnion((below, above))
    return below if sign[0] == "<" else above


def _of_absolute(name: str, sign: str, inner: tuple[Fraction, Ratio], bound: Ratio) -> Value:
    """|slope * name + rest| against a rational bound."""
    slope, rest = inner
    ends = sorted((-1, 1), key=lambda side: side * slope)
    low, high = (Quantity((number(side) * bound - rest) / number(slope)) for side in ends)
    limit = bound.rational
    assert limit is not None
    if limit < 0 or (limit == 0 and sign in ("<", ">=")):
        return UnorderedItems(()) if sign[0] == "<" else all_reals(name)
    if sign == "<=" and limit == 0:
        return UnorderedItems((low,))
    if sign in ("<", "<="):
        opening, closing = ("[", "]") if sign == "<=" else ("(", ")")
        return make_interval(opening, closing, (low, high), name)
    closed = sign == ">="
    infinite = Quantity(-INFINITY), Quantity(INFINITY)
    outside = (
        make_interval("(", "]" if closed else ")", (infinite[0], low), name),
        make_interval("[" if closed else "(", ")", (high, infinite[1]), name),
    )
    if sign != "!=":
        return IntervalUnion(outside)
    between = () if limit == 0 else (make_interval("(", ")", (low, high), name),)
    return IntervalUnion((outside[0], *between, outside[1]))


def _without_points(points: Iterable[Value]) -> IntervalUnion:
    """The reals but for some rational points."""
    ends: set[Fraction] = set()
    for point in points:
        value = point.value.rational if isinstance(point, Quantity) and not (point.unit or point.percent) else None
        if value is None:
            raise ValueError("a point that is no rational number")
        ends.add(value)
    cuts = [-INFINITY, *(number(end) for end in sorted(ends)), INFINITY]
    pairs = pairwise(cuts)
    return IntervalUnion(tuple(make_interval("(", ")", (Quantity(low), Quantity(high))) for low, high in pairs))


def make_complement(value: Value | None) -> Value:
    """The reals without a finite set or a bounded interval."""
    if isinstance(value, UnorderedItems):
        return _without_points(value.items)
    if not isinstance(value, OrderedItems) or len(value.items) != 2:
        raise ValueError("the reals without what is no set")
    low, high = value.items
    below = make_interval("(", ")" if value.opening == "[" else "]", (Quantity(-INFINITY), low))
    above = make_interval("(" if value.closing == "]" else "[", ")", (high, Quantity(INFINITY)))
    return IntervalUnion((below, above))


def is_interval(value: Value | None) -> bool:
    return (
        isinstance(value, OrderedItems)
        and len(value.items) == 2
        and ((value.opening, value.closing) in (("[", ")"), ("(", "]")) or "oo" in _atoms(value))
    )


def _atoms(value: OrderedItems) -> set[object]:
    return {name for item in value.items if isinstance(item, Quantity) for name in algebra.atoms(item.value)}


def make_union(parts: Iterable[Value | None], joined: bool = True) -> IntervalUnion:
    flat: list[Value] = []
    for part in parts:
        if part is None:
            raise ValueError("a part of a union that is not known")
        flat.extend(part.parts if isinstance(part, IntervalUnion) else (part,))
    return IntervalUnion(tuple(flat), joined)


class _UnknownOrder(Exception):
    """It cannot be decided which of two ends is smaller."""


@dataclass(frozen=True)
class _Piece:
    low: Ratio
    high: Ratio
    closed: tuple[bool, bool]


def merge_intervals(parts: Sequence[Value]) -> Sequence[Value]:
    """The same set as intervals that neither touch nor overlap, in order; `parts` where that is undecidable."""
    names = {part.name for part in parts if isinstance(part, OrderedItems)}
    if len(names) != 1:
        return parts
    try:
        pieces = sorted((piece for part in parts for piece in _pieces(part)), key=cmp_to_key(_by_low))
        joined = pieces[:1]
        for piece in pieces[1:]:
            last = joined[-1]
            gap = _order(piece.low, last.high)
            if gap > 0 or (gap == 0 and not (piece.closed[0] or last.closed[1])):
                joined.append(piece)
                continue
            further = _order(piece.high, last.high)
            end = piece if further > 0 else last
            closed = end.closed[1] if further else piece.closed[1] or last.closed[1]
            joined[-1] = _Piece(last.low, end.high, (last.closed[0], closed))
    except _UnknownOrder:
        return parts
    name = names.pop()
    return [
        OrderedItems("[" if piece.closed[0] else "(", "]" if piece.closed[1] else ")", _ends(piece), name)
        for piece in joined
    ]


def _ends(piece: _Piece) -> tuple[Value, ...]:
    return Quantity(piece.low), Quantity(piece.high)


def _pieces(part: Value) -> list[_Piece]:
    """An interval, or the points of a set."""
    if not isinstance(part, (OrderedItems, UnorderedItems)):
        raise _UnknownOrder
    numbers = [item.value for item in part.items if isinstance(item, Quantity) and _is_plain(item)]
    if len(numbers) < len(part.items):
        raise _UnknownOrder
    if isinstance(part, UnorderedItems):
        return [_Piece(value, value, (True, True)) for value in numbers]
    if len(numbers) != 2 or part.opening not in ("(", "[") or _order(numbers[0], numbers[1]) >= 0:
        raise _UnknownOrder
    return [_Piece(numbers[0], numbers[1], (part.opening == "[", part.closing == "]"))]


def _is_plain(item: Quantity) -> bool:
    return not (item.unit or item.percent or item.name or item.base or algebra.variables(item.value))


def _by_low(a: _Piece, b: _Piece) -> int:
    """By the lower end, a closed one first."""
    return _order(a.low, b.low) or b.closed[0] - a.closed[0]


_INFINITE = {atom("oo"): 1, -atom("oo"): -1}


def _order(a: Ratio, b: Ratio) -> int:
    """-1, 0 or 1 as a is smaller than b, equal or larger."""
    if a == b:
        return 0
    if a in _INFINITE or b in _INFINITE:
        return 1 if _INFINITE.get(a, 0) > _INFINITE.get(b, 0) else -1
    if a.rational is not None and b.rational is not None:
        return 1 if a.rational > b.rational else -1
    if numeric.equal(a, b):
        return 0
    x, y = numeric.approximate(a), numeric.approximate(b)
    if (
        x is None
        or y is None
        or max(abs(x.imag), abs(y.imag)) > MARGIN
        or not abs(x - y) > MARGIN * max(abs(x), abs(y))
    ):
        raise _UnknownOrder
    return 1 if x.real > y.real else -1
