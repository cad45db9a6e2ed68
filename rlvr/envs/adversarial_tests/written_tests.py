"""Which lines of a tester's answer are tests: data that a parser reads, never text that runs as it was written.

    read_tests("assert add(1, 2) == 3", AssertForm({"add"}))      # [WrittenTest("add(1, 2)", "3")]

A test is one call of the function that the task asks for, with literal arguments, and the literal that it must return.
What runs in the sandbox is written anew from the parsed parts, so a test has no loop, no import and no name beside the
function's. Left out on purpose: tests of objects, of several calls, and of properties.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from rlvr.reward.code.prompt_sections import is_literal
from rlvr.sandbox.setup_parts import parse_beside_threads

_READ = 50  # lines of an answer that are looked at; the others are counted as too many


class LineRefusal(str, Enum):
    """Why a line is no test."""

    UNREADABLE = "unreadable"
    """It is not of the form of a test."""
    SIZE = "size"
    """It is longer than a test may be."""
    MANY = "many"
    """It comes after as many tests as an answer may have."""
    COPIED = "copied"
    """The prompt shows a test of the same call."""
    REPEATED = "repeated"
    """An earlier line of the answer is a test of the same call."""


@dataclass(frozen=True)
class WrittenTest:
    """A call, and what it must return; "" if code is to find that out. Both are Python as `ast.unparse` writes it."""

    call: str
    expected: str = ""

    @property
    def statement(self) -> str:
        return f"assert {self.call} == {self.expected}"


@dataclass(frozen=True)
class AssertForm:
    """The form of the tests of a task: `names` are the functions that the task asks for, `shown_calls` the calls of the
    tests that its prompt shows. With `has_result` a test is an assert statement, else the call alone."""

    names: Collection[str]
    shown_calls: Collection[str] = ()
    has_result: bool = True
    max_tests: int = 1
    max_characters: int = 200

    @property
    def allows_keywords(self) -> bool:
        """Whether calls may name parameters: the prompt shows calls that do, or none. Else a program whose parameters
        have other names would fail, and a shown call would pass for another one."""
        return not self.shown_calls or any("=" in call for call in self.shown_calls)


def read_tests(text: str, form: AssertForm) -> list[WrittenTest | LineRefusal]:
    """Each line that is not blank as a test, or why it is none; an answer without a line is one unreadable test."""
    read: list[WrittenTest | LineRefusal] = []
    calls: set[str] = set()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines[:_READ]:
        test = _read_line(line, form)
        if isinstance(test, WrittenTest):
            if test.call in form.shown_calls:
                test = LineRefusal.COPIED
            elif test.call in calls:
                test = LineRefusal.REPEATED
            elif len(calls) == form.max_tests:
                test = LineRefusal.MANY
            else:
                calls.add(test.call)
        read.append(test)
    read += [LineRefusal.MANY] * len(lines[_READ:])
    return read or [LineRefusal.UNREADABLE]


def read_calls(tests: Sequence[object], names: Collection[str]) -> list[WrittenTest]:
    """The tests among these that have the form `assert f(literals) == literal`."""
    form = AssertForm(names, max_characters=10_000)
    read = [_read_line(test, form) for test in tests if isinstance(test, str) and "\n" not in test.strip()]
    return [test for test in read if isinstance(test, WrittenTest)]


def _read_line(line: str, form: AssertForm) -> WrittenTest | LineRefusal:
    if len(line) > form.max_characters:
        return LineRefusal.SIZE
    try:
        [node] = parse_beside_threads(line.strip()).body
        return _read_statement(node, form)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError also: an integer of too many digits
        return LineRefusal.UNREADABLE


def _read_statement(node: ast.stmt, form: AssertForm) -> WrittenTest | LineRefusal:
    expected = ""
    if form.has_result:
        compared = node.test if isinstance(node, ast.Assert) and node.msg is None else None
        if not isinstance(compared, ast.Compare) or [type(one) for one in compared.ops] != [ast.Eq]:
            return LineRefusal.UNREADABLE
        call, [result] = compared.left, compared.comparators
        if not is_literal(result):
            return LineRefusal.UNREADABLE
        expected = ast.unparse(result)
    else:
        call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id not in form.names:
        return LineRefusal.UNREADABLE
    given = [*call.args, *(word.value for word in call.keywords)]
    if not all(map(is_literal, given)) or any(word.arg is None or not form.allows_keywords for word in call.keywords):
        return LineRefusal.UNREADABLE
    return WrittenTest(ast.unparse(_DropPlus().visit(call)), expected)


class _DropPlus(ast.NodeTransformer):
    """Writes +2 as 2, so that a call has one spelling."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        return self.visit(node.operand) if isinstance(node.op, ast.UAdd) else node
