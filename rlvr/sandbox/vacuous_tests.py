"""Finds tests that check nothing: they pass whatever the answer does, or swallow the failure of their own assert.

    find_vacuous_test([ast.parse("assert (f(2) == 4, 'no')")], ast.parse(""), {"f"}, None)
    # "the test passes for every answer: its assert is always true"

`assert True` and its kin, an assert that no statement reaches or that an `except` swallows, a comparison without
`assert`, a test that does not depend on the answer. Only what is certain from the text counts: exceptions aside, such a
test cannot fail. Texts with one assert that can fail are accepted, since HumanEval's hold `assert True` beside others.
Weak checks (`assert f(2) == f(2)`, `assert f`) are accepted beside a check of a value, never alone. Nor are tests that
only ask the answer about itself (`find_self_reports`): it can say of itself what it likes.
Standard library only.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Sequence

from rlvr.sandbox.setup_parts import BUILTINS, FUNCTIONS, children, nodes, used_names, walk
from rlvr.sandbox.value_flow import LOOK_AT_FILES, native_names

TRIES = (ast.Try, ast.TryStar)
SAME_IS_TRUE, SAME_IS_FALSE = (ast.Eq, ast.LtE, ast.GtE), (ast.NotEq, ast.Lt, ast.Gt)
CHECKS = ("assert", "fail", "check", "verify", "expect", "ensure", "require")  # how names of checking functions begin
ENDS = ("exit", "quit", "_exit", "exec", "eval")  # calls that may fail a test in ways that a text does not show
REPORTS = ("print", "print_exc", "warn", "warning", "error", "info", "debug", "exception", "log")
NAMESPACES = ("globals", "locals")  # in which a test looks for the functions that it calls
RUNNERS = ("TextTestRunner", "TestLoader", "defaultTestLoader", "TestSuite", "makeSuite", "main")
SHARED_MODULES = ("builtins", "logging", "os", "sys", "warnings")  # by which an answer acts on what a test has made
DISPLAYS = (ast.List, ast.Tuple, ast.Set)
OF_ASSERTIONS = ("AssertionError", "Exception", "BaseException")
STRONG, WEAK = "", "weak"  # what a check is, else why it is vacuous


def find_vacuous_test(
    trees: Sequence[ast.Module], setup: ast.Module, of_answer: set[str], entry_point: str | None
) -> str:
    """Why one of the tests, or all of them together, check nothing; "" if they do. `of_answer`: the answer's names."""
    if trees and all(compares_result(tree, of_answer) for tree in trees):
        return ""
    return VacuousTests(trees, setup, of_answer, entry_point).find()


def compares_result(tree: ast.Module, of_answer: set[str]) -> bool:
    """Whether a test is `assert f(...) == literal`, as most are: it checks a result, whatever else there is."""
    test = tree.body[0].test if len(tree.body) == 1 and isinstance(tree.body[0], ast.Assert) else None
    if not isinstance(test, ast.Compare) or len(test.ops) > 1 or not isinstance(test.ops[0], ast.Eq):
        return False
    if not isinstance(test.comparators[0], (*DISPLAYS, ast.Dict, ast.Constant)):
        return False
    call = test.left
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in of_answer - BUILTINS


def are_alike(sides: list[ast.expr]) -> bool:
    return len(set(map(type, sides))) == 1 and len({ast.dump(side) for side in sides}) == 1


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


class VacuousTests:
    """The tests of one verification as one program: functions and names of one text may be used by the next."""

    def __init__(
        self, trees: Sequence[ast.Module], setup: ast.Module, of_answer: set[str], entry_point: str | None
    ) -> None:
        self.trees, self.entry_point = trees, entry_point
        self.all_nodes = [node for tree in (setup, *trees) for node in nodes(tree)]
        self.defined = {n.name: n for n in self.all_nodes if isinstance(n, (*FUNCTIONS, ast.ClassDef))}
        calls = [node.func for node in self.all_nodes if isinstance(node, ast.Call)]
        called = {function.id for function in calls if isinstance(function, ast.Name)}
        stored = {n.id for n in self.all_nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        calls_found = called & stored or any(isinstance(function, ast.Subscript) for function in calls)
        self.namespaces = NAMESPACES if calls_found else ()
        self.functions = {*self.defined, *(called & of_answer), entry_point}
        self.loaded = Counter(n.id for n in self.all_nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        self.of_answer = of_answer | {entry_point or ""}
        self.dependent = self.find_dependent([*setup.body, *(line for tree in trees for line in tree.body)])
        self.constants = self.find_constants()
        bare = [node.value for node in self.all_nodes if isinstance(node, ast.Expr)]
        self.silent_runs = [call for call in bare if isinstance(call, ast.Call) and is_silent_run(call)]
        self.checking: set[str] = set()
        before = -1
        while before < len(self.checking):  # functions that call checking functions check as well
            before = len(self.checking)
            for name, node in self.defined.items():
                if isinstance(node, ast.ClassDef):
                    methods = [one.body for one in node.body if isinstance(one, FUNCTIONS)]
                    bodies = [] if self.silent_runs and "TestCase" in map(last_name, node.bases) else methods
                else:
                    bodies = [node.body]
                if any(why in (STRONG, WEAK) for body in bodies for why in self.read_block(body)):
                    self.checking.add(name)

    def find(self) -> str:
        is_strong = is_weak = False
        for index, tree in enumerate(self.trees):
            place = f"tests[{index}]" if len(self.trees) > 1 else "the test"
            found = self.read_block(tree.body)
            bound = {line.name for line in tree.body if isinstance(line, (*FUNCTIONS, ast.ClassDef))}
            if self.entry_point and "check" in bound & self.checking:
                found.append(STRONG)
            is_strong, is_weak = is_strong or STRONG in found, is_weak or WEAK in found
            if STRONG in found or WEAK in found:
                continue
            if found:
                return f"{place} passes for every answer: {found[0]}"
            if idle := sorted(name for name in bound & self.checking if not self.loaded[name]):
                return f"{place} passes for every answer: it defines {idle[0]} and never calls it"
            if any(isinstance(line, ast.Expr) and is_condition(line.value) for line in tree.body):
                return f"{place} passes for every answer: it compares without assert; write `assert` before it"
        if is_strong:
            return ""
        if is_weak:
            return "the tests compare no result with a value: they only ask for a name, or compare a call with itself"
        return "the tests check nothing: none has an assert; compare what the answer returns with what you expect"

    # --- what depends on the answer -----------------------------------------------------------------------------------

    def find_dependent(self, lines: Sequence[ast.stmt]) -> set[str]:
        """Names whose values may depend on the answer: a statement that uses one makes all of its names so."""
        checks = [node for node in self.all_nodes if isinstance(node, FUNCTIONS) and node.name == "check"]
        found = self.of_answer | {arg.arg for node in checks for arg in node.args.args if self.entry_point}
        found |= {line.name for line in lines if isinstance(line, ast.ClassDef)}
        found |= set().union(*(native_names(node, SHARED_MODULES) for node in self.all_nodes))
        names = [all_names(line) for line in lines]
        before = -1
        while before < len(found):
            before = len(found)
            for used in names:
                if used & found:
                    found |= used
        return found

    def find_constants(self) -> dict[str, ast.expr]:
        """Names that are bound once, to a constant or to an empty list that nothing can fill."""
        bound: Counter[str] = Counter()
        values: dict[str, ast.expr] = {}
        touched: set[str] = set()
        for node in self.all_nodes:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                bound[node.id] += 1
            elif isinstance(node, ast.arg):
                bound[node.arg] += 1
            elif isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.alias, ast.ExceptHandler)):
                bound[node.name or ""] += 1
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                touched |= {*node.names}
            elif isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.AugAssign)):
                touched |= {n.id for n in children(node) if isinstance(n, ast.Name)}
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                is_empty = isinstance(node.value, (ast.List, ast.Tuple, ast.Dict)) and not children(node.value)[1:]
                if isinstance(node.value, ast.Constant) or (is_empty and not getattr(node.value, "elts", None)):
                    values[node.targets[0].id] = node.value
        return {name: value for name, value in values.items() if bound[name] == 1 and name not in touched}

    # --- checks in statements -----------------------------------------------------------------------------------------

    def read_block(self, lines: Iterable[ast.stmt], caught: str = "") -> list[str]:
        """What each check of a block is. `caught`: why its failure is lost."""
        found: list[str] = []
        lost = caught
        for line in lines:
            found += self.read(line, lost)
            if isinstance(line, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
                lost = lost or "no assert is ever reached"
        return found

    def read(self, line: ast.stmt, caught: str) -> list[str]:
        if isinstance(line, (*FUNCTIONS, ast.ClassDef)):
            return []  # counts where it is called
        unreached = caught or "no assert is ever reached"
        if isinstance(line, ast.Assert):
            return [caught or self.classify(line.test), *self.read_calls(line.test, caught, of_assert=True)]
        if isinstance(line, ast.Raise):
            return [caught]
        if isinstance(line, (ast.If, ast.While)):
            holds = self.truth(line.test)
            found = self.read_calls(line.test, caught)
            found += self.read_block(line.body, unreached if holds is False else caught)
            is_skipped = holds is True and isinstance(line, ast.If)
            return found + self.read_block(line.orelse, unreached if is_skipped else caught)
        if isinstance(line, (ast.For, ast.AsyncFor)):
            found = self.read_block(line.body, unreached if self.is_empty(line.iter) else caught)
            return self.read_calls(line.iter, caught) + found + self.read_block(line.orelse, caught)
        if isinstance(line, TRIES):
            swallowed = caught
            if self.swallows(line):
                swallowed = caught or "its except (or finally) swallows the AssertionError"
            found = self.read_block(line.body, swallowed)
            for block in (line.orelse, line.finalbody, *(handler.body for handler in line.handlers)):
                found += self.read_block(block, caught)
            return found
        if isinstance(line, (ast.With, ast.AsyncWith)):
            found = [kind for item in line.items for kind in self.read_calls(item.context_expr, caught)]
            if any(is_suppressing(item.context_expr) for item in line.items):
                caught = caught or "its suppress() swallows the AssertionError"
            return found + self.read_block(line.body, caught)
        if isinstance(line, ast.Match):
            return [kind for case in line.cases for kind in self.read_block(case.body, caught)]
        if isinstance(line, ast.Expr) and line.value in self.silent_runs:
            return ["its runner reports failures without raising them"]
        return self.read_calls(line, caught)

    def read_calls(self, node: ast.AST, caught: str, of_assert: bool = False) -> list[str]:
        """The checks made by the calls in a statement or expression."""
        if of_assert and not self.checking:
            return []
        bare = node.value if isinstance(node, ast.Expr) else None
        parts = [node, *walk(node)]
        in_thread = [one for call in parts if function_name(call) in ("Thread", "Timer") for one in walk(call)]
        for one in parts:
            name = last_name(one)
            if isinstance(one, ast.Name) and name in self.checking:
                is_run = isinstance(bare, ast.Call) and bare.func is one
                if one in in_thread:
                    return [caught or "what fails in a thread does not fail the test"]
                if not (is_run and is_lazy(self.defined[name])):
                    return [caught]
            elif self.checking and name in (RUNNERS if isinstance(one, ast.Attribute) else self.namespaces):
                return [caught]
            if isinstance(one, ast.Call) and not of_assert:
                name = function_name(one)
                if name in ENDS or (name.startswith(CHECKS) and name not in self.defined):
                    return [caught]
        return []

    def swallows(self, line: ast.Try | ast.TryStar) -> bool:
        """Whether an AssertionError in its body is lost."""
        if any(isinstance(last, (ast.Return, ast.Break, ast.Continue)) for last in line.finalbody):
            return True
        for handler in line.handlers:
            if handler.type is None or catches_assertions(handler.type):
                return all(self.is_idle(one) for one in handler.body)
        return False

    def is_idle(self, line: ast.stmt) -> bool:
        """Whether a statement of a handler neither fails the test nor leaves anything that another one reads."""
        if isinstance(line, ast.Assert):
            return self.truth(line.test) is True
        if isinstance(line, ast.Assign):
            targets = [target.id for target in line.targets if isinstance(target, ast.Name)]
            return len(targets) == len(line.targets) and not any(self.loaded[name] for name in targets)
        if isinstance(line, ast.Return):
            return line.value is None
        if isinstance(line, ast.Expr):
            return isinstance(line.value, ast.Constant) or function_name(line.value) in REPORTS
        return isinstance(line, (ast.Pass, ast.Break, ast.Continue))

    def classify(self, test: ast.expr) -> str:
        """Classify the assert statement of this condition."""
        holds = self.truth(test)
        if holds is not None:
            return "its assert is always true" if holds else STRONG  # `assert False`: where no exception was raised
        if not (used_names(test) & self.dependent) and used_names(test) <= BUILTINS | self.loaded.keys():
            return "it does not depend on the answer"
        named = test
        if isinstance(test, ast.Compare) and is_none(test.comparators[-1]):
            named = test.left
        is_weak = isinstance(named, ast.Name) and named.id in self.of_answer
        return WEAK if is_weak or self.compares_with_itself(test) else STRONG

    def compares_with_itself(self, test: ast.expr) -> bool:
        """`f(2) == f(2)` of a function; objects have an `__eq__` of their own to test (`P(1) == P(1)`)."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and isinstance(test.operand, ast.Compare):
            inner, kinds = test.operand, SAME_IS_FALSE
        elif isinstance(test, ast.Compare):
            inner, kinds = test, SAME_IS_TRUE
        else:
            return False
        sides = [inner.left, *inner.comparators]
        if isinstance(inner.ops[0], ast.In) and len(sides) == 2 and isinstance(sides[1], DISPLAYS):
            if ast.dump(sides[0]) not in map(ast.dump, sides[1].elts):
                return False
        elif not (all(isinstance(op, kinds) for op in inner.ops) and are_alike(sides)):
            return False
        names = {name for name in used_names(sides[0]) if name in self.of_answer}
        return bool(names) and all(name[:1].islower() for name in names)

    # --- what a condition is, whatever the answer returns -------------------------------------------------------------

    def truth(self, node: ast.expr) -> bool | None:
        """Whether an expression is always true or always false, if it does not raise; None if that is open."""
        if isinstance(node, ast.Constant):
            return bool(node.value)
        if isinstance(node, (ast.Lambda, ast.GeneratorExp)):
            return True
        if isinstance(node, DISPLAYS):
            return (
                True if any(not isinstance(part, ast.Starred) for part in node.elts) else None if node.elts else False
            )
        if isinstance(node, ast.Dict):
            return True if any(node.keys) else None if node.keys else False
        if isinstance(node, ast.JoinedStr):
            return any(isinstance(part, ast.Constant) and part.value for part in node.values) or None
        if isinstance(node, ast.Name):
            if node.id in self.constants:
                return self.truth(self.constants[node.id])
            return True if node.id in self.functions else None
        if isinstance(node, ast.NamedExpr):
            return self.truth(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self.truth(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            return self.truth_of_parts(node.values, decides=isinstance(node.op, ast.Or))
        if isinstance(node, ast.IfExp):
            chosen = self.truth(node.test)
            ways = [self.truth(way) for way in (node.body, node.orelse)]
            return ways[not chosen] if chosen is not None else ways[0] if ways[0] is ways[1] else None
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            pairs = [self.compare(*pair) for pair in zip(sides, node.ops, node.comparators, strict=False)]
            return False if False in pairs else None if None in pairs else True
        return self.truth_of_call(node) if isinstance(node, ast.Call) else None

    def truth_of_parts(self, parts: Sequence[ast.expr], decides: bool) -> bool | None:
        """The truth of `or` (`decides` True) and of `and` (False)."""
        known = [self.truth(part) for part in parts]
        opposites = {ast.dump(negation(part)) for part in parts} & {ast.dump(part) for part in parts}
        if decides in known or opposites:
            return decides
        return None if None in known else not decides

    def truth_of_call(self, node: ast.Call) -> bool | None:
        name = node.func.id if isinstance(node.func, ast.Name) and node.func.id in BUILTINS - self.of_answer else ""
        first = node.args[0] if node.args and not isinstance(node.args[0], ast.Starred) else None
        if name == "print":
            return False
        if first is None:
            return None
        if name == "bool":
            return self.truth(first)
        if name in ("repr", "id", "type", "object"):
            return True
        if name == "callable":
            return (isinstance(first, ast.Name) and first.id in self.functions) or None
        if name == "isinstance" and len(node.args) == 2:
            kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
            texts = {ast.unparse(kind) for kind in kinds}
            same = {"object", f"type({ast.unparse(first)})"} | ({"bool"} if is_condition(first) else set())
            return bool(texts & same) or None
        if name in ("all", "any"):
            if isinstance(first, (ast.GeneratorExp, ast.ListComp)):
                if self.is_empty(first.generators[0].iter):
                    return name == "all"
                holds = self.truth(first.elt)
                return True if name == "all" and holds is True else False if name == "any" and holds is False else None
            if isinstance(first, DISPLAYS) and not any(isinstance(part, ast.Starred) for part in first.elts):
                return self.truth_of_parts(first.elts, decides=name == "any") if first.elts else name == "all"
        return None

    def compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool | None:
        """The truth of one comparison."""
        if isinstance(left, ast.Name) and left.id == "__name__" and isinstance(right, ast.Constant):
            return None if right.value != "__main__" else not isinstance(op, ast.Eq) if is_equality(op) else None
        if function_name(left) == "print" and is_none(right) and is_equality(op):
            return isinstance(op, (ast.Eq, ast.Is))
        for one, other in ((left, right), (right, left)):
            if is_equality(op) and self.is_unlike(one, other):
                return isinstance(op, (ast.NotEq, ast.IsNot))
        if (
            isinstance(left, ast.Call)
            and function_name(left) in ("len", "abs")
            and isinstance(right, ast.UnaryOp | ast.Constant)
        ):
            bound = literal(right)
            return (
                (isinstance(op, ast.GtE) and bound == 0)
                or (isinstance(op, (ast.Gt, ast.NotEq)) and bound == -1)
                or None
            )
        values = [literal(side) for side in (left, right)]
        if None not in values and is_equality(op):
            return (values[0] == values[1]) is isinstance(op, (ast.Eq, ast.Is))
        if (
            isinstance(op, (ast.In, ast.NotIn))
            and is_condition(left)
            and literal(right) in ((True, False), [True, False])
        ):
            return isinstance(op, ast.In)
        return None

    def is_unlike(self, one: ast.expr, other: ast.expr) -> bool:
        """Whether the first never equals the second: a new `object()` nothing, a condition or a function not None."""
        if isinstance(one, ast.Call) and function_name(one) == "object" and not one.args:
            return True
        if not (isinstance(other, ast.Constant) and other.value is None):
            return False
        is_function = isinstance(one, ast.Name) and one.id in self.functions
        return is_function or is_condition(one) or isinstance(one, (*DISPLAYS, ast.Dict, ast.JoinedStr))

    def is_empty(self, node: ast.expr) -> bool:
        """Whether a loop over it has no turn."""
        if isinstance(node, ast.Name):
            node = self.constants.get(node.id, node)
        if isinstance(node, ast.Call) and function_name(node) == "range" and len(node.args) == 1:
            count = literal(node.args[0])
            return isinstance(count, int) and count <= 0
        return isinstance(node, (*DISPLAYS, ast.Dict, ast.Constant)) and self.truth(node) is False


# What single expressions and definitions are, by their syntax alone


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
    """Whether a call of the function runs nothing: a coroutine function or a generator function."""
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


# Tests that only ask the answer about itself


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
