"""Finds where a test says that a difference is nothing or small: `not x - y`, `abs(x - y) < 0.1`, `(x - y) ** 2 < 0.1`.

    find_condition(ast.parse("abs(x - 3) < 0.1", mode="eval").body, {}, set()).right  # 3

An object that makes the difference knows both sides, so it would only have to say that what it makes is small. The
parts are found here, to ask about other differences too (`rlvr.sandbox.comparisons`). Standard library only.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

DIFFERENCE, BOUND = "_d_", "_b_"  # the names of what is asked about in a condition
WRAPPERS = ("abs", "bool", "round")
Build = Callable[[ast.expr], ast.expr]


@dataclass(frozen=True)
class Difference:
    """A difference `left op right` in a condition, and how to build the condition again. `source`: both sides as the
    test writes them, if names hold the values."""

    op: ast.operator
    left: ast.expr
    right: ast.expr
    build: Build = lambda value: value
    source: tuple[ast.expr, ast.expr] | None = None
    bound: ast.expr | None = None
    condition: ast.expr | None = None  # the condition about a name that holds a difference


def load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def find_difference(
    node: ast.expr, held: Mapping[str, Difference] = {}, hidden: Collection[str] = ()
) -> Difference | None:
    """The difference in `x - y`, `abs(x - y)`, `d` after `d = x - y`; `hidden`: names that are no builtins here."""
    if isinstance(node, ast.Name):
        return held.get(node.id)
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, (ast.Sub, ast.BitXor)):
            return Difference(node.op, node.left, node.right)
        if not isinstance(node.op, ast.Pow) or not isinstance(node.right, ast.Constant):
            return None
        found, power = find_difference(node.left, held, hidden), node.right
        return found and wrap(found, lambda value: ast.BinOp(value, ast.Pow(), power))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args and not node.keywords:
        name, first, *rest = node.func.id, *node.args
        if name in WRAPPERS and name not in hidden:
            found = find_difference(first, held, hidden)
            return found and wrap(found, lambda value: ast.Call(load(name), [value, *rest], []))
    return None


def wrap(found: Difference, outer: Build) -> Difference:
    inner = found.build
    return replace(found, build=lambda value: outer(inner(value)))


def is_bare(found: Difference) -> bool:
    return isinstance(found.build(load(DIFFERENCE)), ast.Name)


def find_condition(
    node: ast.expr, held: Mapping[str, Difference] = {}, hidden: Collection[str] = ()
) -> Difference | None:
    """The difference that a condition says to be nothing or small; its `build` makes the condition about a value."""

    def find(part: ast.expr, outer: Build, bound: ast.expr | None = None) -> Difference | None:
        found = find_difference(part, held, hidden)
        if found is None:
            return None
        whole = outer(part) if found.source else None
        return replace(wrap(found, outer), bound=bound or ast.Constant(0), condition=whole)

    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return find(node.operand, lambda value: ast.UnaryOp(ast.Not(), value))
    if not isinstance(node, ast.Compare):
        return None
    if len(node.ops) == 2 and all(isinstance(op, (ast.Lt, ast.LtE)) for op in node.ops):
        low, (middle, high) = node.left, node.comparators
        if not isinstance(low, ast.UnaryOp) or isinstance(low.operand, ast.Call):
            return None
        return find(middle, lambda value: ast.Compare(low, node.ops, [value, load(BOUND)]), high)
    if len(node.ops) > 1:
        return None
    op, left, right = node.ops[0], node.left, node.comparators[0]
    turned = {ast.Gt: ast.Lt(), ast.GtE: ast.LtE()}.get(type(op))
    if turned is not None or isinstance(left, ast.Constant):
        op, left, right = turned or op, right, left

    def outer(value: ast.expr) -> ast.expr:
        return ast.Compare(value, [op], [load(BOUND)])

    if isinstance(op, (ast.Lt, ast.LtE)):
        found = find_difference(left, held, hidden)
        return None if found is None or is_bare(found) else find(left, outer, right)
    if not isinstance(op, (ast.Eq, ast.Is)) or not isinstance(right, ast.Constant) or right.value != 0:
        return None
    return find(left, outer, right)
