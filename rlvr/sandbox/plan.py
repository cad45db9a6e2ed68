"""Turns test text into a plan, once per text: which calls go to the answer, and what is left to evaluate here.

An assert is a `SplitTest` if its calls of the answer can be made up front, with arguments known before, and the rest is
an expression over plain data without side effects. All other tests are `StatementTest`s: statements that run in a fork
and call the answer as they go. A name that neither the test nor its setup binds belongs to the answer, and is requested
when it is used; but not where a call is compared with it, because an expected value never comes from an answer. That,
and any other fault of a test that does not depend on the answer, is a `BadTest`, and the verdict `invalid`.
Standard library only.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any

from rlvr.sandbox.answer_names import find_missing_name
from rlvr.sandbox.codec import MODULES, CodecError, Encoder
from rlvr.sandbox.native_parts import (
    find_file_comparison,
    find_native_classes,
    find_native_functions,
    find_own_comparison,
    makes_files,
)
from rlvr.sandbox.own_part import OwnPart, takes_time
from rlvr.sandbox.remote import BadTest
from rlvr.sandbox.setup_parts import (
    BUILTINS,
    IMPORTS,
    Setup,
    bound_names,
    inner_names,
    nodes,
    used_names,
    walk,
)
from rlvr.sandbox.test_program import rewrite
from rlvr.sandbox.test_rewriting import MAPPING, SEQUENCE, simplify
from rlvr.sandbox.vacuous_tests import find_self_reports, find_vacuous_test
from rlvr.sandbox.value_flow import (
    captures_output,
    find_coroutine_fault,
    find_deciding,
    find_filled,
    find_held,
    find_tainted,
    has_assertion,
    reads_attributes,
    uses_answer_objects,
)

PURE = (
    "abs", "all", "any", "bin", "bool", "bytes", "chr", "complex", "dict", "divmod", "enumerate", "filter", "float",
    "frozenset", "hash", "hex", "int", "isinstance", "len", "list", "map", "max", "min", "object", "oct", "ord", "pow",
    "range", "repr", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "type", "zip",
)  # fmt: skip
SUPPLIED = {
    "isclose": math.isclose,
    SEQUENCE: Sequence,
    MAPPING: Mapping,
}  # from a module that tests take for granted: never requested from the answer
SAFE_BUILTINS = {**{name: getattr(builtins, name) for name in PURE}, **SUPPLIED}
PURE_MODULES = {"math": math, "sys": sys}
OF_MODULES = {"math": set(dir(math)), "sys": {"getsizeof", "maxsize"}}
GROWING = {"pow", "range", "bytes", "factorial", "comb", "perm", "prod"}  # a small argument makes a large value
PURE_NODES = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Compare, ast.Call,
    ast.BoolOp, ast.IfExp, ast.Subscript, ast.Slice, ast.Name, ast.Attribute, ast.keyword, ast.ListComp, ast.SetComp,
    ast.GeneratorExp, ast.DictComp, ast.comprehension, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop,
    ast.boolop,
    ast.JoinedStr, ast.FormattedValue,
)  # fmt: skip
# What may run in a process that judges others: such code can change nothing outside itself and cannot loop forever.
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
# What binds no name: tests of nothing else need no analysis of where values of the answer may go.
UNBINDING = {
    ast.Module, ast.Assert, ast.Expr, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp,
    ast.Compare, ast.Call, ast.BoolOp, ast.IfExp, ast.Subscript, ast.Slice, ast.Name, ast.Attribute, ast.keyword,
    ast.Starred, ast.JoinedStr, ast.FormattedValue,
}  # fmt: skip
GROWTH = (ast.Pow, ast.LShift, ast.Mult, ast.Mod)
LOOKS = {"type", "isinstance", "str", "repr", "hash", "len", "iter"}
LATE = (ast.BoolOp, ast.IfExp, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp, ast.Lambda)


class SplitTest:
    """An assert split into calls ([name, arguments, keyword arguments] in codec form) and the code that is left.

    `code` reads the values as `_0`, `_1`, ... `modules` come from the test's imports; `module_names` are modules that
    the answer must have imported. `looks_at_type`: the code may tell a subclass from its base. `heavy`: a value may
    grow on evaluation, so a fork evaluates it.
    """

    def __init__(
        self, extractor: CallExtractor, code: CodeType, message: CodeType | None, supplied: set[str], heavy: bool
    ) -> None:
        self.code, self.message, self.heavy = code, message, heavy
        self.modules = {name: PURE_MODULES[name] for name in extractor.modules & supplied}
        self.module_names = sorted(extractor.modules - supplied)
        self.looks_at_type = bool(LOOKS & set(code.co_names))
        self.calls = extractor.calls + [[name] for name in self.module_names]


class StatementTest:
    """Rewritten statements to run. `follows`: they use names of an earlier test; `defines_check`: they define check."""

    def __init__(self, code: CodeType, follows: bool, defines_check: bool, heavy: bool) -> None:
        self.code, self.follows, self.defines_check, self.heavy = code, follows, defines_check, heavy


class Plan:
    """How to run a verification's tests.

    `setup`: what of it runs here; `setup_asks`: that calls the answer, or defines what runs beside it.
    `needs_fork`: the checker must not run it in its own process. `uses_objects`: by their own text, the tests work with
    objects of the answer. `reads_attributes`: they read attributes of these. `make_statements` makes
    the tests as statements, for answers whose values are no plain data; `make_own_part` makes what of the setup and of
    the tests does not depend on the answer, empty if that takes no time. `self_report` says that the tests only ask the
    answer about itself, where that is accepted.
    """

    def __init__(
        self,
        tests: list[SplitTest | StatementTest],
        make_statements: Callable[[], list[StatementTest]],
        setup: CodeType | None,
        setup_asks: bool,
        uses_objects: bool,
        reads_attributes: bool,
        captures_output: bool,
        self_report: str,
        makes_files: bool,
        make_own_part: Callable[[], list[CodeType]],
    ) -> None:
        self.captures_output, self.self_report, self.makes_files = captures_output, self_report, makes_files
        self.tests, self.setup, self.setup_asks = tests, setup, setup_asks
        self.uses_objects, self.reads_attributes = uses_objects, reads_attributes
        self.is_split = all(isinstance(test, SplitTest) for test in tests)
        self.needs_fork = setup is not None or any(test.heavy for test in tests)
        self.make_statements = lru_cache(1)(make_statements)
        self.make_own_part = lru_cache(1)(make_own_part)


@lru_cache(1024)
def make_plan(
    tests: tuple[str, ...],
    imports: tuple[str, ...],
    setup: str,
    entry_point: str | None,
    answer_names: tuple[str, ...] = (),
    self_reports: bool = False,
) -> Plan:
    trees: list[ast.Module] = []
    try:
        for test in tests:
            trees.append(parse(test, "<test>"))
        before = ast.parse("\n".join(imports), "<imports>")
        after = parse(setup, "<setup>")
    except (SyntaxError, ValueError, RecursionError) as error:
        place = f"tests[{len(trees)}]" if len(trees) < len(tests) and len(tests) > 1 else "the test"
        raise BadTest(f"{place} does not parse: {error}") from None
    imported = bound_names(before)
    check_imports(before, after, *trees)
    parts = Setup(after, imported)
    if parts.hidden:
        raise BadTest(f"a class of the setup uses {min(parts.hidden)!r} of it, which the answer must not see")
    own = set().union(*(bound_names(tree) for tree in trees), imported, bound_names(parts.here))
    names = {name for tree in trees for name in used_names(tree)}
    free = names - own - BUILTINS - SUPPLIED.keys()
    calls = [node.func for tree in trees for node in nodes(tree) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    if not free and not entry_point and not parts.needs_answer:
        free |= called & BUILTINS  # `assert sum(10, 15) == 6`: the answer's function has a builtin's name
    if "check" in own and not entry_point and not any("check" in used_names(tree) for tree in trees):
        raise BadTest(
            "the test defines check(candidate), and no entry point is given; set entry_point to the candidate's name"
        )
    if fault := find_missing_name(trees, free - bound_names(after), entry_point, answer_names):
        raise BadTest(fault)
    for node in (node for tree in trees for node in nodes(tree) if isinstance(node, ast.ClassDef)):
        derived = sorted(set().union(*map(used_names, node.bases)) & free)
        if derived and has_assertion(node):
            raise BadTest(
                f"a class with assertions derives from {derived[0]!r}, which is beside the answer: assert outside of it"
            )
    everything = [*trees, parts.here]
    kinds = {type(node) for tree in everything for node in nodes(tree)}
    binds = not kinds <= UNBINDING
    inner = inner_names(trees) if binds else set[str]()
    known = own | called | inner | bound_names(after) | {entry_point or ""}
    if name := parts.find_misuse(trees, imported):
        raise BadTest(f"the test compares with {name!r}, whose value is made where the answer runs: use plain data")
    for tree in trees:
        unmet = sorted(find_unmet(tree, free - known, free))
        if unmet and (called & free or entry_point):
            raise BadTest(f"the test compares with {unmet[0]!r}, which neither it nor its setup defines")
    if fault := find_vacuous_test(trees, after, free | parts.built, entry_point):
        raise BadTest(fault)
    in_setup = used_names(parts.here)
    of_setup = in_setup - own - BUILTINS - inner_names([parts.here])
    scope = (free | of_setup) - (MODULES - called) - inner
    classes = {node.name for node in after.body if isinstance(node, ast.ClassDef)}
    native, tainted, held, deciding = set[str](), scope | classes, set[str](), set[str]()
    if binds:
        deciding = find_deciding(trees, scope)
        if fault := find_coroutine_fault(trees, scope, deciding):
            raise BadTest(fault)
        native = native_classes = find_native_classes(everything, scope | classes)
        known_before = None
        while known_before != (held, native):  # what is held is tainted, and may taint more
            known_before = held, native
            tainted = find_tainted(everything, scope | classes | held, native)
            held = find_held(everything, tainted, native, deciding)
            native = native_classes | find_native_functions(everything, scope | classes, tainted | held, deciding)
        if name := find_own_comparison(everything, scope, native):
            raise BadTest(
                f"the test compares an object of the answer with one of its own class {name!r}: use plain data"
            )
    is_plain = not binds and ast.Attribute not in kinds and all(name.islower() for name in scope)
    uses_objects = not is_plain and uses_answer_objects(everything, scope | classes, tainted)
    self_report = find_self_reports(trees, free, tainted)
    if self_report and not self_reports:
        raise BadTest(
            f"{self_report}: add an assertion that compares what it returns with plain data, or accept such tests "
            "(self_reports)"
        )
    if (binds or "open" in names | in_setup) and (fault := find_file_comparison(everything, scope | classes)):
        raise BadTest(fault)
    if binds and (filled := find_filled(everything, tainted) - tainted):
        tainted = find_tainted(everything, scope | classes | held | filled, native)
    plans: list[SplitTest | StatementTest] = []
    starts: list[set[str]] = []  # names of earlier tests, which an answer may have changed: a failure is then its own
    earlier = set(bound_names(parts.here))
    checks = bool(entry_point) and "check" in own

    def state(place: int) -> StatementTest:
        tree = trees[place]
        heavy = not (is_light(tree) and is_light(before)) or can_grow(tree)
        program = rewrite(parse(tests[place]), scope | classes, tainted, held, native, deciding, everything)
        code = compile(program, "<test>", "exec", dont_inherit=True)
        return StatementTest(code, bool(used_names(tree) & starts[place]), "check" in bound_names(tree), heavy)

    def own_part() -> list[CodeType]:
        cut = OwnPart(everything, tainted | scope | classes, native)
        made = [cut.of(parse(text)) for text in (ast.unparse(parts.here), *tests)]
        return [compile(one, "<test>", "exec", dont_inherit=True) for one in made] if takes_time(made) else []

    for place, (text, tree) in enumerate(zip(tests, trees, strict=True)):
        starts.append(set(earlier))
        planned = None if checks or uses_objects else split_assert(ast.parse(text), free, own, imported)
        plans.append(planned or state(place))
        earlier |= bound_names(tree)
    code = None
    if parts.here.body:
        here = rewrite(ast.parse(ast.unparse(parts.here)), scope | classes, tainted, held, native, deciding, everything)
        code = compile(here, "<setup>", "exec", dont_inherit=True) if here.body else None
    return Plan(
        plans,
        lambda: [state(place) for place in range(len(trees))],
        code,
        parts.needs_answer or not native.isdisjoint(bound_names(parts.here)),
        uses_objects,
        not is_plain and reads_attributes(everything, tainted),
        not is_plain and captures_output(everything),
        self_report,
        not is_plain and makes_files(everything),
        own_part,
    )


def parse(text: str, place: str = "<test>") -> ast.Module:
    return simplify(ast.parse(text, place), text)


def find_unmet(tree: ast.AST, unknown: set[str], free: set[str]) -> set[str]:
    """Names that only the answer binds, on one side of a comparison whose other side calls the answer."""
    found: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            calls = [one for side in sides for one in nodes(side) if isinstance(one, ast.Call)]
            if any(used_names(call.func) & free for call in calls):
                found |= {side.id for side in sides if isinstance(side, ast.Name)} & unknown
    return found


def check_imports(*trees: ast.Module) -> None:
    """Raise `BadTest` for an import that cannot work with any answer."""
    for node in (node for tree in trees for node in tree.body if isinstance(node, IMPORTS)):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for name in (name.split(".")[0] for name in names):
            if name and name not in sys.modules and importlib.util.find_spec(name) is None:
                raise BadTest(f"the test imports {name!r}; answers and tests have the standard library only")


def split_assert(tree: ast.Module, free: set[str], own: set[str], imported: set[str]) -> SplitTest | None:
    """Split an assert, changing its tree; None if it must run as statements."""
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assert):
        return None
    test = tree.body[0]
    extractor = CallExtractor(free, own - imported & PURE_MODULES.keys())
    try:
        rest = extractor.visit(test.test)
        message = extractor.visit_message(test.msg) if test.msg else None
        if not extractor.is_pure(rest) or (message is not None and not extractor.is_pure(message)):
            return None
        heavy = can_grow(rest) or (message is not None and can_grow(message))
        code = compile_expression(rest)
        message_code = compile_expression(message) if message is not None else None
    except NotSplit:
        return None
    return SplitTest(extractor, code, message_code, imported, heavy)


def compile_expression(node: ast.expr) -> CodeType:
    return compile(ast.Expression(node), "<test>", "eval", dont_inherit=True)


def is_light(tree: ast.AST) -> bool:
    """Whether these statements may run in the process that also runs later verifications."""
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


def can_grow(tree: ast.AST) -> bool:
    """Whether a value from the answer could become far larger in this expression."""
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
    """The assert has to run as it is."""


def known_builtin(value: Any) -> list[Any]:
    if getattr(builtins, getattr(value, "__name__", ""), None) is value:
        return ["builtin", value.__name__]
    raise NotSplit


class CallExtractor(ast.NodeTransformer):
    """Replaces calls of the answer in an expression by the names `_0`, `_1`, ... and collects them in `calls`."""

    def __init__(self, free: set[str], own: set[str]) -> None:
        self.free, self.own, self.late = free, own, 0
        self.calls: list[list[Any]] = []
        self.modules: set[str] = set()

    def visit_message(self, node: ast.expr) -> ast.expr:
        """Visit the message of an assert. NotSplit if it calls the answer: only a failed one is evaluated."""
        self.late += 1
        return self.visit(node)

    def visit(self, node: ast.AST) -> Any:
        """Replace calls of the answer below `node`; raise NotSplit where one is not evaluated exactly once."""
        late = isinstance(node, LATE) or (isinstance(node, ast.Compare) and len(node.ops) > 1)
        self.late += late
        try:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.free:
                return self.extract(node, node.func.id)
            return self.generic_visit(node)
        finally:
            self.late -= late

    def extract(self, node: ast.Call, name: str) -> ast.Name:
        parts = [*node.args, *(word.value for word in node.keywords)]
        unpacks = any(word.arg is None for word in node.keywords)
        if self.late or unpacks or not all(self.is_pure(part) for part in parts):
            raise NotSplit
        arguments = ast.List(node.args, ast.Load())
        keys: list[ast.expr | None] = [ast.Constant(word.arg) for word in node.keywords]
        both = ast.Tuple([arguments, ast.Dict(keys, [word.value for word in node.keywords])], ast.Load())
        code = compile_expression(ast.fix_missing_locations(ast.copy_location(both, node)))
        try:
            args, kwargs = eval(code, {"__builtins__": SAFE_BUILTINS, **PURE_MODULES})
            self.calls.append([name, Encoder(known_builtin).encode(args), Encoder(known_builtin).encode(kwargs)])
        except (NotSplit, CodecError):
            raise NotSplit from None
        except Exception as error:
            raise BadTest(f"the test raises before it calls {name}: {type(error).__name__}: {error}") from None
        return ast.copy_location(ast.Name(f"_{len(self.calls) - 1}", ast.Load()), node)

    def is_pure(self, tree: ast.AST) -> bool:
        """Whether an expression has no side effects and reads plain data only."""
        all_nodes = [tree, *walk(tree)]
        bound = {n.id for n in all_nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        values = {f"_{number}" for number in range(len(self.calls))}
        for node in all_nodes:
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
            elif isinstance(node, ast.Compare) and any(isinstance(one, (ast.Is, ast.IsNot)) for one in node.ops):
                sides = [node.left, *node.comparators]  # copies of one object are not one object
                if (
                    sum(bool({n.id for n in [side, *walk(side)] if isinstance(n, ast.Name)} & values) for side in sides)
                    > 1
                ):
                    return False
        return True
