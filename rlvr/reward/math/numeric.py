"""Whether two closed forms are equal: exactly by the normal form; floating point can only show that they differ.
`python -m pytest tests/test_math_compare.py` exercises it.
"""

from __future__ import annotations

import cmath
import math
from fractions import Fraction

from rlvr.reward.math.algebra import Atom, Function, Mono, Ratio, product


def opaque(value: Ratio) -> bool:
    """Whether two such forms that differ may still be equal in value."""
    for side in (value.num, value.den):
        for mono, _ in side:
            for name, power in mono:
                if isinstance(name, Function) or (isinstance(name, str) and power.denominator != 1):
                    return True
    return False


def equal(a: Ratio, b: Ratio) -> bool | None:
    """Whether the values are equal; None where the normal form cannot tell and floating point finds no difference."""
    if a == b or product(a.num, b.den) == product(b.num, a.den):
        return True
    if not (opaque(a) or opaque(b)):
        return False
    for shift in (0.0, 0.37):
        x, y = approximate(a, shift), approximate(b, shift)
        if x is None or y is None:
            return None
        if abs(x - y) > 1e-7 * max(abs(x), abs(y), 1e-3):
            return False
    return None


def approximate(value: Ratio, shift: float = 0.0) -> complex | None:
    """A floating-point value, with made-up values for variables; None where there is none."""
    try:
        den = _approximate(value.den, shift)
        return _approximate(value.num, shift) / den
    except (ArithmeticError, ValueError):
        return None


def _approximate(side: tuple[tuple[Mono, Fraction], ...], shift: float) -> complex:
    total = 0j
    for mono, coefficient in side:
        product = complex(float(coefficient))
        for name, p in mono:
            product *= _float_of(name, shift) ** float(p)
        total += product
    return total


_CONSTANTS = {"pi": cmath.pi, "e": cmath.e, "i": 1j, "oo": math.inf}
_FUNCTIONS = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "arcsin": cmath.asin, "arccos": cmath.acos,
    "arctan": cmath.atan, "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh, "ln": cmath.log,
    "cot": lambda x: 1 / cmath.tan(x), "sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x),
    "abs": abs, "log": lambda x: cmath.log10(x), "exp": cmath.exp,
    "floor": lambda x: math.floor(x.real), "ceil": lambda x: math.ceil(x.real),
    "logbase": lambda b, x: cmath.log(x) / cmath.log(b), "power": lambda a, b: a**b,
}  # fmt: skip


def _float_of(name: Atom, shift: float) -> complex:
    if isinstance(name, int):
        return complex(name)
    if isinstance(name, Function):
        values = [approximate(argument, shift) for argument in name.arguments]
        if name.name not in _FUNCTIONS or None in values:
            raise ValueError(name.name)
        return complex(_FUNCTIONS[name.name](*values))
    assert isinstance(name, str)
    if name in _CONSTANTS:
        return complex(_CONSTANTS[name])
    return complex(0.5 + shift + 0.31 * (sum(map(ord, name)) % 97) / 7)  # a positive real: roots stay on one branch
