"""What single expressions and definitions of a test are, by their syntax alone: for `rlvr.sandbox.vacuous_tests`.

Standard library only.
"""

from __future__ import annotations

import ast

from rlvr.sandbox.setup_parts import BUILTINS, FUNCTIONS, nodes

DISPLAYS = (ast.List, ast.Tuple, ast.Set)
OF_ASSERTIONS = ("AssertionError", "Exception", "BaseException")


def all_names(tree: ast.AST) -> set[str]:
    """The names that a statement uses or binds, without builtins."""
    found = {node.id for node in nodes(tree) if isinstance(node, ast.Name)}
    for node in nodes(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return found - BUILTINS


def last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def function_name(node: ast.AST) -> str:
    """The last part of the name that is called; "" for another expression."""
    return last_name(node.func) if isinstance(node, ast.Call) else ""


def is_condition(node: ast.expr) -> bool:
    """Whether an expression gives True or False (or, with `and` and `or`, is meant to)."""
    return isinstance(node, (ast.Compare, ast.BoolOp)) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )


def is_equality(op: ast.cmpop) -> bool:
    return isinstance(op, (ast.Eq, ast.NotEq, ast.Is, ast.IsNot))


def is_lazy(node: ast.AST) -> bool:
    """Whether a call of it runs nothing: a coroutine function or a generator function."""
    return isinstance(node, ast.AsyncFunctionDef) or (
        isinstance(node, ast.FunctionDef) and any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in nodes(node))
    )


def is_silent_run(call: ast.Call) -> bool:
    """`unittest.main(exit=False)` and a runner's `run(...)`, which print failures and raise nothing."""
    if function_name(call) == "main":
        return any(word.arg == "exit" and literal(word.value) is False for word in call.keywords)
    return function_name(call) == "run" and "TextTestRunner" in ast.unparse(call.func)


def is_suppressing(context: ast.expr) -> bool:
    return function_name(context) == "suppress" and any(map(catches_assertions, context.args))  # type: ignore[attr-defined]


def catches_assertions(kind: ast.expr) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(last_name(one) in OF_ASSERTIONS for one in kinds)


def negation(node: ast.expr) -> ast.expr:
    """`not node`, with `==` and `in` turned around: the forms in which a condition meets its opposite."""
    turned = {
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
        ast.In: ast.NotIn,
        ast.NotIn: ast.In,
        ast.Is: ast.IsNot,
        ast.IsNot: ast.Is,
    }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in turned:
        return ast.Compare(node.left, [turned[type(node.ops[0])]()], node.comparators)
    return ast.UnaryOp(ast.Not(), node)


def literal(node: ast.expr) -> object:
    """The value of a literal; None for any other expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
