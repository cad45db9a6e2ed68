"""Python's operators by name, as `rlvr.sandbox.test_program` writes them: one table for both ends of the channel.

    OPERATORS["add"](2, 3)

`BINARY` names those with a form in place (`in_place("and_")` is its name, `iand`). Standard library only.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift",
)  # fmt: skip
UNARY = ("neg", "pos", "invert")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def in_place(name: str) -> str:
    return "i" + name.strip("_")


OPERATORS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in (*BINARY, *map(in_place, BINARY), *UNARY, *COMPARISONS)
}
