"""Plants bugs: copies of a program that differ from it by one small change, as in mutation testing.

    plant_bugs("def add(a, b):\n    return a + b", 1, key=7)     # ["def add(a, b):\n    return a - b"]

The changes: an operator becomes another one, an integer one more or one less, another constant another value, a
function of Python its sibling. Whether a copy returns anything else than the program is for its tests to say. The same
key draws the same bugs. Left out on purpose: several changes in one copy.
"""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator

from rlvr.core import rng
from rlvr.sandbox.setup_parts import parse_beside_threads

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv, ast.Add),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
SIBLINGS = {
    **{"min": "max", "max": "min", "sum": "len", "len": "sum", "any": "all", "all": "any"},
    **{"upper": "lower", "lower": "upper", "sorted": "list"},
}


def plant_bugs(program: str, count: int, key: int) -> list[str]:
    """At most `count` different copies with one change each, none with the text of the program itself."""
    original = ast.unparse(parse_beside_threads(program))
    found = list(dict.fromkeys(text for text in _change(parse_beside_threads(program)) if text != original))
    return sorted(found, key=lambda text: rng.key("planted bug", key, text))[:count]


def _change(tree: ast.Module) -> Iterator[str]:
    """The text of the tree after each single change, in the order of the program."""
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            for other in _list_others(node, name, value):
                setattr(node, name, other)
                yield ast.unparse(tree)
            setattr(node, name, value)


def _list_others(node: ast.AST, name: str, value: object) -> Iterator[object]:
    """What the field of a node is changed to, one after the other."""
    if name in ("op", "ops"):
        operators: list[ast.AST] = value if isinstance(value, list) else [value]  # type: ignore[list-item]
        for place, operator in enumerate(operators):
            for other in OPERATORS.get(type(operator), ()):
                changed = [*operators[:place], other(), *operators[place + 1 :]]
                yield changed if name == "ops" else changed[0]
    elif isinstance(node, ast.Constant) and name == "value":
        yield from _list_constants(value)
    elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(value, str) and value in SIBLINGS:
        yield SIBLINGS[value]


def _list_constants(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (value + 1, value - 1)
    elif isinstance(value, str):
        letters = string.ascii_lowercase
        yield letters[(letters.find(value[:1]) + 1) % len(letters)] + value[1:] if value else "a"
