"""MBPP's reference solutions as jobs of the sandbox, and mutants of them.

A mutant is a reference solution with one operator, comparison or constant changed, chosen by a seed; one that has none
returns its result in a tuple.
"""

from __future__ import annotations

import ast
import json
import random
import warnings
from typing import Any

from tests.kit.code_rows import REAL as MBPP

SECONDS = 5.0

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitXor,
    ast.BitXor: ast.BitAnd, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And, ast.UAdd: ast.USub, ast.USub: ast.UAdd,
}  # fmt: skip


def places(tree: ast.AST) -> list[tuple[ast.AST, str, int]]:
    """(node, field, index in a list or -1) of all that can be changed."""
    found: list[tuple[ast.AST, str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp, ast.UnaryOp)) and type(node.op) in SWAPS:
            found.append((node, "op", -1))
        elif isinstance(node, ast.Compare):
            found += [(node, "ops", place) for place, op in enumerate(node.ops) if type(op) in SWAPS]
        elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float, str)):
            found.append((node, "value", -1))
    return found


def mutant(source: str, seed: int) -> str:
    with warnings.catch_warnings(action="ignore"):  # of escapes that MBPP writes
        tree = ast.parse(source)
    returns = [(node, "return", -1) for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value]
    node, field, index = random.Random(seed).choice(places(tree) or returns)
    if isinstance(node, ast.Return) and node.value:
        node.value = ast.Tuple([node.value], ast.Load())
    elif field == "value":
        value: Any = getattr(node, field)
        changed = not value if isinstance(value, bool) else value + "x" if isinstance(value, str) else value + 1
        setattr(node, field, changed)
    elif index < 0:
        setattr(node, field, SWAPS[type(getattr(node, field))]())
    else:
        ops = getattr(node, field)
        ops[index] = SWAPS[type(ops[index])]()
    return ast.unparse(tree)


def mbpp() -> list[dict[str, Any]]:
    full = [json.loads(line) for line in (MBPP / "mbpp.jsonl").read_text(encoding="utf-8").splitlines()]
    clean = json.loads((MBPP / "sanitized-mbpp.json").read_text(encoding="utf-8"))
    return [
        {
            "solution": row["code"], "tests": row["test_list"], "setup": row.get("test_setup_code", ""),
            "imports": row.get("test_imports", []), "timeout_s": SECONDS,
        }
        for row in full + clean
    ]  # fmt: skip


def mutants(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**job, "solution": mutant(job["solution"], seed)} for seed, job in enumerate(jobs)]
