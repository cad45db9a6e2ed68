"""Whether two constants without a normal form are equal, by 120 digits: `\\tan 15^\\circ` and `2 - \\sqrt3`.

Equal means that they agree to 100 digits of what is added up; different, that they differ within the first 40. Between
the two, and where a value is unknown (a variable, a logarithm of a negative number), there is no verdict. Values are
complex, arguments of functions real but for `abs` and the exponent of a power.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from rlvr.reward.math.algebra import Atom, Function, Mono, Ratio

DIGITS = 120
EQUAL, DIFFERENT = Decimal("1e-100"), Decimal("1e-40")
MAX_ANGLE = Decimal("1e9")  # of a sine: reducing it costs as many digits as it has
MAX_EXPONENT = 10**6  # of ten, in a value on the way
_CONTEXT = decimal.Context(prec=DIGITS, Emax=MAX_EXPONENT, Emin=-MAX_EXPONENT, traps=[
    decimal.InvalidOperation, decimal.DivisionByZero, decimal.Overflow, decimal.Underflow,
])  # fmt: skip


class NoValue(ArithmeticError):
    """A part has no value here."""


@dataclass(frozen=True)
class _Number:
    """x + iy."""

    x: Decimal
    y: Decimal = Decimal(0)

    @property
    def size(self) -> Decimal:
        return (self.x * self.x + self.y * self.y).sqrt()

    def __add__(self, other: _Number) -> _Number:
        return _Number(self.x + other.x, self.y + other.y)

    def __sub__(self, other: _Number) -> _Number:
        return _Number(self.x - other.x, self.y - other.y)

    def __mul__(self, other: _Number) -> _Number:
        return _Number(self.x * other.x - self.y * other.y, self.x * other.y + self.y * other.x)

    def __truediv__(self, other: _Number) -> _Number:
        square = other.x * other.x + other.y * other.y
        up = self * _Number(other.x, -other.y)
        return _Number(up.x / square, up.y / square)

    @property
    def real(self) -> Decimal:
        """The value, where the imaginary part is rounding only."""
        if abs(self.y) > EQUAL * max(abs(self.x), EQUAL):
            raise NoValue("a complex number where only a real one is known")
        return self.x


def equal_constants(a: Ratio, b: Ratio) -> bool | None:
    """Whether two constants are equal; None where digits cannot tell."""
    try:
        with decimal.localcontext(_CONTEXT):
            (x, scale_x), (y, scale_y) = _value(a), _value(b)
            difference, scale = (x - y).size, max(scale_x, scale_y)
            if difference <= EQUAL * scale:
                return True
            return False if difference >= DIFFERENT * scale else None
    except (ArithmeticError, ValueError):
        return None


def evaluate(value: Ratio) -> Decimal | None:
    """A real constant to about 100 digits, None where it has no value here."""
    try:
        with decimal.localcontext(_CONTEXT):
            return _value(value)[0].real
    except (ArithmeticError, ValueError):
        return None


def _value(ratio: Ratio) -> tuple[_Number, Decimal]:
    """The value, and the size of the largest term that was added up for it."""
    top, high = _sum(ratio.num)
    bottom, low = _sum(ratio.den)
    if not bottom.size > EQUAL * low:
        raise NoValue("a denominator that may be zero")
    return top / bottom, high / bottom.size


def _sum(terms: tuple[tuple[Mono, Fraction], ...]) -> tuple[_Number, Decimal]:
    total, largest = _Number(Decimal(0)), Decimal(0)
    for mono, coefficient in terms:
        term = _Number(_real(coefficient))
        for name, power in mono:
            term = term * _power(_atom(name), _Number(_real(power)), power)
        total, largest = total + term, max(largest, term.size)
    return total, largest


def _real(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)


def _atom(name: Atom) -> _Number:
    if isinstance(name, int):
        return _Number(Decimal(name))
    if isinstance(name, Function):
        return _function(name)
    if name == "i":
        return _Number(Decimal(0), Decimal(1))
    if name == "pi":
        return _Number(_pi())
    if name == "e":
        return _Number(Decimal(1).exp())
    raise NoValue(f"{name} has no value")


def _power(base: _Number, exponent: _Number, exact: Fraction | None) -> _Number:
    if exact is not None and exact.denominator == 1:
        result, times = _Number(Decimal(1)), abs(exact.numerator)
        while times:
            result = result * base if times % 2 else result
            base, times = base * base if times > 1 else base, times // 2
        return result if exact >= 0 else _Number(Decimal(1)) / result
    if not base.y and base.x > 0:  # b^(u + iv) = b^u (cos(v ln b) + i sin(v ln b))
        size, angle = base.x**exponent.x, exponent.y * base.x.ln()
        return _Number(size * _sine(angle + _pi() / 2), size * _sine(angle)) if exponent.y else _Number(size)
    if exact is None:
        raise NoValue("a power of a number that is not positive")
    angle = _argument(base) * exponent.x  # the principal root
    size = base.size**exponent.x
    return _Number(size * _sine(angle + _pi() / 2), size * _sine(angle))


def _argument(value: _Number) -> Decimal:
    if not value.y:
        return _pi() if value.x < 0 else Decimal(0)
    quarter = _pi() / 2 if value.y > 0 else -_pi() / 2
    return quarter - _arctan(value.x / value.y)


@lru_cache(maxsize=512)  # a power of a sum repeats its functions in every term
def _function(function: Function) -> _Number:
    values = [_value(argument)[0] for argument in function.arguments]
    if function.name == "power":
        return _power(values[0], values[1], function.arguments[1].rational)
    if function.name == "abs":
        return _Number(values[0].size)
    if function.name not in _FUNCTIONS:
        raise NoValue(f"the function {function.name}")
    return _Number(_FUNCTIONS[function.name](*(value.real for value in values)))


@lru_cache(maxsize=1)
def _pi() -> Decimal:
    """Machin: pi = 16 arctan(1/5) - 4 arctan(1/239)."""
    with decimal.localcontext(_CONTEXT):
        return 16 * _series(1 / Decimal(5)) - 4 * _series(1 / Decimal(239))


def _series(x: Decimal) -> Decimal:
    """arctan of a small x."""
    total = term = x
    n, square = 1, x * x
    while abs(term) > Decimal(10) ** -(DIGITS + 5):
        term = -term * square
        n += 2
        total += term / n
    return total


def _arctan(x: Decimal) -> Decimal:
    halvings = 0
    while abs(x) > Decimal("0.1"):
        x = x / (1 + (1 + x * x).sqrt())
        halvings += 1
    return _series(x) * 2**halvings if x else x


def _arcsin(x: Decimal) -> Decimal:
    if abs(x) > 1:
        raise NoValue("the arcsine of a number above 1")
    return (_pi() / 2).copy_sign(x) if abs(x) == 1 else _arctan(x / (1 - x * x).sqrt())


def _sine(x: Decimal) -> Decimal:
    if abs(x) > MAX_ANGLE:
        raise NoValue("the sine of a large angle")
    x = x - 2 * _pi() * (x / (2 * _pi())).to_integral_value()
    total = term = x
    n, square = 1, x * x
    while abs(term) > Decimal(10) ** -(DIGITS + 5):
        term = -term * square / ((n + 1) * (n + 2))
        n += 2
        total += term
    return total


def _cosine(x: Decimal) -> Decimal:
    return _sine(x + _pi() / 2)


def _tangent(x: Decimal) -> Decimal:
    cosine = _cosine(x)
    if abs(cosine) < EQUAL:
        raise NoValue("a pole of the tangent")
    return _sine(x) / cosine


def _reciprocal(x: Decimal) -> Decimal:
    if abs(x) < EQUAL:
        raise NoValue("a pole")
    return 1 / x


def _logarithm(x: Decimal) -> Decimal:
    if x <= 0:
        raise NoValue("the logarithm of a number that is not positive")
    return x.ln()


def _whole(x: Decimal, rounding: str) -> Decimal:
    """The floor or ceiling; none of a number that may be a whole one, as rounding would decide."""
    if abs(x - x.to_integral_value()) < EQUAL * max(abs(x), 1):
        raise NoValue("a number too near to a whole one")
    return x.to_integral_value(rounding)


_FUNCTIONS: dict[str, Callable[..., Decimal]] = {
    "sin": _sine, "cos": _cosine, "tan": _tangent, "arcsin": _arcsin, "arctan": _arctan,
    "arccos": lambda x: _pi() / 2 - _arcsin(x), "cot": lambda x: _cosine(x) * _reciprocal(_sine(x)),
    "sec": lambda x: _reciprocal(_cosine(x)), "csc": lambda x: _reciprocal(_sine(x)),
    "sinh": lambda x: (x.exp() - (-x).exp()) / 2, "cosh": lambda x: (x.exp() + (-x).exp()) / 2,
    "tanh": lambda x: 1 - 2 / ((2 * x).exp() + 1), "ln": _logarithm,
    "logbase": lambda b, x: _logarithm(x) / _logarithm(b),
    "floor": lambda x: _whole(x, decimal.ROUND_FLOOR), "ceil": lambda x: _whole(x, decimal.ROUND_CEILING),
}  # fmt: skip
