"""Functions of exact values: an exact value where there is one, else an atom.

`python -m pytest tests/test_math_compare.py` exercises it.
"""

from __future__ import annotations

from fractions import Fraction

from rlvr.reward.math import algebra
from rlvr.reward.math.algebra import Function, Ratio, atom, number

TRIGONOMETRY = ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc")
_SINE_SQUARED = {Fraction(n, d): Fraction(q, 4) for n, d, q in ((0, 1, 0), (1, 6, 1), (1, 4, 2), (1, 3, 3), (1, 2, 4))}


def binomial(top: Ratio, bottom: Ratio) -> Ratio:
    n, k = top.rational, bottom.rational
    if n is None or k is None or n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
        raise ValueError("a binomial of no whole numbers")
    return algebra.factorial(top) / (algebra.factorial(bottom) * algebra.factorial(top - bottom))


def absolute(value: Ratio) -> Ratio:
    if value.rational is not None:
        return number(abs(value.rational))
    return atom(Function("abs", (value,)))


def floor_or_ceil(kind: str, value: Ratio) -> Ratio:
    exact = value.rational
    if exact is None:
        return atom(Function(kind, (value,)))
    return number(exact.__floor__() if kind == "floor" else exact.__ceil__())


def logarithm(base: Ratio, argument: Ratio) -> Ratio:
    exact = algebra.rational_logarithm(base.rational, argument.rational)
    return atom(Function("logbase", (base, argument))) if exact is None else number(exact)


def power(base: Ratio, exponent: Ratio) -> Ratio:
    """base^exponent; e to a multiple of i pi by Euler's formula, where the angle's sine and cosine are known."""
    if base == atom("e") and (turns := (exponent / (atom("i") * atom("pi"))).rational) is not None:
        sine, cosine = _sine(turns), _sine(turns + Fraction(1, 2))
        if sine is not None and cosine is not None:
            return cosine + atom("i") * sine
    return algebra.power(base, exponent)


def apply_function(name: str, argument: Ratio) -> Ratio:
    if name == "ln" and argument.rational == 1:
        return number(0)
    if name == "log":
        return logarithm(number(10), argument)
    if name in TRIGONOMETRY and (turns := (argument / atom("pi")).rational) is not None:
        return _of_angle(name, turns) or atom(Function(name, (argument,)))
    return atom(Function(name, (argument,)))


def _of_angle(name: str, half_turns: Fraction) -> Ratio | None:
    """Of a multiple of 30 or 45 degrees, exactly."""
    values = [_sine(half_turns), _sine(half_turns + Fraction(1, 2))]
    if values[0] is None or values[1] is None:
        return None
    sine, cosine = values[0], values[1]
    ratios = {"sin": (sine, 1), "cos": (cosine, 1), "tan": (sine, cosine), "cot": (cosine, sine)}
    ratios |= {"sec": (1, cosine), "csc": (1, sine)}
    if name not in ratios:
        return None
    top, bottom = (number(part) if isinstance(part, int) else part for part in ratios[name])
    return top / bottom  # at a pole: a division by zero, like any other


def _sine(half_turns: Fraction) -> Ratio | None:
    half_turns %= 2
    sign, half_turns = (-1, half_turns - 1) if half_turns >= 1 else (1, half_turns)
    square = _SINE_SQUARED.get(min(half_turns, 1 - half_turns))
    return None if square is None else number(sign) * algebra.power(number(square), number(Fraction(1, 2)))
