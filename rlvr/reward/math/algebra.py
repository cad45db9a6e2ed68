"""Exact closed forms: quotients of polynomials over variables, pi, e, i and fractional powers of primes.

A sum of products with rational coefficients is kept with every root split into prime powers below one, so two constants
are equal exactly when their terms are. Quotients are compared by multiplying across, never simplified. A value
without such a form (a sine, a root of a sum) is an atom of its own; `numeric.equal` knows where that leaves a doubt.
Everything is capped: `TooLarge` is raised instead of computing a number with a million digits.

Left out on purpose: simplification, calculus, anything that would need a search.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

MAX_BITS = 10_000  # of a numerator or denominator
MAX_TERMS = 150
MAX_POWER = 1_000  # of a whole exponent
MAX_FACTOR = 10_000  # by which numbers under a root are divided in search of their primes
MAX_FACTORIAL = 500
MAX_WEIGHT = 400  # of the terms inside a function
MAX_STEPS = 6_000  # of multiplying terms, between two calls of `reset_budget`

Atom = object  # an int (a prime), a str ("pi", "e", "i", "oo" or a variable) or a Function
Mono = tuple[tuple[Atom, Fraction], ...]
ONE = Fraction(1)


class TooLarge(ValueError):
    """A number or formula beyond the caps."""


class _Work(threading.local):
    left = MAX_STEPS


_work = _Work()


def reset_budget() -> None:
    """Reset this thread's budget of work, for one more answer."""
    _work.left = MAX_STEPS


@dataclass(frozen=True, eq=False)
class Function:
    """An atom: a function of arguments in normal form, not evaluated further.

    `text` spells it once and for all: equal functions have equal texts. `weight` counts the terms inside, also those
    of functions of functions, each time that they are written: a short nesting of powers would have billions.
    """

    name: str
    arguments: tuple[Ratio, ...]
    text: str = field(init=False)
    weight: int = field(init=False)

    def __post_init__(self) -> None:
        terms = [mono for argument in self.arguments for mono, _ in (*argument.num, *argument.den)]
        inner = (name for mono in terms for name, _ in mono)
        weight = len(terms) + sum(name.weight for name in inner if isinstance(name, Function))
        if weight > MAX_WEIGHT:
            raise TooLarge(f"a function of {weight} terms, at most {MAX_WEIGHT}")
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "text", f"{self.name}({', '.join(map(_spell, self.arguments))})")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


@dataclass(frozen=True)
class Ratio:
    """num / den, each a tuple of (monomial, coefficient) in a fixed order; den is never zero."""

    num: tuple[tuple[Mono, Fraction], ...]
    den: tuple[tuple[Mono, Fraction], ...] = (((), ONE),)

    @property
    def rational(self) -> Fraction | None:
        """The value where it is a rational number."""
        if not self.num:
            return Fraction(0)
        plain = self.den == UNIT and len(self.num) == 1 and not self.num[0][0]
        return self.num[0][1] if plain else None

    def __add__(self, other: Ratio) -> Ratio:
        if self.den == other.den:
            return _ratio(_sum(self.num, other.num), dict(self.den))
        crossed = _sum(tuple(product(self.num, other.den).items()), tuple(product(other.num, self.den).items()))
        return _ratio(crossed, product(self.den, other.den))

    def __neg__(self) -> Ratio:
        return Ratio(tuple((mono, -value) for mono, value in self.num), self.den)

    def __sub__(self, other: Ratio) -> Ratio:
        return self + -other

    def __mul__(self, other: Ratio) -> Ratio:
        for zero, factor in ((self, other), (other, self)):
            if not zero.num and any(name == "oo" for mono, _ in factor.num for name, _ in mono):
                raise ValueError("zero times infinity")
        return _ratio(product(self.num, other.num), product(self.den, other.den))

    def __truediv__(self, other: Ratio) -> Ratio:
        if not other.num:
            raise ValueError("division by zero")
        if "oo" in atoms(self) and "oo" in atoms(other):
            raise ValueError("infinity divided by infinity")
        return _ratio(product(self.num, other.den), product(self.den, other.num))


UNIT = (((), ONE),)


def number(value: Fraction | int) -> Ratio:
    return Ratio((((), Fraction(value)),) if value else ())


def atom(name: Atom, power: Fraction = ONE) -> Ratio:
    return Ratio(((((name, power),), ONE),))


def atoms(value: Ratio) -> set[Atom]:
    return {name for side in (value.num, value.den) for mono, _ in side for name, _ in mono}


def variables(value: Ratio) -> set[str]:
    """The names of variables in it, those inside functions too."""
    names: set[str] = set()
    for name in atoms(value):
        if isinstance(name, Function):
            names.update(*(variables(argument) for argument in name.arguments))
        elif isinstance(name, str) and name not in ("pi", "e", "i", "oo"):
            names.add(name)
    return names


def opaque(value: Ratio) -> bool:
    """Whether two such forms that differ may still be equal in value."""
    for side in (value.num, value.den):
        for mono, _ in side:
            for name, power in mono:
                if isinstance(name, Function) or (isinstance(name, str) and power.denominator != 1):
                    return True
    return False


def power(base: Ratio, exponent: Ratio) -> Ratio:
    q = exponent.rational
    if (base.rational == 1 and "oo" in atoms(exponent)) or ("oo" in atoms(base) and q == 0):
        raise ValueError("1 to the power of infinity, or infinity to the power of 0")
    if q is None:
        if base.rational == 1:
            return base
        return atom(Function("power", (base, exponent)))
    if q.denominator == 1:
        return _whole_power(base, q.numerator)
    return _fractional_power(base, q)


def _whole_power(base: Ratio, n: int) -> Ratio:
    if abs(n) > MAX_POWER:
        if base.rational in (0, 1, -1) and n > 0:
            return base if n % 2 else base * base
        raise TooLarge(f"an exponent of {str(n)[:20]}, at most {MAX_POWER}")
    if n < 0:
        base, n = number(1) / base, -n
    if len(base.num) <= 1 and len(base.den) <= 1:
        bits = max((_bits(value) for _, value in base.num), default=1)
        if bits > 1 and bits * n > 2 * MAX_BITS:
            raise TooLarge("a power of too many digits")
    elif n > 40:
        raise TooLarge(f"a sum to the power of {n}, at most 40")
    result = number(1)
    while n:
        if n & 1:
            result = result * base
        n >>= 1
        base = base * base if n else base
    return result


def _fractional_power(base: Ratio, q: Fraction) -> Ratio:
    if q.denominator > 100 or abs(q) > MAX_POWER:
        raise TooLarge("a root of too high a degree")
    if not base.num:
        return base if q > 0 else number(1) / base
    plain = base.den == UNIT and len(base.num) == 1
    mono, value = base.num[0]
    even = q.denominator % 2 == 0  # the root of x^3 is x^(3/2), that of x^2 is |x|
    simple = all(
        isinstance(name, int) or name in ("pi", "e") or (name != "i" and (p == 1 or (even and p % 2 == 1)))
        for name, p in mono
    )
    simple = simple and not any(isinstance(name, Function) for name, _ in mono)
    if not (plain and simple) or (value < 0 and q.denominator % 2 == 0 and q.denominator != 2):
        return atom(Function("power", (base, number(q))))
    result = _whole_power(number(-1), q.numerator % 2) if value < 0 and q.denominator % 2 else number(1)
    if value < 0 and q.denominator == 2:
        result = _whole_power(atom("i"), q.numerator % 4)
    for prime, times in (*_primes(abs(value.numerator)), *((p, -n) for p, n in _primes(value.denominator))):
        result = result * _prime_power(prime, times * q)
    for name, p in mono:
        result = result * (_prime_power(name, p * q) if isinstance(name, int) else atom(name, p * q))
    return result


def _prime_power(prime: int, q: Fraction) -> Ratio:
    whole = math.floor(q)
    if prime.bit_length() * abs(whole) > MAX_BITS:
        raise TooLarge("a power of too many digits")
    part = q - whole
    scale = number(Fraction(prime) ** whole)
    return scale * atom(prime, part) if part else scale


@lru_cache(maxsize=4096)
def _primes(n: int) -> tuple[tuple[int, int], ...]:
    """n as prime powers; TooLarge where the rest after small primes may not be prime."""
    powers: list[tuple[int, int]] = []
    divisor = 2
    if n.bit_length() > 200:
        raise TooLarge("a number under a root with too many digits")
    while divisor <= MAX_FACTOR and divisor * divisor <= n:
        times = 0
        while n % divisor == 0:
            n //= divisor
            times += 1
        if times:
            powers.append((divisor, times))
        divisor += 1 if divisor == 2 else 2
    if n > 1:
        root = math.isqrt(n)
        if n <= MAX_FACTOR * MAX_FACTOR:
            powers.append((n, 1))
        elif root * root == n and root <= MAX_FACTOR * MAX_FACTOR:
            powers.append((root, 2))
        else:
            raise TooLarge("a number under a root that is too large to take apart")
    return tuple(powers)


def rational_logarithm(base: Fraction | None, argument: Fraction | None) -> Fraction | None:
    """The logarithm where it is a rational number, else None."""
    if base is None or argument is None or base <= 0 or base == 1 or argument <= 0:
        return None
    powers = [
        dict((*_primes(n.numerator), *((p, -times) for p, times in _primes(n.denominator)))) for n in (base, argument)
    ]
    if argument == 1:
        return Fraction(0)
    if powers[0].keys() != powers[1].keys():
        return None
    quotients = {Fraction(powers[1][prime], times) for prime, times in powers[0].items()}
    return quotients.pop() if len(quotients) == 1 else None


def factorial(value: Ratio) -> Ratio:
    n = value.rational
    if n is None or n.denominator != 1 or n < 0:
        return atom(Function("factorial", (value,)))
    if n > MAX_FACTORIAL:
        raise TooLarge(f"the factorial of {str(n)[:20]}, at most of {MAX_FACTORIAL}")
    return number(math.factorial(n.numerator))


def _bits(value: Fraction) -> int:
    return max(abs(value.numerator).bit_length(), value.denominator.bit_length())


def _ratio(num: Mapping[Mono, Fraction], den: Mapping[Mono, Fraction]) -> Ratio:
    if not den:
        raise ValueError("division by zero")
    if not num:
        return Ratio(())
    if len(den) == 1:
        ((mono, value),) = den.items()
        if mono or value != 1:
            inverse = ((tuple((name, -p) for name, p in mono), 1 / value),)
            num = product(tuple(num.items()), inverse)
        return Ratio(_sort_terms(num))
    return Ratio(_sort_terms(num), _sort_terms(den))


def _sort_terms(terms: Mapping[Mono, Fraction]) -> tuple[tuple[Mono, Fraction], ...]:
    return tuple(sorted(terms.items(), key=lambda term: _key(term[0])))


def _key(mono: Mono) -> tuple[str, ...]:
    return tuple(f"{_name(name)}^{p}" for name, p in mono)


def _name(name: Atom) -> str:
    return f"{type(name).__name__}{name.text if isinstance(name, Function) else name}"


def _spell(value: Ratio) -> str:
    return "/".join(
        " + ".join(f"{coefficient}*{'*'.join(_key(mono))}" for mono, coefficient in side)
        for side in (value.num, value.den)
    )


def _sum(a: tuple[tuple[Mono, Fraction], ...], b: tuple[tuple[Mono, Fraction], ...]) -> dict[Mono, Fraction]:
    total = dict(a)
    for mono, value in b:
        total[mono] = total.get(mono, Fraction(0)) + value
        if not total[mono]:
            _forbid_infinity(mono)
            del total[mono]
        elif _bits(total[mono]) > MAX_BITS:
            raise TooLarge("a number of too many digits")
    return total


def product(a: tuple[tuple[Mono, Fraction], ...], b: tuple[tuple[Mono, Fraction], ...]) -> dict[Mono, Fraction]:
    if len(a) > MAX_TERMS or len(b) > MAX_TERMS:
        raise TooLarge(f"a sum of more than {MAX_TERMS} terms")
    total: dict[Mono, Fraction] = {}
    for left, x in a:
        for right, y in b:
            if not left and not right:
                mono, scale = (), ONE
            else:
                mono, scale = _times(left, right)
            value = total.get(mono, Fraction(0)) + x * y * scale
            _work.left -= 1 + _bits(value) // 256
            if _work.left < 0:
                raise TooLarge("a formula that takes too long to multiply out")
            if _bits(value) > MAX_BITS:
                raise TooLarge("a number of too many digits")
            if value:
                total[mono] = value
            else:
                _forbid_infinity(mono)
                total.pop(mono, None)
    return total


def _forbid_infinity(mono: Mono) -> None:
    if any(name == "oo" for name, _ in mono):
        raise ValueError("infinity minus infinity")


def _times(left: Mono, right: Mono) -> tuple[Mono, Fraction]:
    powers = dict(left)
    scale = ONE
    for name, p in right:
        powers[name] = powers.get(name, Fraction(0)) + p
    for name, p in list(powers.items()):
        if isinstance(name, int):
            whole = math.floor(p)
            scale *= Fraction(name) ** whole
            powers[name] = p - whole
        elif name == "oo" and not p:
            raise ValueError("infinity divided by itself")
        elif name == "i" and p.denominator == 1:
            turns = p.numerator % 4
            scale *= -1 if turns >= 2 else 1
            powers[name] = Fraction(turns % 2)
        elif abs(p) > MAX_POWER:
            raise TooLarge(f"an exponent over {MAX_POWER}")
    return tuple(sorted(((n, p) for n, p in powers.items() if p), key=lambda item: _name(item[0]))), scale
