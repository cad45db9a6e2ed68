"""Tests that only ask the answer about itself: whether an object is true, of a class, the same as or equal to another.

    find_self_reports([ast.parse("assert isinstance(f(1), Node)")], {"f", "Node"}, {"f", "Node"})

An answer can say of itself what it likes, so some test of a task has to compare with plain data as well. It is told
from the text alone. Standard library only.
"""

from __future__ import annotations

import ast

from rlvr.sandbox.setup_parts import BUILTINS, nodes, used_names
from rlvr.sandbox.value_flow import LOOK_AT_FILES


def find_self_reports(trees: list[ast.Module], free: set[str], tainted: set[str]) -> str:
    """The fault of tests that only ask the answer about itself (`isinstance`, `is`, its `==`); empty if data decides.

    An answer that can patch its interpreter answers such questions as it likes, without work.
    """
    conditions = [node.test for tree in trees for node in nodes(tree) if isinstance(node, ast.Assert)]
    others = (ast.Try, ast.TryStar, ast.Raise)
    if not conditions or any(isinstance(node, others) for tree in trees for node in nodes(tree)):
        return ""
    if any(
        isinstance(node, ast.Attribute) and node.attr.startswith("assert") for tree in trees for node in nodes(tree)
    ):
        return ""
    values = assigned_values(trees)
    objects = find_own_objects(trees, values, free)
    if not all(is_self_report(condition, tainted, values, objects) for condition in conditions):
        return ""
    return f"the tests only ask the answer about itself ({ast.unparse(conditions[0])[:60]})"


def assigned_values(trees: list[ast.Module]) -> dict[str, list[ast.expr]]:
    """What the tests assign to each name."""
    values: dict[str, list[ast.expr]] = {}
    for node in (node for tree in trees for node in nodes(tree) if isinstance(node, ast.Assign)):
        pairs = [(target, node.value) for target in node.targets]
        for target, value in pairs:  # which grows
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                pairs += zip(target.elts, value.elts, strict=True)
            elif isinstance(target, ast.Name):
                values.setdefault(target.id, []).append(value)
    return values


def find_own_objects(trees: list[ast.Module], values: dict[str, list[ast.expr]], free: set[str]) -> set[str]:
    """Names that hold objects of the answer's classes by the text: `a = Money(5)`, where `a.add(1)` is used too."""
    everything = [node for tree in trees for node in nodes(tree)]
    used = [node.value for node in everything if isinstance(node, ast.Attribute)]
    classes = {name for name in free if name[:1].isupper() and "_" not in name}
    return {
        one.id
        for one in used
        if isinstance(one, ast.Name)
        and (given := values.get(one.id))
        and all(getattr(getattr(value, "func", None), "id", "") in classes for value in given)
    }


def is_own_object(node: ast.expr, objects: set[str]) -> bool:
    """Whether an expression is such an object, or what an operator makes of one."""
    if isinstance(node, ast.BinOp):
        return is_own_object(node.left, objects) or is_own_object(node.right, objects)
    return isinstance(node, ast.Name) and node.id in objects


def is_self_report(node: ast.expr, tainted: set[str], values: dict[str, list[ast.expr]], objects: set[str]) -> bool:
    def recurse(part: ast.expr) -> bool:
        return is_self_report(part, tainted, values, objects)

    if is_own_object(node, objects):  # its truth
        return True
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return recurse(node.operand)
    if isinstance(node, ast.BoolOp):
        decide = all if isinstance(node.op, ast.And) else any
        return decide(map(recurse, node.values))
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in LOOK_AT_FILES:
            return True
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "bool" and len(node.args) == 1:
            return is_own_object(node.args[0], objects)
        return name in ("isinstance", "issubclass", "callable", "hasattr")
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides = [node.left, node.comparators[0]]
        if any(isinstance(side, ast.Constant) and type(side.value) is bool for side in sides):
            return any(isinstance(side, ast.Call) and recurse(side) for side in sides)
        if isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            names_builtin = any(isinstance(side, ast.Name) and side.id in BUILTINS for side in sides)
            constant = any(isinstance(side, ast.Constant) for side in sides)
            return not constant and not names_builtin and bool(used_names(node.left) & tainted)
        if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
            sides = [read_attribute(side, values) for side in sides]
            asks_type = any(isinstance(side, ast.Call) and getattr(side.func, "id", "") == "type" for side in sides)
            both = all(used_names(side) & tainted for side in sides)
            constants = any(isinstance(part, ast.Constant) for side in sides for part in nodes(side))
            names = any(isinstance(part, ast.Name) and part.id not in tainted for side in sides for part in nodes(side))
            variables = any(isinstance(side, ast.Name) for side in sides)
            asks_type &= not any(isinstance(side, ast.Name) and side.id in BUILTINS for side in sides)
            return asks_type or (both and not constants and not names and not variables)
    return False


def read_attribute(node: ast.expr, values: dict[str, list[ast.expr]]) -> ast.expr:
    """For a name that is assigned once, from an attribute or a method of an object, what is assigned."""
    given = values.get(node.id, []) if isinstance(node, ast.Name) else []
    function = getattr(given[0], "func", given[0]) if len(given) == 1 else None
    return given[0] if isinstance(function, ast.Attribute) else node
