"""Test text into a plan, once per text: which calls go to the answer, and what is left to evaluate here.

An assert is `split` where its calls into the answer can be made up front, with arguments that are known before, and the
rest is an expression over plain data that can change nothing. All other tests are `rpc`: statements that run in a
fork and call over as they go. A name that neither the test nor what goes with it binds is the answer's, asked for when
it is used; but not where it is what a call is compared with: an expected value never comes from an answer. That, and
whatever else is wrong with a test whatever the answer says, is `BadTest`, and the verdict `invalid`.
Standard library only. `python -m pytest tests/test_sandbox_checker.py` exercises it.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import math
import sys
from functools import lru_cache
from types import CodeType
from typing import Any

from rlvr.sandbox.codec import MODULES, Encoder, Unfit
from rlvr.sandbox.remote import BadTest
from rlvr.sandbox.setup_parts import BUILTINS, IMPORTS, Setup, inner, loaded, nodes, stored, walk

PURE = (
    "abs", "all", "any", "bin", "bool", "bytes", "chr", "complex", "dict", "divmod", "enumerate", "filter", "float",
    "frozenset", "hash", "hex", "int", "isinstance", "len", "list", "map", "max", "min", "object", "oct", "ord", "pow",
    "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "type", "zip",
)  # fmt: skip
SUPPLIED = {"isclose": math.isclose}  # from a module that tests take for granted: never the answer's word
SAFE_BUILTINS = {**{name: getattr(builtins, name) for name in PURE}, **SUPPLIED}
PURE_MODULES = {"math": math, "sys": sys}
OF_MODULES = {"math": set(dir(math)), "sys": {"getsizeof", "maxsize"}}
GROWING = {"pow", "range", "bytes", "factorial", "comb", "perm", "prod"}  # a small value makes a large one
PURE_NODES = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Call,
    ast.BoolOp, ast.IfExp, ast.Subscript, ast.Slice, ast.Name, ast.Attribute, ast.keyword, ast.ListComp, ast.SetComp,
    ast.GeneratorExp, ast.DictComp, ast.comprehension, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop,
    ast.boolop,
    ast.JoinedStr, ast.FormattedValue,
)  # fmt: skip
# What may run in a process that lives on: its text can change nothing that outlives it and cannot loop by itself.
LIGHT_NODES = (
    *PURE_NODES, ast.Module, ast.Assert, ast.Expr, ast.Assign, ast.AugAssign, ast.For, ast.If, ast.Pass, ast.Break,
    ast.Continue, ast.FunctionDef, ast.Lambda, ast.arguments, ast.arg, ast.Return, ast.Try, ast.ExceptHandler,
    ast.Raise, ast.Starred, ast.Import, ast.ImportFrom, ast.alias,
)  # fmt: skip
LIGHT_MODULES = {"bisect", "cmath", "collections", "copy", "fractions", "itertools", "math", "operator", "string"}
HEAVY_BUILTINS = {
    "__import__", "breakpoint", "compile", "delattr", "eval", "exec", "exit", "getattr", "globals", "help", "input",
    "locals", "memoryview", "open", "quit", "setattr", "super", "vars",
}  # fmt: skip
GROWTH = (ast.Pow, ast.LShift, ast.Mult, ast.Mod)
LATE = (ast.BoolOp, ast.IfExp, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp, ast.Lambda)


class Split:
    """`calls` as [name, arguments, keyword arguments] in codec form; `code` reads their values as `_0`, `_1`, ...

    `modules` are supplied by the test's imports, `asked` are modules that the answer must have imported. `heavy` says
    that a value which came back may grow on evaluation, which had better not happen in a process that is to live on.
    """

    def __init__(self, cut: Cut, code: CodeType, message: CodeType | None, supplied: set[str], heavy: bool) -> None:
        self.code, self.message, self.heavy = code, message, heavy
        self.modules = {name: PURE_MODULES[name] for name in cut.modules & supplied}
        self.asked = sorted(cut.modules - supplied)
        self.calls = cut.calls + [[name] for name in self.asked]


class Statements:
    """`follows` an earlier test, whose names it uses; `check` says that it defines check(candidate)."""

    def __init__(self, code: CodeType, follows: bool, check: bool, heavy: bool) -> None:
        self.code, self.follows, self.check, self.heavy = code, follows, check, heavy


class Plan:
    """`called` are the answer's functions, `caught` its exceptions, `setup` what of it runs here.

    `needs` says that this setup asks the answer for something.
    """

    def __init__(
        self, tests: list[Split | Statements], called: set[str], caught: set[str], setup: CodeType | None, needs: bool
    ) -> None:
        self.tests, self.called, self.caught, self.setup, self.needs = tests, called, caught, setup, needs
        self.split = all(isinstance(test, Split) for test in tests)
        self.fork = setup is not None or any(test.heavy for test in tests)


@lru_cache(1024)
def plan(tests: tuple[str, ...], imports: tuple[str, ...], setup: str, entry_point: str | None) -> Plan:
    try:
        trees = [ast.parse(test, "<test>") for test in tests]
        before = ast.parse("\n".join(imports), "<imports>")
        after = ast.parse(setup, "<setup>")
    except (SyntaxError, ValueError, RecursionError) as error:
        raise BadTest(f"the test does not parse: {error}") from None
    imported = stored(before)
    missing(before, after)
    parts = Setup(after, imported)
    if parts.hidden:
        raise BadTest(f"a class of the setup uses {min(parts.hidden)!r} of it, which the answer must not get to see")
    own = set().union(*(stored(tree) for tree in trees), imported, stored(parts.here))
    free = {name for tree in trees for name in loaded(tree)} - own - BUILTINS - SUPPLIED.keys()
    calls = [node.func for tree in trees for node in nodes(tree) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    if not free and not entry_point and not parts.needs:
        free |= called & BUILTINS  # `assert sum(10, 15) == 6`: the answer's function has a builtin's name
    if "check" in own and not entry_point and not any("check" in loaded(tree) for tree in trees):
        raise BadTest("the test defines check(candidate), and no entry point says what the candidate is")
    classes = [node for tree in trees for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    for derived in sorted(name for node in classes for base in node.bases for name in loaded(base) & free):
        raise BadTest(f"the test derives a class from {derived!r} of the answer, which lives elsewhere")
    known = own | called | inner(trees) | stored(after) | {entry_point or ""}
    if name := parts.misused(trees, imported):
        raise BadTest(f"the test compares with what {name!r} says, which is made where the answer runs: use plain data")
    for tree in trees:
        unmet = sorted(operands(tree) & free - known)
        if unmet and (called & free or entry_point):
            raise BadTest(f"the test compares with {unmet[0]!r}, which neither it nor its setup defines")
    handlers = [node.type for tree in trees for node in nodes(tree) if isinstance(node, ast.ExceptHandler)]
    caught = set().union(*(loaded(kind) for kind in handlers if kind is not None)) & free
    plans: list[Split | Statements] = []
    earlier = stored(parts.here)  # which an answer may have changed: what fails on it is its failure
    for text, tree in zip(tests, trees, strict=True):
        made = None if entry_point and "check" in own else split(ast.parse(text), free, own, imported)
        if made is None:
            code = compile(tree, "<test>", "exec", dont_inherit=True)
            heavy = not (light(tree) and light(before)) or grows(tree)
            made = Statements(code, bool(loaded(tree) & earlier), "check" in stored(tree), heavy)
        plans.append(made)
        earlier |= stored(tree)
    code = compile(parts.here, "<setup>", "exec", dont_inherit=True) if parts.here.body else None
    return Plan(plans, called & free, caught, code, parts.needs)


def missing(*trees: ast.Module) -> None:
    """An import that no answer could have made work is no answer's failure."""
    for node in (node for tree in trees for node in tree.body if isinstance(node, IMPORTS)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for name in (name.split(".")[0] for name in names):
            if name and name not in sys.modules and importlib.util.find_spec(name) is None:
                raise BadTest(f"the test imports {name!r}; answers and tests have the standard library only")


def operands(tree: ast.AST) -> set[str]:
    """Names that stand alone on one side of a comparison."""
    sides = [side for node in nodes(tree) if isinstance(node, ast.Compare) for side in (node.left, *node.comparators)]
    return {side.id for side in sides if isinstance(side, ast.Name)}


def split(tree: ast.Module, free: set[str], own: set[str], imported: set[str]) -> Split | None:
    """Cuts the tree up, also where it comes to nothing."""
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assert):
        return None
    test = tree.body[0]
    cut = Cut(free, own - imported & PURE_MODULES.keys())
    try:
        rest = cut.visit(test.test)
        message = cut.rest(test.msg) if test.msg else None
        if not cut.pure(rest) or (message is not None and not cut.pure(message)):
            return None
        heavy = grows(rest) or (message is not None and grows(message))
        code = compile(ast.Expression(rest), "<test>", "eval", dont_inherit=True)
        said = compile(ast.Expression(message), "<test>", "eval", dont_inherit=True) if message is not None else None
    except NotSplit:
        return None
    return Split(cut, code, said, imported, heavy)


def light(tree: ast.AST) -> bool:
    """Whether these statements may run where the next verification runs, too."""
    for node in nodes(tree):
        if not isinstance(node, LIGHT_NODES):
            return False
        if isinstance(node, ast.Attribute):
            if not isinstance(node.ctx, ast.Load) or node.attr.startswith(("_", "format")):
                return False
        elif isinstance(node, ast.Name):
            if node.id in HEAVY_BUILTINS or (node.id in MODULES and node.id not in LIGHT_MODULES):
                return False
        elif isinstance(node, ast.Import):
            if any(alias.name not in LIGHT_MODULES for alias in node.names):
                return False
        elif isinstance(node, ast.ImportFrom) and node.module not in LIGHT_MODULES:
            return False
    return True


def grows(tree: ast.AST) -> bool:
    """Whether a value that came back could become far larger in this expression."""
    for node in [tree, *walk(tree)]:
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, GROWTH):
            name, parts = "", [node]
        elif isinstance(node, ast.Call):
            function = node.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            parts = node.args
        else:
            continue
        if name and name not in GROWING:
            continue
        if any(isinstance(part, ast.Name) and part.id not in BUILTINS for one in parts for part in [one, *walk(one)]):
            return True
    return False


class NotSplit(Exception):
    """The assert needs to be run as it stands."""


def known_builtin(value: Any) -> list[Any]:
    if getattr(builtins, getattr(value, "__name__", ""), None) is value:
        return ["builtin", value.__name__]
    raise NotSplit


class Cut(ast.NodeTransformer):
    def __init__(self, free: set[str], own: set[str]) -> None:
        self.free, self.own, self.late = free, own, 0
        self.calls: list[list[Any]] = []
        self.modules: set[str] = set()

    def rest(self, node: ast.expr) -> ast.expr:
        """An expression in which no call may stand: a message is evaluated only where the test failed."""
        self.late += 1
        return self.visit(node)

    def visit(self, node: ast.AST) -> Any:
        late = isinstance(node, LATE) or (isinstance(node, ast.Compare) and len(node.ops) > 1)
        self.late += late
        try:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.free:
                return self.cut(node, node.func.id)
            return self.generic_visit(node)
        finally:
            self.late -= late

    def cut(self, node: ast.Call, name: str) -> ast.Name:
        parts = [*node.args, *(word.value for word in node.keywords)]
        if self.late or any(word.arg is None for word in node.keywords) or not all(self.pure(part) for part in parts):
            raise NotSplit
        arguments = ast.List(node.args, ast.Load())
        keys: list[ast.expr | None] = [ast.Constant(word.arg) for word in node.keywords]
        given = ast.Tuple([arguments, ast.Dict(keys, [word.value for word in node.keywords])], ast.Load())
        code = compile(ast.fix_missing_locations(ast.Expression(ast.copy_location(given, node))), "<test>", "eval")
        try:
            args, kwargs = eval(code, {"__builtins__": SAFE_BUILTINS, **PURE_MODULES})
            self.calls.append([name, Encoder(known_builtin).encode(args), Encoder(known_builtin).encode(kwargs)])
        except (NotSplit, Unfit):
            raise NotSplit from None
        except Exception as error:
            raise BadTest(f"the test raises before it calls {name}: {type(error).__name__}: {error}") from None
        return ast.copy_location(ast.Name(f"_{len(self.calls) - 1}", ast.Load()), node)

    def pure(self, tree: ast.AST) -> bool:
        """Can be evaluated without changing anything, from nothing but plain data."""
        found = [tree, *walk(tree)]
        bound = {n.id for n in found if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        values = {f"_{number}" for number in range(len(self.calls))}
        for node in found:
            if not isinstance(node, PURE_NODES):
                return False
            if isinstance(node, ast.Attribute):
                module = node.value.id if isinstance(node.value, ast.Name) else ""
                if module not in OF_MODULES or module in bound | self.own or node.attr not in OF_MODULES[module]:
                    return False
                self.modules.add(module)
            elif isinstance(node, ast.Name) and node.id not in bound | values | self.modules:
                if node.id in self.own or (node.id not in SAFE_BUILTINS and node.id not in PURE_MODULES):
                    return False
            elif isinstance(node, ast.Call) and not isinstance(node.func, (ast.Name, ast.Attribute)):
                return False
        return True
