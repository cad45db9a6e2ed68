"""Whether two closed forms are equal: exactly by the normal form, constants without one by 100 digits.

Floating point can only show that two formulas differ.
"""

from __future__ import annotations

import cmath
import math
from fractions import Fraction
from functools import lru_cache

from rlvr.reward.math.algebra import Atom, Function, Mono, Ratio, atoms, opaque, product, variables
from rlvr.reward.math.decimals import equal_constants, evaluate


def equal(a: Ratio, b: Ratio) -> bool | None:
    """Whether the values are equal; None where the normal form cannot tell and floating point finds no difference."""
    if a == b or product(a.num, b.den) == product(b.num, a.den):
        return True
    if not (opaque(a) or opaque(b)):
        return False
    signed = any("abs(" in name.text for name in atoms(a) | atoms(b) if isinstance(name, Function))
    shifts = (0.0, 0.37, -9.3) if signed else (0.0, 0.37)  # |x| is x for the positive ones
    values = [(approximate(a, shift), approximate(b, shift)) for shift in shifts]
    if any(x is not None and y is not None and not _near(x, y) for x, y in values):
        return False
    if variables(a) or variables(b):
        known = [(x is None, y is None) for x, y in values]
        return False if (True, False) in known or (False, True) in known else None
    verdict = equal_constants(a, b)
    return False if verdict is None and has_value(a) != has_value(b) else verdict


def may_be_constant(value: Ratio) -> bool:
    """Whether the formula has one value in floating point, for all made-up values of its variables."""
    found = [x for x in (approximate(value, shift) for shift in (0.0, 0.37, -9.3)) if x is not None]
    return all(_near(x, found[0]) for x in found)


def _near(x: complex, y: complex) -> bool:
    return abs(x - y) <= 1e-7 * max(abs(x), abs(y), 1e-3)


def has_value(value: Ratio) -> bool:
    """Whether the formula can be computed, in floating point or in digits, with made-up values for its variables."""
    return approximate(value) is not None or evaluate(value) is not None


def approximate(value: Ratio, shift: float = 0.0) -> complex | None:
    """The value in floating point, with made-up values for variables; None if it is undefined or not finite."""
    try:
        result = _approximate(value.num, shift) / _approximate(value.den, shift)
        return result if cmath.isfinite(result) else None
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
    "binom": lambda n, k: math.gamma(n.real + 1) / math.gamma(k.real + 1) / math.gamma(n.real - k.real + 1),
    "factorial": lambda x: math.gamma(x.real + 1),
    "logbase": lambda b, x: cmath.log(x) / cmath.log(b), "power": lambda a, b: a**b,
}  # fmt: skip


@lru_cache(maxsize=512)  # a power of a sum repeats its functions in every term
def _function(function: Function, shift: float) -> complex:
    values = [approximate(argument, shift) for argument in function.arguments]
    if function.name not in _FUNCTIONS or None in values:
        raise ValueError(function.name)
    return complex(_FUNCTIONS[function.name](*values))


def _float_of(name: Atom, shift: float) -> complex:
    if isinstance(name, int):
        return complex(name)
    if isinstance(name, Function):
        return _function(name, shift)
    assert isinstance(name, str)
    if name in _CONSTANTS:
        return complex(_CONSTANTS[name])
    return complex(0.5 + shift + 0.31 * (sum(map(ord, name)) % 97) / 7)  # a positive real: roots stay on one branch
