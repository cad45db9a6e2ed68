"""A problem of `mini_mbpp` is a pipeline of steps: said as a sentence, written as Python in styles, and spoiled.

    steps = (Step("add", ("3",)), Step("multiply", ("4",)))
    write_statement(steps, key)          # "Write a function to add 3 to a number, then multiply the result by 4."
    write_program(steps, "solve", key)   # "def solve(x):\n    return (x + 3) * 4", or in another style
    write_flawed_program(steps, "solve", key, 0.4, 0.3)       # what an erring teacher writes instead

All draws are counted: the same key gives the same text. The steps come from a table of operations over numbers, lists
of numbers, and strings. An operation is written four times, by hand and independently of one another: in words, in
Python (several ways), as the function that computes what its tests expect (nothing is ever evaluated from text), and as
the parameters it takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rlvr.core import rng

NUMBER, LIST, STRING = "a number", "a list", "a string"
DIGITS = tuple("23456789")
LETTERS = tuple("abcdefghij")
STYLES = ("expression", "statements", "lambda")
NAMES = (
    *("answer", "apply", "build", "calculate", "change", "compute", "convert", "create", "derive", "evaluate"),
    *("find", "get", "handle", "helper", "make", "modify", "perform", "process", "produce", "result", "run", "solve"),
    *("transform", "work"),
)


@dataclass(frozen=True)
class Operation:
    """An operation of the made-up programs. `says` are ways to ask for it and `writes` to program it, with the operand
    as `{it}` and parameters `{0}`, `{1}`.

    `does(value, *parameters)` is the trusted reference. `parameters` lists what each may be. A `loose` expression needs
    parentheses around it inside another one.
    """

    name: str
    takes: str
    gives: str
    says: tuple[str, ...]
    writes: tuple[str, ...]
    does: Callable[..., Any]
    parameters: tuple[Sequence[str], ...] = ()
    loose: bool = False


def _operations() -> list[Operation]:
    n, xs, s = NUMBER, LIST, STRING
    digit, letter = (DIGITS,), (LETTERS,)
    return [
        # numbers
        Operation("add", n, n, ("add {0} to {it}", "increase {it} by {0}"), ("{it} + {0}", "{0} + {it}"),
                  lambda v, c: v + int(c), digit, loose=True),
        Operation("subtract", n, n, ("subtract {0} from {it}", "decrease {it} by {0}"), ("{it} - {0}",),
                  lambda v, c: v - int(c), digit, loose=True),
        Operation("multiply", n, n, ("multiply {it} by {0}", "find {0} times {it}"), ("{it} * {0}", "{0} * {it}"),
                  lambda v, c: v * int(c), digit, loose=True),
        Operation("remainder", n, n, ("find the remainder of {it} divided by {0}", "find {it} modulo {0}"),
                  ("{it} % {0}",), lambda v, c: v % int(c), digit, loose=True),
        Operation("divide", n, n, ("divide {it} by {0} and round down", "find how many times {0} fits into {it}"),
                  ("{it} // {0}",), lambda v, c: v // int(c), digit, loose=True),
        Operation("square", n, n, ("square {it}",), ("{it} ** 2", "pow({it}, 2)"), lambda v: v * v, loose=True),
        # lists to lists
        Operation("keep even", xs, xs, ("keep the even numbers of {it}", "remove the odd numbers from {it}"),
                  ("[v for v in {it} if v % 2 == 0]",), lambda v: [u for u in v if not u & 1]),
        Operation("keep odd", xs, xs, ("keep the odd numbers of {it}", "remove the even numbers from {it}"),
                  ("[v for v in {it} if v % 2 == 1]", "[v for v in {it} if v % 2]"), lambda v: [u for u in v if u & 1]),
        Operation("keep larger", xs, xs, ("keep the numbers larger than {0} of {it}",),
                  ("[v for v in {it} if v > {0}]",), lambda v, c: [u for u in v if u > int(c)], digit),
        Operation("keep smaller", xs, xs, ("keep the numbers smaller than {0} of {it}",),
                  ("[v for v in {it} if v < {0}]",), lambda v, c: [u for u in v if u < int(c)], digit),
        Operation("add to each", xs, xs, ("add {0} to each number of {it}", "increase each number of {it} by {0}"),
                  ("[v + {0} for v in {it}]",), lambda v, c: [u + int(c) for u in v], digit),
        Operation("multiply each", xs, xs, ("multiply each number of {it} by {0}",),
                  ("[v * {0} for v in {it}]",), lambda v, c: [u * int(c) for u in v], digit),
        Operation("sort", xs, xs, ("sort {it} in ascending order", "sort {it} from smallest to largest"),
                  ("sorted({it})",), lambda v: sorted(v)),
        Operation("sort down", xs, xs, ("sort {it} in descending order", "sort {it} from largest to smallest"),
                  ("sorted({it}, reverse=True)", "sorted({it})[::-1]"), lambda v: sorted(v, key=lambda u: -u)),
        Operation("reverse list", xs, xs, ("reverse {it}", "reverse the order of {it}"),
                  ("{it}[::-1]", "list(reversed({it}))"), lambda v: [v[-1 - i] for i in range(len(v))]),
        Operation("first of list", xs, xs, ("take the first {0} numbers of {it}",),
                  ("{it}[:{0}]",), lambda v, c: [u for i, u in enumerate(v) if i < int(c)], (DIGITS[:3],)),
        # lists to numbers
        Operation("sum", xs, n, ("find the sum of {it}", "add up {it}"), ("sum({it})",), lambda v: sum(v)),
        Operation("largest", xs, n, ("find the largest number of {it}", "find the maximum of {it}"),
                  ("max({it})", "sorted({it})[-1]"), lambda v: max(v)),
        Operation("smallest", xs, n, ("find the smallest number of {it}", "find the minimum of {it}"),
                  ("min({it})", "sorted({it})[0]"), lambda v: min(v)),
        Operation("count", xs, n, ("count the numbers of {it}", "find the length of {it}"),
                  ("len({it})",), lambda v: sum(1 for _ in v)),
        # strings to strings
        Operation("upper", s, s, ("convert {it} to upper case", "capitalize all letters of {it}"),
                  ("{it}.upper()",), lambda v: "".join(chr(ord(u) - 32) if "a" <= u <= "z" else u for u in v)),
        Operation("reverse string", s, s, ("reverse {it}", "reverse the order of {it}"),
                  ("{it}[::-1]", "''.join(reversed({it}))"), lambda v: "".join(v[-1 - i] for i in range(len(v)))),
        Operation("repeat", s, s, ("repeat {it} {0} times",), ("{it} * {0}",), lambda v, c: "".join([v] * int(c)),
                  digit, loose=True),
        Operation("replace", s, s, ("replace each '{0}' of {it} with '{1}'", "change each '{0}' of {it} to '{1}'"),
                  ("{it}.replace('{0}', '{1}')",), lambda v, a, b: "".join(b if u == a else u for u in v),
                  (LETTERS, LETTERS)),
        Operation("remove", s, s, ("remove each '{0}' from {it}", "delete each '{0}' of {it}"),
                  ("{it}.replace('{0}', '')",), lambda v, a: "".join(u for u in v if u != a), letter),
        Operation("append", s, s, ("append '{0}' to {it}", "add '{0}' to the end of {it}"),
                  ("{it} + '{0}'",), lambda v, a: f"{v}{a}", letter, loose=True),
        Operation("prepend", s, s, ("prepend '{0}' to {it}", "add '{0}' to the start of {it}"),
                  ("'{0}' + {it}",), lambda v, a: f"{a}{v}", letter, loose=True),
        Operation("first of string", s, s, ("take the first {0} letters of {it}",),
                  ("{it}[:{0}]",), lambda v, c: "".join(u for i, u in enumerate(v) if i < int(c)), (DIGITS[:3],)),
        # strings to numbers
        Operation("length", s, n, ("find the length of {it}", "count the letters of {it}"),
                  ("len({it})",), lambda v: sum(1 for _ in v)),
        Operation("count letter", s, n, ("count how often '{0}' occurs in {it}",),
                  ("{it}.count('{0}')",), lambda v, a: sum(u == a for u in v), letter),
    ]  # fmt: skip


OPERATIONS = {operation.name: operation for operation in _operations()}


@dataclass(frozen=True)
class Step:
    """One operation with its parameters."""

    name: str
    parameters: tuple[str, ...] = ()

    @property
    def operation(self) -> Operation:
        return OPERATIONS[self.name]

    def does(self, value: Any) -> Any:
        return self.operation.does(value, *self.parameters)


Steps = tuple[Step, ...]
SLIPS = (")", ":", "return ", "    ", "name")


def family_of(steps: Steps) -> str:
    """The operations in order, e.g. "add, multiply": what a family's problems have in common."""
    return ", ".join(step.name for step in steps)


def specification_of(steps: Steps) -> str:
    """What the program must do, without its name and wording: "add 3, multiply 4"."""
    return ", ".join(" ".join((step.name, *step.parameters)) for step in steps)


def result_of(steps: Steps, value: Any) -> Any:
    """What the program returns for `value`; None if an operation is undefined there (the largest of an empty list)."""
    try:
        for step in steps:
            value = step.does(value)
    except ValueError:
        return None
    return value


def fits(steps: Steps, like: Steps) -> bool:
    """Whether the types of the steps fit: each takes what the step before returns, and the first what `like` takes."""
    operations = [step.operation for step in steps]
    joints = all(a.gives == b.takes for a, b in pairwise(operations))
    return bool(operations) and joints and operations[0].takes == like[0].operation.takes


def write_statement(steps: Steps, key: int) -> str:
    said: list[str] = []
    for position, step in enumerate(steps):
        ways = step.operation.says
        way = ways[rng.integer(len(ways), key, position)]
        said.append(_fill(way, step.parameters, "the result" if said else step.operation.takes))
    return f"Write a function to {', then '.join(said)}."


def write_program(steps: Steps, name: str, key: int) -> str:
    """A program in a style that is drawn at random; so is the way in which each operation is written."""
    ways = [step.operation.writes for step in steps]
    written = [way[rng.integer(len(way), key, 1 + i)] for i, way in enumerate(ways)]
    style = STYLES[rng.integer(len(STYLES), key)]
    if style == "statements" and len(steps) > 1:
        lines = [_fill(way, step.parameters, "x") for way, step in zip(written, steps, strict=True)]
        return "\n    ".join([f"def {name}(x):", *(f"x = {line}" for line in lines[:-1]), f"return {lines[-1]}"])
    expression, loose = "x", False
    for way, step in zip(written, steps, strict=True):
        expression = _fill(way, step.parameters, f"({expression})" if loose and _binds(way) else expression)
        loose = step.operation.loose and not way.startswith("pow")
    return f"{name} = lambda x: {expression}" if style == "lambda" else f"def {name}(x):\n    return {expression}"


def write_flawed_program(steps: Steps, name: str, key: int, flaw: float, slip: float) -> str:
    """A demonstration by a teacher that errs: every choice is wrong with probability `flaw`, the form with `slip`.

    A wrong operation is another one of the same types, a wrong parameter another of its values. A slip is one of: a
    parenthesis or colon left out, `return` forgotten, an indentation lost, the function called something else.
    """
    wrong = tuple(_spoil(step, rng.key("mini-mbpp-flaw", key, i), flaw) for i, step in enumerate(steps))
    slips = rng.key("mini-mbpp-slip", key)
    if rng.uniform(slips) >= slip:
        return write_program(wrong, name, key)
    kind = SLIPS[rng.integer(len(SLIPS), slips, 1)]
    if kind == "name":
        others = [other for other in NAMES if other != name]
        return write_program(wrong, others[rng.integer(len(others), slips, 2)], key)
    text = write_program(wrong, name, key)
    if kind not in text:
        kind = ":"
    places = [found.start() for found in re.finditer(re.escape(kind), text)]
    at = places[rng.integer(len(places), slips, 2)]
    return text[:at] + text[at + len(kind) :]


def _spoil(step: Step, key: int, flaw: float) -> Step:
    operation, parameters = step.operation, list(step.parameters)
    if rng.uniform(key) < flaw:
        alike = [o for o in OPERATIONS.values() if (o.takes, o.gives) == (operation.takes, operation.gives)]
        others = [other for other in alike if other != operation]
        operation = others[rng.integer(len(others), key, 1)]
    kept: list[str] = []
    for i, values in enumerate(operation.parameters):
        value = parameters[i] if i < len(parameters) else ""
        if value not in values or rng.uniform(key, 2 + 2 * i) < flaw:
            rest = [v for v in values if v != value]
            value = rest[rng.integer(len(rest), key, 3 + 2 * i)]
        kept.append(value)
    return Step(operation.name, tuple(kept))


def _binds(way: str) -> bool:
    """Whether the operand stands where an operator or a subscript would take a part of it."""
    return not re.search(r"(\(|in ){it}(\)|,| if|\])", way)


def _fill(way: str, parameters: Sequence[str], it: str) -> str:
    return way.format(*parameters, it=it)
