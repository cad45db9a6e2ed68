"""What the functions of `mini_mbpp` do: a table of operations over numbers, lists of numbers, and strings.

An operation is written four times, by hand and independently of one another: in words, in Python (several ways), as the
function that computes what its tests expect (nothing is ever evaluated from text), and as the parameters it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NUMBER, LIST, STRING = "a number", "a list", "a string"
DIGITS = tuple("23456789")
LETTERS = tuple("abcdefghij")


@dataclass(frozen=True)
class Operation:
    """`says` are ways to ask for it and `writes` to program it, with the operand as `{it}` and parameters `{0}`, `{1}`.

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
