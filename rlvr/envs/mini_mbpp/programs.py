"""A problem of `mini_mbpp` is a pipeline of steps: said as a sentence, written as Python in styles, and spoiled.

    steps = (Step("add", ("3",)), Step("multiply", ("4",)))
    write_statement(steps, key)          # "Write a function to add 3 to a number, then multiply the result by 4."
    write_program(steps, "solve", key)   # "def solve(x):\n    return (x + 3) * 4", or in another style
    write_flawed_program(steps, "solve", key, 0.4, 0.3)       # what an erring teacher writes instead

All draws are counted: the same key gives the same text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rlvr.core import rng
from rlvr.envs.mini_mbpp.operation_table import OPERATIONS, Operation

STYLES = ("expression", "statements", "lambda")
NAMES = (
    *("answer", "apply", "build", "calculate", "change", "compute", "convert", "create", "derive", "evaluate"),
    *("find", "get", "handle", "helper", "make", "modify", "perform", "process", "produce", "result", "run", "solve"),
    *("transform", "work"),
)


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
    """Whether the steps' types fit: each takes what the one before returns, the first what that of `like` takes."""
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
    """A program in a drawn style; each operation is written one of its ways."""
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
