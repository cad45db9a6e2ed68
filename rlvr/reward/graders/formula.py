"""The formula of a multi grader: arithmetic over the names of its graders, by a parser of our own.

    Formula.of("0.7 * correct + 0.3 * min(style, 1)", {"correct", "style"}).value({"correct": 1.0, "style": 0.5})

`+ - * /` and `^` (power, from the right), signs, parentheses, numbers, and `min max abs floor ceil exp sqrt log`
(natural logarithm). `-2^2` is -4, as in mathematics. Parsing makes a program for a stack machine, so that neither depth
nor length can exhaust anything; all numbers are floats, so that no power grows without bound. A value that is no finite
number is an error that names the operation, never a number.
Left out on purpose: comparisons, conditions, `%`, constants by name. `python -m pytest tests/test_graders_formula.py`
exercises it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlvr.registry import nearest

MAX_FORMULA = 4_000  # characters
MAX_DEPTH = 50  # of parentheses, signs and powers in each other
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {  # with the least and the largest number of arguments
    "abs": (abs, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "exp": (math.exp, 1, 1),
    "floor": (math.floor, 1, 1),
    "log": (math.log, 1, 1),
    "max": (max, 1, 100),
    "min": (min, 1, 100),
    "sqrt": (math.sqrt, 1, 1),
}
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([A-Za-z_]\w*)|(\S))", re.ASCII)
_BINARY = {"+": 10, "-": 10, "*": 20, "/": 20, "^": 40}  # how tight each binds; a sign stands at 30
_SIGN = 30


class NoValue(ArithmeticError):
    """The formula has no finite value for these scores."""


@dataclass(frozen=True)
class Formula:
    """`code` is a program for a stack: numbers, names to look up, and (operation, number of arguments)."""

    text: str
    code: tuple[float | str | tuple[str, int], ...]

    @classmethod
    def of(cls, text: object, names: Collection[str], where: str = "calculate_output") -> Formula:
        """ValueError, naming the field and the character, for what is no formula over these names."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}={text!r:.80}, expected a formula over {', '.join(sorted(names))}")
        if len(text) > MAX_FORMULA:
            raise ValueError(f"{where} has {len(text):,} characters, expected at most {MAX_FORMULA:,}")
        parser = _Parser(text, names, where)
        parser.expression(0, 0)
        if parser.kind:
            parser.refuse("the end")
        return cls(text, tuple(parser.code))

    @property
    def names(self) -> set[str]:
        return {step for step in self.code if isinstance(step, str)}

    def value(self, scores: Mapping[str, float]) -> float:
        """What it comes to; NoValue where that is no finite number."""
        stack: list[float] = []
        for step in self.code:
            if isinstance(step, tuple):
                name, count = step
                given = [stack.pop() for _ in range(count)][::-1]
                stack.append(_applied(name, given))
            else:
                stack.append(float(scores[step]) if isinstance(step, str) else step)
        (value,) = stack
        return value


def _applied(name: str, given: list[float]) -> float:
    try:
        value = _OPERATIONS[name](*given)
        if isinstance(value, complex):
            raise ValueError("the power of a negative number by a fraction")
        value = float(value)
        if not math.isfinite(value):
            raise ValueError("not a finite number")
    except (ArithmeticError, ValueError) as error:
        shown = ", ".join(f"{number:g}" for number in given)
        raise NoValue(f"{name}({shown}) has no value: {error.args[-1]}") from None
    return value


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: function for name, (function, _, _) in FUNCTIONS.items()},
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "^": lambda a, b: a**b,
    "negate": lambda a: -a,
}
for _of_one in ("min", "max"):  # Python's own ask for two numbers or a list
    _OPERATIONS[_of_one] = lambda *given, function=FUNCTIONS[_of_one][0]: function(given)


@dataclass
class _Parser:
    """Pratt's: each operator binds its left side as tight as the table says."""

    text: str
    names: Collection[str]
    where: str
    code: list[float | str | tuple[str, int]] = field(default_factory=list)
    at: int = 0
    kind: str = ""  # of the token at hand: number, name, sign; empty at the end
    token: str = ""
    start: int = 0

    def __post_init__(self) -> None:
        self.next()

    def next(self) -> None:
        found = _TOKEN.match(self.text, self.at)
        if found is None:
            self.kind, self.token, self.start = "", "", len(self.text)
            return
        self.kind = ("number", "name", "sign")[(found.lastindex or 1) - 1]
        self.token, self.at, self.start = found[found.lastindex or 1], found.end(), found.start(found.lastindex or 1)

    def refuse(self, expected: str) -> None:
        found = f"{self.token[:40]!r} at character {self.start}" if self.kind else "its end"
        raise ValueError(f"{self.where}: {self.text[:200]!r}: expected {expected}, found {found}")

    def take(self, sign: str) -> bool:
        if self.kind == "sign" and self.token == sign:
            self.next()
            return True
        return False

    def expression(self, tight: int, depth: int) -> None:
        """Code for the longest expression from here whose operators bind tighter than `tight`."""
        if depth > MAX_DEPTH:
            raise ValueError(f"{self.where} is nested more than {MAX_DEPTH} deep")
        self.operand(depth)
        while self.kind == "sign" and _BINARY.get(self.token, 0) > tight:
            sign = self.token
            self.next()
            if sign == "^":  # from the right; a sign may stand in the exponent
                self.expression(_SIGN - 1, depth + 1)
            else:
                self.expression(_BINARY[sign], depth + 1)
            self.code.append((sign, 2))

    def operand(self, depth: int) -> None:
        token = self.token
        if self.kind == "number":
            self.next()
            number = float(token)
            if not math.isfinite(number):
                raise ValueError(f"{self.where}: the number {token[:40]} is too large")
            self.code.append(number)
        elif self.kind == "name":
            self.next()
            self.function(token, depth) if self.take("(") else self.grader(token)
        elif self.take("("):
            self.expression(0, depth + 1)
            if not self.take(")"):
                self.refuse("')' or an operator")
        elif self.take("-"):
            self.expression(_SIGN, depth + 1)
            self.code.append(("negate", 1))
        elif self.take("+"):
            self.expression(_SIGN, depth + 1)
        else:
            self.refuse("a number, a grader's name, a function or '('")

    def grader(self, name: str) -> None:
        if name not in self.names:
            known = sorted(self.names)
            hint = nearest(name, known) if name not in FUNCTIONS else ", a function, which needs parentheses"
            raise ValueError(f"{self.where} names {name[:40]!r}{hint}; the graders are: {', '.join(known)}")
        self.code.append(name)

    def function(self, name: str, depth: int) -> None:
        if name not in FUNCTIONS:
            hint = nearest(name, sorted(FUNCTIONS))
            raise ValueError(f"{self.where} calls {name[:40]!r}{hint}; the functions are: {', '.join(FUNCTIONS)}")
        _, least, most = FUNCTIONS[name]
        count = 0
        while True:
            self.expression(0, depth + 1)
            count += 1
            if not self.take(","):
                break
        if not self.take(")"):
            self.refuse("')', ',' or an operator")
        if not least <= count <= most:
            wanted = f"{least}" if least == most else f"{least} to {most}"
            raise ValueError(f"{self.where}: {name} is given {count} values, expected {wanted}")
        self.code.append((name, count))
