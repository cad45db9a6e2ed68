"""A test's setup, cut in two: classes run where the answer does, which gets to see them; all the rest runs here.

Values and functions of a setup are what a test compares with. They stay with the checker; what it builds from the
answer's or its own classes is built over the channel, and is then no expected value. Standard library only.
`python -m pytest tests/test_sandbox_checker.py` exercises it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from functools import lru_cache

BUILTINS = frozenset(dir(builtins))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)
LATER = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp, ast.Lambda)
PLAIN = ("ctx", "op", "ops", "kind", "id", "attr", "arg", "name", "lineno", "type_comment", "conversion", "is_async")
PARTS = {  # by kind of node: the fields in which others may stand
    kind: tuple(name for name in kind._fields if name not in PLAIN and kind is not ast.Constant)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
UNPARSED = (SyntaxError, ValueError, RecursionError)


class Setup:
    """`sent` goes to the answer's process, `here` is the checker's; `classes` are those of `sent`.

    `built` are names of `here` made with the answer's part in it, `hidden` names of `here` that `sent` cannot do
    without. `needs` says that `here` asks the answer for something.
    """

    def __init__(self, tree: ast.Module, imported: set[str]) -> None:
        self.sent = module(sent(tree))
        self.here = module(node for node in tree.body if not isinstance(node, ast.ClassDef))
        self.classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        own = stored(self.here)
        self.hidden = loaded(self.sent) & (own - stored(self.sent)) - inner([self.sent])
        outside = loaded(self.here) - own - inner([self.here]) - imported - BUILTINS
        self.needs = bool(outside)
        self.built: set[str] = set()
        known = -1
        while known < len(self.built):
            known = len(self.built)
            for node in self.here.body:
                if loaded(node) & (outside | self.built):
                    names = {node.name} if isinstance(node, FUNCTIONS) else loaded(node) | stored(module([node]))
                    self.built |= names & own - imported
        self.plain = own - self.built

    def of_answer(self, node: ast.AST) -> str:
        """The name, if a value's is one whose word is the answer's: `built`, `built[0].x`, `Class.x`, `Class.x()`."""
        depth = 0
        while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
            if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
                return ""
            node, depth = node.func if isinstance(node, ast.Call) else node.value, depth + 1
        name = node.id if isinstance(node, ast.Name) else ""
        return name if name in self.built or (depth and name in self.classes) else ""

    def misused(self, tree: ast.Module, plain: set[str]) -> str:
        """A name that a test takes for an expected value or a helper, though the answer could say what it is."""
        for node in nodes(tree):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                for side in sides:
                    name = self.of_answer(side)
                    if name and any(loaded(other) - BUILTINS - plain - self.plain for other in sides if other != side):
                        return name
            elif isinstance(node, ast.Assert):
                test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
                name = self.of_answer(test) if isinstance(test, ast.Call) else ""
                if name in self.classes:
                    return name
        return ""


def sent(tree: ast.Module) -> list[ast.stmt]:
    """Imports and classes, and those functions that the classes call."""
    functions = {node.name: node for node in tree.body if isinstance(node, FUNCTIONS)}
    todo: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    wanted: list[ast.stmt] = []
    while todo:
        wanted.append(todo.pop())
        more = [functions[name] for name in sorted(loaded(wanted[-1]) & functions.keys())]
        todo += [node for node in more if node not in wanted and node not in todo]
    return [node for node in tree.body if node in wanted or isinstance(node, IMPORTS)]


@lru_cache(1024)
def for_answer(setup: str) -> str:
    """The text that the answer's process gets; none of what does not parse, which the checker reports."""
    try:
        return ast.unparse(module(sent(ast.parse(setup))))
    except UNPARSED:
        return ""


def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree that nobody changes any more, found once: a plan asks for them a dozen times."""
    below: list[ast.AST] | None = getattr(tree, "below", None)
    if below is None:
        below = walk(tree)
        tree.below = below  # type: ignore[attr-defined] - without the tree itself, so that nothing is cyclic
    return [tree, *below]


def walk(tree: ast.AST) -> list[ast.AST]:
    """The nodes below one, in a quarter of `ast.walk`'s time: operators and contexts, which say nothing, left out."""
    found = children(tree)
    for node in found:  # which grows
        found += children(node)
    return found


def children(node: ast.AST) -> list[ast.AST]:
    found: list[ast.AST] = []
    for name in PARTS[type(node)]:
        value = getattr(node, name, None)
        if type(value) is list:
            found += [item for item in value if isinstance(item, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def module(body: Iterable[ast.stmt]) -> ast.Module:
    return ast.Module(list(body), [])


def stored(tree: ast.Module) -> set[str]:
    """Names that a module's own statements bind, functions' bodies left out."""
    names: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, IMPORTS):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        if isinstance(node, ast.ExceptHandler):
            names.add(node.name or "")
        if not isinstance(node, LATER):
            todo += children(node)
    return names


def loaded(tree: ast.AST) -> set[str]:
    return {node.id for node in nodes(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def inner(trees: list[ast.Module]) -> set[str]:
    """Names bound anywhere inside: parameters, comprehension variables, locals."""
    names: set[str] = set()
    for tree in trees:
        for node in nodes(tree):
            if isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)):
                names.add(node.name or "")
    return names
