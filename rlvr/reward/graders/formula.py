"""The formula of a multi grader: arithmetic over the names of its graders.

    Formula.of("0.7 * correct + 0.3 * min(style, 1)", {"correct", "style"}).value({"correct": 1.0, "style": 0.5})

`+ - * /` and `^` (power, from the right), signs, parentheses, numbers, and `min max abs floor ceil exp sqrt log`
(natural logarithm). `-2^2` is -4, as in mathematics. The text may come from a client of a service: it is read once into
a program for a stack machine, without recursion; all numbers are floats, so no power grows without bound. A value that
is not a finite number is an error that names the operation, never a number. Left out on purpose: comparisons,
conditions, `%`, constants by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.core.registry import did_you_mean

MAX_FORMULA = 4_000  # characters
MAX_DEPTH = 50  # of parentheses, signs and powers inside each other
MANY = 100  # arguments
FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {  # with the largest number of arguments
    "abs": (abs, 1),
    "ceil": (math.ceil, 1),
    "exp": (math.exp, 1),
    "floor": (math.floor, 1),
    "log": (math.log, 1),
    "max": (lambda *values: max(values), MANY),
    "min": (lambda *values: min(values), MANY),
    "sqrt": (math.sqrt, 1),
}
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: function for name, (function, _) in FUNCTIONS.items()},
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "^": lambda a, b: a**b,
    "negate": lambda a: -a,
    "keep": lambda a: a,
}
_BINDING = {"+": 10, "-": 10, "*": 20, "/": 20, "negate": 30, "keep": 30, "^": 40}  # how tightly each binds
NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TOKEN = re.compile(
    r"(?P<number>\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)(?P<call>\s*\()?|\S",
    re.ASCII,
)

Step = float | str | tuple[str, int]  # a number, a grader's name, or (operation, number of arguments)


class NoFormulaValue(ArithmeticError):
    """The formula has no finite value for these scores."""


@dataclass(frozen=True)
class Formula:
    """A parsed formula. `steps` are its postfix form, evaluated on a stack."""

    text: str
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, text: object, names: Collection[str], where: str = "calculate_output") -> Formula:
        """Parse a formula over these names. ValueError with the field `where` and the place of the mistake."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}={text!r:.80}, expected a formula over {', '.join(sorted(names))}")
        if len(text) > MAX_FORMULA:
            raise ValueError(f"{where} has {len(text):,} characters, expected at most {MAX_FORMULA:,}")
        return cls(text, tuple(_read(text, sorted(names), where)))

    def value(self, scores: Mapping[str, float]) -> float:
        """The value of the formula; NoFormulaValue where that is not a finite number."""
        stack: list[float] = []
        for step in self.steps:
            if isinstance(step, tuple):
                name, count = step
                stack[-count:] = [_apply(name, stack[-count:])]
            else:
                stack.append(float(scores[step]) if isinstance(step, str) else step)
        (value,) = stack
        return value


def _apply(name: str, arguments: list[float]) -> float:
    try:
        value = _OPERATIONS[name](*arguments)
        if isinstance(value, complex):
            raise ValueError("a negative number to a fractional power")
        value = float(value)
        if not math.isfinite(value):
            raise ValueError("not a finite number")
    except (ArithmeticError, ValueError) as error:
        shown = ", ".join(f"{number:g}" for number in arguments)
        raise NoFormulaValue(f"{name}({shown}) has no value: {error.args[-1]}") from None
    return value


@dataclass
class _Frame:
    """An operation that waits for its operands, or an open parenthesis: after a function's name, or with none."""

    name: str
    binding: int = 0
    arity: int = 1  # of a function: arguments so far


def _read(text: str, graders: list[str], where: str) -> list[Step]:
    """Dijkstra's shunting yard (https://ir.cwi.nl/pub/9251): operands go out at once, operations when they bind."""
    steps: list[Step] = []
    waiting: list[_Frame] = []
    needs_operand = True

    def release(binding: int) -> None:
        while waiting and waiting[-1].binding >= binding:
            steps.append((waiting[-1].name, waiting.pop().arity))

    def refusal(shown: str, expected: str) -> ValueError:
        return ValueError(f"{where}: {text[:200]!r}: expected {expected}, found {shown}")

    for token in _TOKEN.finditer(text):
        sign, name = token[0], token["name"]
        here = f"{sign[:40]!r} at character {token.start()}"
        if needs_operand:
            if token["number"]:
                if not math.isfinite(number := float(sign)):
                    raise ValueError(f"{where}: the number {sign[:40]} is too large")
                steps.append(number)
            elif token["call"]:
                _check_name("calls", name, FUNCTIONS, "functions", where)
                waiting.append(_Frame(name))
            elif sign == "(":
                waiting.append(_Frame(sign))
            elif name:
                if name in FUNCTIONS:
                    raise refusal(here, "a grader's name; this is a function, which needs parentheses")
                _check_name("names", name, graders, "graders", where)
                steps.append(name)
            elif sign in "+-":
                waiting.append(_Frame("negate" if sign == "-" else "keep", _BINDING["negate"]))
            else:
                raise refusal(here, "a number, a grader's name, a function or '('")
            needs_operand = bool(token["call"]) or sign in ("(", "+", "-")
        elif sign in _BINDING:
            release(_BINDING[sign] + (sign == "^"))
            waiting.append(_Frame(sign, _BINDING[sign], 2))
            needs_operand = True
        elif sign in (",", ")"):
            release(1)
            if not waiting or (sign == "," and waiting[-1].name == "("):
                raise refusal(here, "an operator or the end")
            if sign == ",":
                waiting[-1].arity += 1
                needs_operand = True
            elif (frame := waiting.pop()).name != "(":
                most = FUNCTIONS[frame.name][1]
                if frame.arity > most:
                    raise ValueError(f"{where}: {frame.name} is given {frame.arity} values, expected at most {most}")
                steps.append((frame.name, frame.arity))
        else:
            raise refusal(here, "an operator, ')' or the end")
        if len(waiting) > MAX_DEPTH:
            raise ValueError(f"{where} is nested more than {MAX_DEPTH} deep")
    if needs_operand:
        raise refusal("its end", "a number, a grader's name, a function or '('")
    release(1)
    if waiting:
        raise refusal("its end", "')' or an operator")
    return steps


def _check_name(verb: str, name: str, known: Collection[str], kind: str, where: str) -> None:
    if name not in known:
        hint = did_you_mean(name, sorted(known))
        raise ValueError(f"{where} {verb} {name[:40]!r}{hint}; the {kind} are: {', '.join(known)}")
