"""A test's setup, split in two (`Setup`): its classes run where the answer does, the rest runs in the checker.

Values and functions of a setup are what a test compares with, so they stay with the checker. What it builds from the
answer's or its own classes is built over the channel, so it is not an expected value: `ValueOrigins` finds tests
that use it as one. Standard library only.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

BUILTINS = frozenset(dir(builtins))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)
OF_DATA = frozenset(name for kind in (str, bytes, list, tuple, dict, set, int, float) for name in dir(kind))
OF_DATA -= {"add", "append", "clear", "copy", "extend", "insert", "reverse", "sort", "update"}  # which reveal nothing
LATER = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp, ast.Lambda)
PLAIN = ("ctx", "op", "ops", "kind", "id", "attr", "arg", "name", "lineno", "type_comment", "conversion", "is_async")
PARTS = {  # by kind of node: the fields that may hold nodes
    kind: tuple(name for name in kind._fields if name not in PLAIN and kind is not ast.Constant)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
UNPARSED = (SyntaxError, ValueError, RecursionError)
_TRIES = 100  # to parse while other threads do


def parse_beside_threads(text: str) -> ast.Module:
    """`ast.parse` where other threads of the process may parse too: CPython before 3.11.9 and 3.12.3 then raises
    SystemError at times (https://github.com/python/cpython/issues/106905), whatever the text is."""
    for _ in range(_TRIES):
        with suppress(SystemError):
            return ast.parse(text)
    return ast.parse(text)


class Setup:
    """The setup code of tests, split in two. `sent` goes to the answer's process, `here` stays with the checker;
    `classes` are those of `sent`.

    `built`: names of `here` whose values involve the answer's process. `hidden`: names of `here` that `sent` needs.
    `needs_answer`: `here` calls the answer.
    """

    def __init__(self, tree: ast.Module, imported: set[str]) -> None:
        self.sent = module(answer_statements(tree))
        self.here = module(node for node in tree.body if not isinstance(node, ast.ClassDef))
        self.classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        own = bound_names(self.here)
        self.hidden = used_names(self.sent) & (own - bound_names(self.sent)) - inner_names([self.sent])
        outside = used_names(self.here) - own - inner_names([self.here]) - imported - BUILTINS
        self.needs_answer = bool(outside)
        self.built: set[str] = set()
        before = -1
        while before < len(self.built):
            before = len(self.built)
            for node in self.here.body:
                if used_names(node) & (outside | self.built):
                    names = (
                        {node.name} if isinstance(node, FUNCTIONS) else used_names(node) | bound_names(module([node]))
                    )
                    self.built |= names & own - imported
        self.plain = own - self.built

    def find_misuse(self, trees: list[ast.Module], imported: set[str]) -> str:
        """The name of the setup that the tests wrongly use as an expected value; empty if there is none."""
        return ValueOrigins(self, trees, imported).find_misuse() if self.classes or self.built else ""


class ValueOrigins:
    """Data-flow analysis: which names in some tests may hold values from the answer's process.

    A name may hold whatever any assignment gives it; control flow is ignored.

    `objects` are made by the setup's classes, which run where the answer does. `derived` are values read from these or
    from the answer's own objects. `answers` come from the answer's functions, or may have been changed by them.
    """

    def __init__(self, setup: Setup, trees: list[ast.Module], imported: set[str]) -> None:
        self.nodes = [node for tree in trees for node in nodes(tree)]
        self.classes, self.objects, self.derived = setup.classes, set(setup.classes), set(setup.built)
        own = set().union(*map(bound_names, trees), inner_names(trees), imported, setup.plain, setup.built)
        own |= setup.classes
        self.functions = set().union(*map(used_names, trees)) - own - BUILTINS
        checks = [node.args.args for node in self.nodes if isinstance(node, FUNCTIONS) and node.name == "check"]
        self.functions |= {parameter.arg for parameters in checks for parameter in parameters[:1]}
        self.answers: set[str] = set()
        assigned = [node for node in [*self.nodes, *nodes(setup.here)] if isinstance(node, ast.Assign)]
        self.tables = {name: node.value for node in assigned for name in names_of(node) if rows_of(node.value)}
        before, count = -1, 0
        while before < count:
            before = count
            for node in self.nodes:
                self.follow(node)
            count = len(self.objects) + len(self.derived) + len(self.answers)

    def follow(self, node: ast.AST) -> None:
        """Propagate origins through a binding, or through a call of the answer with something that it may change."""
        if isinstance(node, ast.Call) and self.is_answer(node.func):
            given = set().union(*map(used_names, [*node.args, *(word.value for word in node.keywords)]))
            self.answers |= given - self.objects - self.derived - self.functions - BUILTINS
        elif isinstance(node, FUNCTIONS) and node.name != "check":
            for line in node.body:
                self.propagate({node.name}, line)
                if used_names(line) & self.objects:
                    self.derived.add(node.name)
        elif isinstance(node, (ast.For, ast.comprehension)):
            table = self.tables.get(node.iter.id, node.iter) if isinstance(node.iter, ast.Name) else node.iter
            for row in rows_of(table) or [table]:
                self.bind(node.target, row)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self.bind(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value:
            self.bind(node.target, node.value)
        elif isinstance(node, ast.withitem) and node.optional_vars:
            self.bind(node.optional_vars, node.context_expr)

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        """Bind names to a value, part by part if both sides are written as parts: a table of cases mixes origins."""
        targets, parts = getattr(target, "elts", []), rows_of(value)
        if targets and len(targets) == len(parts):
            for one, part in zip(targets, parts, strict=True):
                self.bind(one, part)
        else:
            names = {node.id for node in [target, *walk(target)] if isinstance(node, ast.Name)}
            self.propagate(names if isinstance(target, (ast.Name, ast.Tuple, ast.List)) else set(), value)

    def propagate(self, names: set[str], value: ast.AST) -> None:
        if self.setup_name(value):
            self.derived |= names
        if self.uses_answer(value):
            self.answers |= names
        if any(isinstance(part, ast.Name) and part.id in self.objects for part in self.parts(value)):
            self.objects |= names

    def is_answer(self, function: ast.expr) -> bool:
        """Whether a function is the answer's: `f`, `Solution().f`. Methods of plain data are not."""
        if isinstance(function, ast.Attribute):
            owner = function.value
            return function.attr not in OF_DATA and self.uses_answer(owner) and not self.setup_name(owner)
        return isinstance(function, ast.Name) and function.id in (self.functions | self.answers) - self.derived

    def parts(self, node: ast.AST) -> list[ast.AST]:
        """The nodes of an expression, without the arguments of the answer's functions."""
        found = [node]
        for one in found:  # which grows
            if isinstance(one, ast.Call) and self.is_answer(one.func):
                one = one.func
            found += children(one)
        return found

    def uses_answer(self, node: ast.AST) -> bool:
        """Whether an expression uses a value of the answer."""
        for part in self.parts(node):
            if isinstance(part, ast.Call) and self.is_answer(part.func):
                return True
            if isinstance(part, ast.Name) and part.id in self.answers:
                return True
        return False

    def setup_name(self, node: ast.AST) -> str:
        """The first setup name that an expression reads a value from (`Class.x`, `len(Class())`); empty if none."""
        for part in self.parts(node):
            inside: list[ast.expr] = []
            if isinstance(part, ast.Name) and part.id in self.derived:
                return part.id
            if isinstance(part, (ast.Attribute, ast.Subscript)):
                inside = [part.value]
            elif isinstance(part, ast.Call) and not self.is_answer(part.func):
                name = part.func.id if isinstance(part.func, ast.Name) else ""
                inside = [] if name in self.classes or name in ("isinstance", "issubclass") else [part.func, *part.args]
            for one in inside:
                while isinstance(one, (ast.Attribute, ast.Subscript, ast.Call)):
                    one = one.func if isinstance(one, ast.Call) else one.value
                if isinstance(one, ast.Name) and one.id in self.objects:
                    return one.id
        return ""

    def find_misuse(self) -> str:
        for node in self.nodes:
            if isinstance(node, (ast.Assert, ast.If, ast.While, ast.IfExp)):
                condition = node.test
            elif isinstance(node, ast.Compare) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
                condition = node
            else:
                continue
            name = self.setup_name(condition)
            if name and self.uses_answer(condition):
                return name
        return ""


def rows_of(value: ast.AST) -> list[ast.expr]:
    """The items of a list, tuple or set display."""
    return value.elts if isinstance(value, (ast.List, ast.Tuple, ast.Set)) else []


def names_of(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def answer_statements(tree: ast.Module) -> list[ast.stmt]:
    """The statements of a setup that run in the answer's process: imports, classes, the functions that these use."""
    functions = {node.name: node for node in tree.body if isinstance(node, FUNCTIONS)}
    todo: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    needed: list[ast.stmt] = []
    while todo:
        needed.append(todo.pop())
        more = [functions[name] for name in sorted(used_names(needed[-1]) & functions.keys())]
        todo += [node for node in more if node not in needed and node not in todo]
    return [node for node in tree.body if node in needed or isinstance(node, IMPORTS)]


@lru_cache(1024)
def for_answer(setup: str) -> str:
    """The part of a setup for the answer's process; empty if it does not parse, which the checker reports."""
    try:
        return ast.unparse(module(answer_statements(parse_beside_threads(setup))))
    except UNPARSED:
        return ""


def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree, cached on it: a plan needs them a dozen times. The tree must not change any more."""
    below: list[ast.AST] | None = getattr(tree, "below", None)
    if below is None:
        below = walk(tree)
        tree.below = below  # type: ignore[attr-defined] - without the tree itself: no cycle
    return [tree, *below]


def walk(tree: ast.AST) -> list[ast.AST]:
    """The nodes below one, without operators and contexts, in a quarter of `ast.walk`'s time."""
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


def bound_names(tree: ast.Module) -> set[str]:
    """Names that a module's own statements bind, without those in functions' bodies; cached on the tree."""
    known: set[str] | None = getattr(tree, "bound", None)
    if known is not None:
        return known
    names: set[str] = set()
    tree.bound = names  # type: ignore[attr-defined]
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


def used_names(tree: ast.AST) -> set[str]:
    """Names that are read below a node, cached on it."""
    known: set[str] | None = getattr(tree, "used", None)
    if known is None:
        known = {node.id for node in nodes(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
        tree.used = known  # type: ignore[attr-defined]
    return known


def inner_names(trees: list[ast.Module]) -> set[str]:
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
