"""Reads a class or function of the package from its source: docstring, signature, fields, methods.

Nothing is imported, so that comments beside fields and texts below them are kept and torch is not loaded. `gen.py` puts
the result into the API reference. Left out on purpose: names that begin with an underscore.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_DUNDERS = ("__init__", "__call__", "__iter__", "__len__", "__getitem__", "__enter__", "__exit__")


def read_docstring(dotted: str) -> str:
    """The docstring of `package.module.name`; "" if it has none."""
    module, _, name = dotted.rpartition(".")
    return ast.get_docstring(_read_source(module)[1][name]) or ""


def find_home(dotted: str) -> str:
    """The outermost package that exports `package.module.name`, else its module."""
    module, _, name = dotted.rpartition(".")
    parts = module.split(".")
    for package in (parts[:length] for length in range(1, len(parts))):
        source = ROOT.joinpath(*package, "__init__.py").read_text(encoding="utf-8")
        exported = re.search(r"^__all__ = \[(.*?)\]", source, re.MULTILINE | re.DOTALL)
        if exported and f'"{name}"' in exported[1]:
            return ".".join(package)
    return module


def make_stub(dotted: str) -> str:
    """The signature, as in a stub file; of a class also its public fields and methods, with their docstrings."""
    module, _, name = dotted.rpartition(".")
    lines, nodes = _read_source(module)
    node = nodes[name]
    return "\n".join(_stub_class(node, lines, nodes) if isinstance(node, ast.ClassDef) else _close(_head(node, lines)))


def _read_source(module: str) -> tuple[list[str], dict[str, Definition]]:
    """The lines of a module, and its classes and functions by name."""
    path = ROOT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    return text.splitlines(), {node.name: node for node in ast.parse(text).body if isinstance(node, Definition)}


def _head(node: Definition, lines: list[str]) -> list[str]:
    """The lines of a definition from its decorators to the colon, or to the end of `: ...`."""
    first, body = min(part.lineno for part in (node, *node.decorator_list)), node.body[0]
    is_below = not lines[body.lineno - 1][: body.col_offset].strip()
    head = [re.sub(r"  # (fmt|noqa|pyright)\b.*", "", line) for line in lines[first - 1 : body.lineno - is_below]]
    return [line for line in head if not line.lstrip().startswith("#")]


def _close(head: list[str]) -> list[str]:
    """The same without a body."""
    return head if head[-1].endswith("...") else [*head[:-1], f"{head[-1]} ..."]


def _stub_class(node: ast.ClassDef, lines: list[str], nodes: dict[str, Definition]) -> list[str]:
    """Fields with the comments beside and the texts below them, and methods, those of a private base class too."""
    head = [re.sub(r"\(_\w+\)", "", line) for line in _head(node, lines)]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    items: list[ast.stmt] = list(node.body)
    for base in bases:
        if base.startswith("_") and base in nodes:
            own = {getattr(item, "name", "") for item in items}
            items += [item for item in nodes[base].body if isinstance(item, Definition) and item.name not in own]
    stub: list[str] = []
    is_field = False
    for item in items:
        is_text = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
        is_field = is_field if is_text else _is_public_field(item, is_enum="Enum" in bases)
        if is_field:
            stub += lines[item.lineno - 1 : item.end_lineno]
        elif isinstance(item, Definition) and (not item.name.startswith("_") or item.name in _DUNDERS):
            method = _stub_method(item, lines)
            apart = stub and (len(method) > 1 or stub[-1].endswith('"""'))
            stub += ["", *method] if apart else method
    return [*head, *stub] if stub else _close(head)


def _is_public_field(item: ast.stmt, *, is_enum: bool) -> bool:
    if isinstance(item, ast.AnnAssign):
        return isinstance(item.target, ast.Name) and not item.target.id.startswith("_")
    return is_enum and isinstance(item, ast.Assign)


def _stub_method(node: Definition, lines: list[str]) -> list[str]:
    text = node.body[0]
    if ast.get_docstring(node) is None:
        return _close(_head(node, lines))
    return [*_head(node, lines), *lines[text.lineno - 1 : text.end_lineno]]
