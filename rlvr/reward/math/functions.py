"""Functions of exact values: an exact value where there is one, else an atom.

Multiples of 15 and 18 degrees that have plain square roots are exact; `decimals` compares the others.
"""

from __future__ import annotations

import math
from fractions import Fraction

from rlvr.reward.math import algebra
from rlvr.reward.math.algebra import Function, Ratio, atom, number
from rlvr.reward.math.decimals import evaluate

TRIGONOMETRY = ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc")
_ODD, _EVEN = ("sin", "tan", "cot", "csc", "arcsin", "arctan", "sinh", "tanh"), ("cos", "sec", "cosh")
HALF = Fraction(1, 2)
MAX_CHOSEN = 12  # of n, as a polynomial
# The sine of an angle in half turns, as (p, q, s): (sqrt(p) + s sqrt(q)) / 4.
_SINES = {Fraction(n, d): roots for n, d, roots in (
    (0, 1, (0, 0, 0)), (1, 12, (6, 2, -1)), (1, 10, (5, 1, -1)), (1, 6, (4, 0, 0)), (1, 4, (8, 0, 0)),
    (3, 10, (5, 1, 1)), (1, 3, (12, 0, 0)), (5, 12, (6, 2, 1)), (1, 2, (16, 0, 0)),
)}  # fmt: skip


def binomial(top: Ratio, bottom: Ratio) -> Ratio:
    n, k = top.rational, bottom.rational
    if n is None and k is not None and k.denominator == 1 and 0 <= k <= MAX_CHOSEN:  # n (n - 1) / 2
        return math.prod((top - number(i) for i in range(k.numerator)), start=number(1)) / algebra.factorial(bottom)
    if algebra.variables(top) or algebra.variables(bottom):
        return atom(Function("binom", (top, bottom)))
    if n is None or k is None or n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n:
        raise ValueError("a binomial coefficient needs whole numbers n and k with 0 <= k <= n")
    return algebra.factorial(top) / (algebra.factorial(bottom) * algebra.factorial(top - bottom))


def double_factorial(value: Ratio) -> Ratio:
    """n (n - 2) (n - 4) ..."""
    n = value.rational
    if n is None or n.denominator != 1 or n < 0:
        return atom(Function("double_factorial", (value,)))
    if n > algebra.MAX_FACTORIAL:
        raise algebra.TooLarge(f"the double factorial of {str(n)[:20]}, at most of {algebra.MAX_FACTORIAL}")
    return number(math.prod(range(n.numerator, 0, -2)))


def absolute(value: Ratio) -> Ratio:
    """The modulus of a constant; |c f| is |c| |f| for a formula f of variables, and |f| is |-f|."""
    if value.rational is not None:
        return number(abs(value.rational))
    if not algebra.opaque(value) and any("i" in algebra.atoms(part) for part in (Ratio(value.num), Ratio(value.den))):
        return algebra.power(_square(value.num) / _square(value.den), number(HALF))
    if not algebra.variables(value) and (size := evaluate(value)) is not None:
        return value if size >= 0 else -value
    scale = abs(value.num[0][1]) if value.num else Fraction(1)
    form = value * number(1 / scale) if value.num[0][1] > 0 else value * number(-1 / scale)
    return number(scale) * atom(Function("abs", (form,)))


def _square(terms: tuple[tuple[algebra.Mono, Fraction], ...]) -> Ratio:
    """x^2 + y^2 of a sum x + iy."""
    parts = [
        tuple(term for term in terms if (("i", Fraction(1)) in term[0]) == imaginary) for imaginary in (True, False)
    ]
    y, x = Ratio(parts[0]) / atom("i"), Ratio(parts[1])
    return x * x + y * y


def floor_or_ceil(kind: str, value: Ratio) -> Ratio:
    exact = value.rational
    if exact is None and not algebra.variables(value):
        rounded = evaluate(atom(Function(kind, (value,))))
        exact = None if rounded is None else Fraction(rounded)
    if exact is None:
        return atom(Function(kind, (value,)))
    return number(exact.__floor__() if kind == "floor" else exact.__ceil__())


def logarithm(base: Ratio, argument: Ratio) -> Ratio:
    if base == atom("e"):
        return apply_function("ln", argument)
    exact = algebra.rational_logarithm(base.rational, argument.rational)
    return atom(Function("logbase", (base, argument))) if exact is None else number(exact)


def power(base: Ratio, exponent: Ratio) -> Ratio:
    """base^exponent; e to a multiple of i pi by Euler's formula, where the angle's sine and cosine are known."""
    if base == atom("e") and (turns := (exponent / (atom("i") * atom("pi"))).rational) is not None:
        sine, cosine = _sine(turns), _sine(turns + Fraction(1, 2))
        if sine is not None and cosine is not None:
            return cosine + atom("i") * sine
    if len(exponent.num) == 1 and exponent.den == algebra.UNIT and len(exponent.num[0][0]) == 1:
        ((name, times),), scale = exponent.num[0]  # e^(ln a) is a, 2^(log_2 a) too, and e^(2 ln a) is a^2
        if times == 1 and isinstance(name, Function) and name.name in ("ln", "logbase"):
            inverse = atom("e") if name.name == "ln" else name.arguments[0]
            known = name.arguments[-1].num  # the logarithm of 0 is none
            if known and base == inverse and (scale == 1 or not algebra.variables(name.arguments[-1])):
                return algebra.power(name.arguments[-1], number(scale))
    return algebra.power(base, exponent)


def apply_function(name: str, argument: Ratio) -> Ratio:
    if name == "ln" and (exponent := _exponent_of_e(argument)) is not None:
        return number(exponent)
    if name == "log":
        return logarithm(number(10), argument)
    if name == "cis":
        return apply_function("cos", argument) + atom("i") * apply_function("sin", argument)
    if argument.num and argument.num[0][1] < 0 and (name in _ODD or name in _EVEN):
        mirrored = apply_function(name, -argument)
        return mirrored if name in _EVEN else -mirrored
    if name in TRIGONOMETRY and (turns := (argument / atom("pi")).rational) is not None:
        return _of_angle(name, turns) or atom(Function(name, (argument,)))
    return atom(Function(name, (argument,)))


def _exponent_of_e(value: Ratio) -> Fraction | None:
    if value.rational == 1:
        return Fraction(0)
    plain = len(value.num) == 1 and value.den == algebra.UNIT and value.num[0][1] == 1 and len(value.num[0][0]) == 1
    name, exponent = value.num[0][0][0] if plain else ("", Fraction(0))
    return exponent if name == "e" else None


def _of_angle(name: str, half_turns: Fraction) -> Ratio | None:
    """The function of an angle whose sine and cosine, as far as it needs them, have plain square roots."""
    sine, cosine = _sine(half_turns), _sine(half_turns + HALF)
    one = number(1)
    ratios = {"sin": (sine, one), "cos": (cosine, one), "tan": (sine, cosine), "cot": (cosine, sine)}
    ratios |= {"sec": (one, cosine), "csc": (one, sine)}
    top, bottom = ratios.get(name, (None, None))
    return None if top is None or bottom is None else top / bottom  # at a pole: a division by zero, like any other


def _sine(half_turns: Fraction) -> Ratio | None:
    half_turns %= 2
    sign, half_turns = (-1, half_turns - 1) if half_turns >= 1 else (1, half_turns)
    roots = _SINES.get(min(half_turns, 1 - half_turns))
    if roots is None:
        return None
    p, q, between = roots
    root = [algebra.power(number(n), number(HALF)) for n in (p, q)]
    return (root[0] + number(between) * root[1]) * number(Fraction(sign, 4))
