"""A test's setup, cut in two (`Setup`): classes run where the answer does, which gets to see them; the rest runs here.

Values and functions of a setup are what a test compares with. They stay with the checker; what it builds from the
answer's or its own classes is built over the channel, and is then no expected value: `Words` finds tests that take
it for one. Standard library only.
`python -m pytest tests/test_sandbox_setup.py` exercises it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from functools import lru_cache

BUILTINS = frozenset(dir(builtins))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)
OF_DATA = frozenset(name for kind in (str, bytes, list, tuple, dict, set, int, float) for name in dir(kind))
OF_DATA -= {"add", "append", "clear", "copy", "extend", "insert", "reverse", "sort", "update"}  # which tell nothing
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

    def misused(self, trees: list[ast.Module], imported: set[str]) -> str:
        """What of the setup the tests hold an answer's value to, though the answer could say what it is."""
        return Words(self, trees, imported).misused() if self.classes or self.built else ""


class Words:
    """Which names of some tests have what from the answer: flow does not matter, one binding is enough.

    `objects` are made by the setup's classes, which run where the answer does; `said` is what these or the answer's own
    objects say; `answers` come from the answer's functions, which may also have changed them.
    """

    def __init__(self, setup: Setup, trees: list[ast.Module], imported: set[str]) -> None:
        self.found = [node for tree in trees for node in nodes(tree)]
        self.classes, self.objects, self.said = setup.classes, set(setup.classes), set(setup.built)
        own = set().union(*map(stored, trees)) | inner(trees) | imported | setup.plain | setup.built | setup.classes
        self.functions = set().union(*map(loaded, trees)) - own - BUILTINS
        checks = [node.args.args for node in self.found if isinstance(node, FUNCTIONS) and node.name == "check"]
        self.functions |= {parameter.arg for parameters in checks for parameter in parameters[:1]}
        self.answers: set[str] = set()
        assigned = [node for node in [*self.found, *nodes(setup.here)] if isinstance(node, ast.Assign)]
        self.tables = {name: node.value for node in assigned for name in names_of(node) if rows_of(node.value)}
        known, count = -1, 0
        while known < count:
            known = count
            for node in self.found:
                self.follow(node)
            count = len(self.objects) + len(self.said) + len(self.answers)

    def follow(self, node: ast.AST) -> None:
        """Let a binding, or a call of the answer with something that it may change, hand on where values come from."""
        if isinstance(node, ast.Call) and self.is_answer(node.func):
            given = set().union(*map(loaded, [*node.args, *(word.value for word in node.keywords)]))
            self.answers |= given - self.objects - self.said - self.functions - BUILTINS
        elif isinstance(node, FUNCTIONS) and node.name != "check":
            for line in node.body:
                self.hand_on({node.name}, line)
                if loaded(line) & self.objects:
                    self.said.add(node.name)
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
        """Each name to its own part of the value, where both show their parts: a table of cases holds both kinds."""
        into, parts = getattr(target, "elts", []), rows_of(value)
        if into and len(into) == len(parts):
            for one, part in zip(into, parts, strict=True):
                self.bind(one, part)
        else:
            names = {node.id for node in [target, *walk(target)] if isinstance(node, ast.Name)}
            self.hand_on(names if isinstance(target, (ast.Name, ast.Tuple, ast.List)) else set(), value)

    def hand_on(self, names: set[str], value: ast.AST) -> None:
        if self.word(value):
            self.said |= names
        if self.asks(value):
            self.answers |= names
        if any(isinstance(part, ast.Name) and part.id in self.objects for part in self.parts(value)):
            self.objects |= names

    def is_answer(self, function: ast.expr) -> bool:
        """Whether it is the answer's: `f`, `Solution().f`. A method of plain data's may compare with what it gets."""
        if isinstance(function, ast.Attribute):
            return function.attr not in OF_DATA and self.asks(function.value) and not self.word(function.value)
        return isinstance(function, ast.Name) and function.id in (self.functions | self.answers) - self.said

    def parts(self, node: ast.AST) -> list[ast.AST]:
        """The nodes of an expression, but for what it gives to the answer's functions."""
        found = [node]
        for one in found:  # which grows
            if isinstance(one, ast.Call) and self.is_answer(one.func):
                one = one.func
            found += children(one)
        return found

    def asks(self, node: ast.AST) -> bool:
        """Whether an expression takes a value of the answer's."""
        for part in self.parts(node):
            if isinstance(part, ast.Call) and self.is_answer(part.func):
                return True
            if isinstance(part, ast.Name) and part.id in self.answers:
                return True
        return False

    def word(self, node: ast.AST) -> str:
        """The name of the setup, or made of one, whose word an expression takes: `built`, `Class.x`, `len(Class())`."""
        for part in self.parts(node):
            inside: list[ast.expr] = []
            if isinstance(part, ast.Name) and part.id in self.said:
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

    def misused(self) -> str:
        for node in self.found:
            if isinstance(node, (ast.Assert, ast.If, ast.While, ast.IfExp)):
                held = node.test
            elif isinstance(node, ast.Compare) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
                held = node
            else:
                continue
            name = self.word(held)
            if name and self.asks(held):
                return name
        return ""


def rows_of(value: ast.AST) -> list[ast.expr]:
    """The parts of a list, tuple or set as it is written."""
    return value.elts if isinstance(value, (ast.List, ast.Tuple, ast.Set)) else []


def names_of(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


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
