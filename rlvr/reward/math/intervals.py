"""Unions of intervals in one form: parts that touch or overlap are one, `[1,2] \\cup [2,3]` is `[1,3]`.

Ends are compared exactly where they are rational or equal, else in floating point with a margin; where the order of two
ends is unknown (a variable, a unit, nearly equal values) the parts stay as they were written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cmp_to_key

from rlvr.reward.math import algebra, numeric
from rlvr.reward.math.algebra import Ratio, atom
from rlvr.reward.math.kinds import OrderedItems, Quantity, UnorderedItems, Value

MARGIN = 1e-9  # of the larger value, by which floating-point values have to differ


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
