"""Rewrites a test's statements so that each operation on a value of the answer goes through `Operations`.

The test runs in the checker and values of the answer stay in its process, where they are used natively: the checker
holds references. No stand-in has to imitate them, so nothing of a stand-in can leak into the test: what Python's syntax
does to a value (a call, an operator, a comparison, `with`, `except`, `await`) becomes a call of `_o_`, an
`rlvr.sandbox.operations.Operations`, which acts here on plain data and asks the answer's process for the rest. Text
that no value of the answer can reach (`find_tainted`) stays as it is. Definitions that a process must run as a whole
(generators, coroutines without assertions, classes) go to the answer's process as text (`_o_.define`), unless they hold
an assertion. Methods of `unittest.TestCase` become the assertions that they stand for.
Standard library only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rlvr.sandbox.differences import BOUND, DIFFERENCE, Difference, find_condition, find_difference, load
from rlvr.sandbox.native_parts import is_formula
from rlvr.sandbox.setup_parts import BUILTINS, FUNCTIONS, nodes, used_names, walk
from rlvr.sandbox.value_flow import DISPLAYS, base_names, parameters, runs_whole

OPERATIONS = "_o_"
HOLD = "_hold_"  # marks a container that `Operations.hold` makes
OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.MatMult: "matmul", ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor",
    ast.LShift: "lshift", ast.RShift: "rshift", ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert",
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Is: "is_",
    ast.IsNot: "is_not", ast.In: "in_", ast.NotIn: "not_in",
}  # fmt: skip
# Assertions of unittest.TestCase with two operands, and with one.
OF_TWO = {
    "assertEqual": ast.Eq, "assertEquals": ast.Eq, "assertNotEqual": ast.NotEq, "assertListEqual": ast.Eq,
    "assertTupleEqual": ast.Eq, "assertSetEqual": ast.Eq, "assertDictEqual": ast.Eq, "assertSequenceEqual": ast.Eq,
    "assertMultiLineEqual": ast.Eq, "assertIs": ast.Is, "assertIsNot": ast.IsNot, "assertIn": ast.In,
    "assertNotIn": ast.NotIn, "assertGreater": ast.Gt, "assertGreaterEqual": ast.GtE, "assertLess": ast.Lt,
    "assertLessEqual": ast.LtE,
}  # fmt: skip
ALMOST = ("assertAlmostEqual", "assertAlmostEquals", "assertNotAlmostEqual")
OF_ONE = ("assertTrue", "assertFalse", "assertIsNone", "assertIsNotNone")


def operation(name: str, *args: ast.expr, starred: ast.expr | None = None) -> ast.Call:
    function = ast.Attribute(ast.Name(OPERATIONS, ast.Load()), name, ast.Load())
    return ast.Call(function, list(args), [])


def make_thunk(body: ast.expr, *names: str) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, []), body)


class TestProgram(ast.NodeTransformer):
    """Rewrites one test. `free`: names of the answer; `imports`: the test's import statements, by bound name."""

    __test__ = False

    def __init__(
        self,
        free: set[str],
        tainted: set[str],
        held: set[str],
        native: set[str],
        deciding: set[str],
        trees: list[ast.Module],
    ) -> None:
        self.native, self.deciding = native, deciding
        self.free, self.tainted = free, tainted | held | {HOLD, DIFFERENCE}
        self.differences: dict[str, Difference] = {}  # by the name that holds one
        self.imports: dict[str, ast.stmt] = {}
        self.values: dict[str, ast.expr | None] = {}  # of names that are assigned once
        for node in (node for tree in trees for node in nodes(tree)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    self.imports[(alias.asname or alias.name).split(".")[0]] = node
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                self.values[name] = None if name in self.values else node.value
        conditions = [node for tree in trees for node in nodes(tree) if isinstance(node, (ast.Compare, ast.UnaryOp))]
        self.judged = self.values.keys() & set().union(*map(used_names, conditions))
        self.has_operators = any("operator" in ast.unparse(one) for one in self.imports.values())
        self.held = held
        self.defined = {getattr(node, "name", "") for tree in trees for node in nodes(tree) if self.runs_natively(node)}
        self.temporary = 0
        self.formulas: list[ast.Lambda] = []  # given to functions of the answer

    # Definitions

    def runs_natively(self, node: ast.AST) -> bool:
        return isinstance(node, ast.stmt) and runs_whole(node, self.tainted, self.native, self.deciding)

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Any:
        used = used_names(node)
        imports = [self.imports[name] for name in sorted(used & self.imports.keys())]
        unique = list({id(one): one for one in imports}.values())
        text = ast.unparse(ast.Module([*unique, node], []))
        inside = bound_inside(node)
        given = sorted(used - BUILTINS - self.imports.keys() - self.free - inside - {node.name} - self.defined)
        pairs = [make_thunk(ast.Name(name, ast.Load())) for name in given]
        values = ast.Dict([ast.Constant(name) for name in given], list(pairs))
        return assign(node.name, operation("define", ast.Constant(node.name), ast.Constant(text), values))

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        if self.runs_natively(node):
            return self.definition(node)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        if self.runs_natively(node):
            return self.definition(node)
        decorators = node.decorator_list
        node.decorator_list = []
        body: list[Any] = [self.generic_visit(node)] if self.is_tainted(node) else [node]
        for decorator in reversed(decorators):
            if self.is_tainted(decorator):
                inner = operation(
                    "call",
                    self.visit(decorator),
                    ast.Tuple([ast.Name(node.name, ast.Load())], ast.Load()),
                    ast.Dict([], []),
                )
                body.append(assign(node.name, inner))
            else:
                body[0].decorator_list.append(decorator)  # type: ignore[attr-defined]
        return body

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        """A function of the answer's objects runs beside them; one that compares, or uses a value of the test, here."""
        inside = bound_inside(node) | parameters(node.args)
        used = used_names(node) - inside - BUILTINS - self.imports.keys()
        decides = (ast.Compare, ast.Yield, ast.Await, ast.NamedExpr)
        compares = any(isinstance(one, decides) for one in [node.body, *walk(node.body)])
        if (
            (not used and node not in self.formulas)
            or compares
            or not used <= self.tainted | self.free
            or used_names(node) & self.imports.keys()
        ):
            return self.generic_visit(node)
        given = sorted(used - self.free)
        for value in (self.values.get(name) for name in set(given) - self.held):
            if isinstance(value, DISPLAYS) and not self.is_tainted(value):
                return self.generic_visit(node)  # a container of the test, which the lambda changes here
        values = ast.Dict(
            [ast.Constant(name) for name in given], [make_thunk(ast.Name(name, ast.Load())) for name in given]
        )
        return operation("define", ast.Constant(""), ast.Constant(ast.unparse(node)), values)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return self.definition(node) if self.runs_natively(node) else self.generic_visit(node)

    # Statements

    def visit_Expr(self, node: ast.Expr) -> Any:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and self.is_tainted(call):
            if call.func.attr == "assertCountEqual" and len(call.args) > 1:
                return ast.copy_location(ast.Assert(self.same_items(*call.args[:2]), None), node)
            if almost := self.almost_equal(call):
                return almost
            condition = unittest_condition(call)
            if condition is not None:
                return self.visit(ast.Assert(condition, None))
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        if all(isinstance(target, ast.Name) for target in node.targets):
            if kept := self.keep_difference(node):
                return kept
            holds = isinstance(node.targets[0], ast.Name) and node.targets[0].id in self.held
            node.value = self.visit(node.value)
            if holds and isinstance(node.value, DISPLAYS):
                node.value = operation("hold", node.value)
            return node
        if not self.is_tainted(node):
            return node
        self.hold_parts(node.targets, node.value)
        self.temporary += 1
        name = f"_t{self.temporary}_"
        done: list[ast.stmt] = [assign(name, self.visit(node.value))]
        for target in node.targets:
            done += self.store(target, ast.Name(name, ast.Load()))
        return [*done, ast.Delete([ast.Name(name, ast.Del())])]  # a reference would keep an object of the answer alive

    def hold_parts(self, targets: list[ast.expr], value: ast.expr) -> None:
        """Mark the containers of `a, b = [], {}` that have to be made beside the answer."""
        for target in targets:
            parts = getattr(target, "elts", [])
            if not parts or not isinstance(value, (ast.Tuple, ast.List)) or len(parts) != len(value.elts):
                continue
            for place, (part, one) in enumerate(zip(parts, value.elts, strict=True)):
                if isinstance(part, ast.Name) and part.id in self.held and isinstance(one, DISPLAYS):
                    value.elts[place] = ast.Call(ast.Name(HOLD, ast.Load()), [one], [])
                self.hold_parts([part], one)

    def store(self, target: ast.expr, value: ast.expr) -> list[ast.stmt]:
        if isinstance(target, ast.Attribute):
            owner = self.visit(target.value)
            return [ast.Expr(operation("setattr", owner, ast.Constant(target.attr), value))]
        if isinstance(target, ast.Subscript):
            return [ast.Expr(operation("setitem", self.visit(target.value), self.index(target.slice), value))]
        if isinstance(target, (ast.Tuple, ast.List)):
            later: list[ast.stmt] = []
            elements: list[ast.expr] = []
            for element in target.elts:
                if isinstance(element, ast.Name) or (
                    isinstance(element, ast.Starred) and isinstance(element.value, ast.Name)
                ):
                    elements.append(element)
                    continue
                self.temporary += 1
                name = f"_t{self.temporary}_"
                elements.append(ast.Name(name, ast.Store()))
                later += self.store(element, ast.Name(name, ast.Load()))
            return [ast.Assign([ast.Tuple(elements, ast.Store())], value), *later]
        return [ast.Assign([target], value)]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is None or not self.is_tainted(node.value, node.target):
            return node
        return self.store(node.target, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if not self.is_tainted(node.value) and not base_names(node.target) & self.tainted:
            return node
        name = ast.Constant(OPERATORS[type(node.op)])
        value = self.visit(node.value)
        target = node.target
        if isinstance(target, ast.Name):
            return assign(target.id, operation("change", name, ast.Name(target.id, ast.Load()), value))
        self.temporary += 1
        owner = f"_t{self.temporary}_"
        done: list[ast.stmt] = [assign(owner, self.visit(target.value))]
        held: ast.expr = ast.Name(owner, ast.Load())
        if isinstance(target, ast.Attribute):
            old = operation("getattr", held, ast.Constant(target.attr))
            change = operation("setattr", held, ast.Constant(target.attr), operation("change", name, old, value))
        else:
            index = f"_i{self.temporary}_"
            done.append(assign(index, self.index(target.slice)))
            at: ast.expr = ast.Name(index, ast.Load())
            change = operation("setitem", held, at, operation("change", name, operation("getitem", held, at), value))
        return [*done, ast.Expr(change), ast.Delete([ast.Name(owner, ast.Del())])]

    def visit_Delete(self, node: ast.Delete) -> Any:
        done: list[ast.stmt] = []
        for target in node.targets:
            if isinstance(target, ast.Attribute) and self.is_tainted(target):
                done.append(ast.Expr(operation("delattr", self.visit(target.value), ast.Constant(target.attr))))
            elif isinstance(target, ast.Subscript) and base_names(target) & self.tainted:
                done.append(ast.Expr(operation("delitem", self.visit(target.value), self.index(target.slice))))
            else:
                done.append(ast.Delete([target]))
        return done

    def visit_With(self, node: ast.With) -> Any:
        if self.is_tainted(node):
            for item in node.items:
                item.context_expr = operation("context", self.visit(item.context_expr))
            node.body = self.statements(node.body)
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> Any:
        for item in node.items:
            item.context_expr = operation("async_context", self.visit(item.context_expr))
        node.body = self.statements(node.body)
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> Any:
        node.iter = operation("async_iterate", self.visit(node.iter))
        node.body, node.orelse = self.statements(node.body), self.statements(node.orelse)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> Any:
        if node.type is not None:
            node.type = operation("catch", self.visit(node.type))
        node.body = self.statements(node.body)
        return node

    def visit_Raise(self, node: ast.Raise) -> Any:
        if node.exc is not None and self.is_tainted(node):
            node.exc = operation("throw", self.visit(node.exc))
            node.cause = operation("throw", self.visit(node.cause)) if node.cause is not None else None
        return node

    def statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for statement in body:
            made = self.visit(statement)
            done += made if isinstance(made, list) else [made]
        return done

    # Expressions

    def is_tainted(self, *parts: ast.AST | None) -> bool:
        return any(used_names_below(part) & self.tainted for part in parts if part is not None)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.expr) and not self.is_tainted(node):
            return node
        made = super().visit(node)
        if isinstance(made, ast.AST):
            return ast.copy_location(made, node)
        return made

    def visit_Name(self, node: ast.Name) -> Any:
        if isinstance(node.ctx, ast.Load) and node.id in self.free:
            return operation("name", ast.Constant(node.id))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return operation("getattr", self.visit(node.value), ast.Constant(node.attr))

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        return operation("getitem", self.visit(node.value), self.index(node.slice))

    def index(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Slice):
            parts: list[ast.expr] = [
                self.visit(part) if part else ast.Constant(None) for part in (node.lower, node.upper, node.step)
            ]
            return ast.Call(ast.Name("slice", ast.Load()), parts, [])
        if isinstance(node, ast.Tuple):
            return ast.Tuple([self.index(part) for part in node.elts], ast.Load())
        return self.visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        function = node.func
        if isinstance(function, ast.Name) and function.id == "super":
            return self.generic_visit(node)
        if isinstance(function, ast.Name) and function.id == HOLD:
            return operation("hold", self.visit(node.args[0]))
        if isinstance(function, ast.Name) and function.id in self.free:
            self.formulas += [one for one in node.args if isinstance(one, ast.Lambda) and is_formula(one)]
        counterpart = self.find_counterpart(*self.operands(node)) if self.may_compare(function) else ()
        args = ast.Tuple([self.visit(part) for part in node.args], ast.Load())
        keys: list[ast.expr | None] = [ast.Constant(word.arg) if word.arg else None for word in node.keywords]
        values: list[ast.expr] = [
            self.visit(word.value) if word.arg else operation("mapping", self.visit(word.value))
            for word in node.keywords
        ]
        words = ast.Dict(keys, values)
        if isinstance(function, ast.Attribute):
            return operation("method", self.visit(function.value), ast.Constant(function.attr), args, words)
        return operation("call", self.visit(function), args, words, *counterpart)

    def may_compare(self, function: ast.expr) -> bool:
        """Whether a call may be one of `operator.eq` or the like: the test has the module, under whatever name."""
        of_answer = isinstance(function, ast.Name) and function.id in self.free
        return self.has_operators and not of_answer and not isinstance(function, ast.Attribute)

    def operands(self, call: ast.Call) -> tuple[ast.expr, ast.expr]:
        """The last two of what a call compares, if it does: `partial(eq, V(1))(x)` and `map(eq, xs, ys)` too."""
        function = self.values.get(call.func.id) if isinstance(call.func, ast.Name) else call.func
        bound = function.args[1:] if isinstance(function, ast.Call) else []
        given = [one for one in [*bound, *call.args] if not isinstance(one, ast.Starred)]
        return tuple([ast.Constant(None), ast.Constant(None), *given][-2:])  # type: ignore[return-value]

    def visit_Starred(self, node: ast.Starred) -> Any:
        return ast.Starred(self.visit(node.value), node.ctx)

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        name = ast.Constant(OPERATORS[type(node.op)])
        return operation("binary", name, self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.Not):
            return self.near(node) or self.generic_visit(node)
        return operation("unary", ast.Constant(OPERATORS[type(node.op)]), self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> Any:
        if near := self.near(node):
            return near
        names = [OPERATORS[type(one)] for one in node.ops]
        if len(names) == 1:
            right = node.comparators[0]
            other = self.counterpart(right) or self.counterpart(node.left)
            side = "right" if self.counterpart(right) else "left"
            args = [ast.Constant(names[0]), self.visit(node.left), self.visit(right)]
            if other is not None and names[0] in ("eq", "ne"):
                args += [make_thunk(self.visit(other), "_k_"), ast.Constant(side)]
            return operation("compare", *args)
        rest = [
            ast.Tuple([ast.Constant(name), make_thunk(self.visit(part))], ast.Load())
            for name, part in zip(names, node.comparators, strict=True)
        ]
        return operation("chain", self.visit(node.left), *rest)

    def almost_equal(self, call: ast.Call) -> list[ast.stmt]:
        """`assertAlmostEqual` as the condition that it checks, of two names that hold its values."""
        words = {word.arg: word.value for word in call.keywords}
        words |= dict(zip(("places", "msg", "delta"), call.args[2:], strict=False))
        name = call.func.attr  # type: ignore[attr-defined]
        starred = any(isinstance(one, ast.Starred) for one in call.args) or None in words
        if name not in ALMOST or len(call.args) < 2 or starred or {"places", "delta"} <= words.keys():
            return []
        self.temporary += 1
        names = [f"_{side}{self.temporary}_" for side in "lr"]
        self.tainted |= set(names)
        done = [assign(one, self.visit(part)) for one, part in zip(names, call.args, strict=False)]
        for one, part in zip(names, call.args, strict=False):
            self.values[one] = self.values.get(part.id) if isinstance(part, ast.Name) else part
        left, right = map(load, names)
        size = ast.Call(load("abs"), [ast.BinOp(left, ast.Sub(), right)], [])
        if "delta" in words:
            near = ast.Compare(size, [ast.LtE()], [words["delta"]])
        else:
            rounded = ast.Call(load("round"), [size, words.get("places", ast.Constant(7))], [])
            near = ast.Compare(rounded, [ast.Eq()], [ast.Constant(0)])
        condition: ast.expr = ast.BoolOp(ast.Or(), [ast.Compare(left, [ast.Eq()], [right]), near])
        if name == "assertNotAlmostEqual":
            condition = ast.UnaryOp(ast.Not(), condition)
        return [*done, ast.Assert(self.visit(condition), None)]

    def same_items(self, left: ast.expr, right: ast.expr) -> ast.expr:
        return operation("same_items", self.visit(left), self.visit(right), *self.find_counterpart(left, right))

    def find_counterpart(self, left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
        """A function that makes the counterpart of a side, and which side; None and empty if there is none."""
        for side, part in (("right", right), ("left", left)):
            if other := self.counterpart(part):
                return make_thunk(self.visit(other), "_k_"), ast.Constant(side)
        return ast.Constant(None), ast.Constant("")

    def near(self, node: ast.expr) -> ast.expr | None:
        """A condition that says that a difference is small; None for another one."""
        found = find_condition(node, self.differences, self.free)
        if found is None:
            return None
        left, right = found.source or (found.left, found.right)
        verdict = make_thunk(self.visit(found.build(load(DIFFERENCE))), DIFFERENCE, BOUND)
        rest = [*self.find_counterpart(left, right)]
        if found.condition is not None:
            held, self.differences = self.differences, {}
            rest.append(make_thunk(self.visit(found.condition), BOUND))
            self.differences = held
        parts = map(self.visit, (found.left, found.right, found.bound or ast.Constant(0)))
        return operation("near", ast.Constant(OPERATORS[type(found.op)]), *parts, verdict, *rest)

    def keep_difference(self, node: ast.Assign) -> list[ast.stmt] | None:
        """`d = x - y` with names for x and y, if a condition of the test is about `d`."""
        name = node.targets[0].id if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) else ""
        found = find_difference(node.value, {}, self.free) if name in self.judged and self.values[name] else None
        if found is None or not self.is_tainted(node.value):
            return None
        self.temporary += 1
        names = [load(f"_{side}{self.temporary}_") for side in "lr"]
        self.tainted |= {one.id for one in names}
        done: list[ast.stmt] = [
            assign(one.id, self.visit(part)) for one, part in zip(names, (found.left, found.right), strict=True)
        ]
        done.append(assign(name, self.visit(found.build(ast.BinOp(names[0], found.op, names[1])))))
        kept = replace(found, left=names[0], right=names[1], source=(found.left, found.right))
        self.differences[name] = kept
        return done

    def counterpart(self, node: ast.expr) -> Any:
        """The expression with other constants, for a counter-question; None if it has none or may have side effects."""
        if isinstance(node, ast.Name):
            value = self.values.get(node.id)
            if value is None or isinstance(value, ast.Name):
                return None
            node = value
        shifter = Shifter(self.free)
        try:
            made = shifter.visit(ast.parse(ast.unparse(node), mode="eval").body)
        except Shifter.NotSimple:
            return None
        return made if shifter.count else None

    def visit_List(self, node: ast.List) -> Any:
        return operation("display", ast.Constant("list"), ast.List([self.visit(one) for one in node.elts], ast.Load()))

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        if isinstance(node.ctx, ast.Store):
            return node
        return operation("display", ast.Constant("tuple"), ast.List([self.visit(one) for one in node.elts], ast.Load()))

    def visit_Set(self, node: ast.Set) -> Any:
        return operation("display", ast.Constant("set"), ast.List([self.visit(one) for one in node.elts], ast.Load()))

    def visit_Dict(self, node: ast.Dict) -> Any:
        if any(key is None for key in node.keys):
            values: list[ast.expr] = [
                self.visit(value) if key else operation("mapping", self.visit(value))
                for key, value in zip(node.keys, node.values, strict=True)
            ]
            return ast.Dict([self.visit(key) if key else None for key in node.keys], values)
        pairs: list[ast.expr] = [
            ast.Tuple([self.visit(key or ast.Constant(None)), self.visit(value)], ast.Load())
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        return operation("display", ast.Constant("dict"), ast.List(pairs, ast.Load()))

    def comprehension(self, node: ast.expr, kind: str, element: ast.expr) -> Any:
        for part in node.generators:  # type: ignore[attr-defined]
            items = self.visit(part.iter)
            part.iter = operation("async_iterate", items) if part.is_async else items
            part.ifs = [self.visit(one) for one in part.ifs]
        return operation("display", ast.Constant(kind), ast.ListComp(element, node.generators))  # type: ignore[attr-defined]

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        return self.comprehension(node, "list", self.visit(node.elt))

    def visit_SetComp(self, node: ast.SetComp) -> Any:
        return self.comprehension(node, "set", self.visit(node.elt))

    def visit_DictComp(self, node: ast.DictComp) -> Any:
        return self.comprehension(node, "dict", ast.Tuple([self.visit(node.key), self.visit(node.value)], ast.Load()))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> Any:
        spec = self.visit(node.format_spec) if node.format_spec else ast.Constant("")
        return ast.FormattedValue(
            operation("format", self.visit(node.value), ast.Constant(node.conversion), spec), -1, None
        )

    def visit_Await(self, node: ast.Await) -> Any:
        value = node.value
        if isinstance(value, ast.Call):
            made = self.visit(value)
            arguments = made.args if isinstance(made, ast.Call) else []  # type: ignore[attr-defined]
            if (
                isinstance(made, ast.Call)
                and isinstance(made.func, ast.Attribute)
                and made.func.attr in ("call", "method")
            ):
                if made.func.attr == "method":
                    arguments = [operation("getattr", arguments[0], arguments[1]), *arguments[2:]]
                return ast.Await(operation("await_call", *arguments))
            return ast.Await(operation("await_value", made))
        return ast.Await(operation("await_value", self.visit(value)))


class Shifter(ast.NodeTransformer):
    """Shifts constants: rewrites each constant of a simple expression as `_o_.shift(constant, _k_)`, so that an answer
    that accepts other values too is noticed."""

    class NotSimple(Exception):
        """The expression may have side effects, or depends on more than constants."""

    ALLOWED = (
        ast.Call, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.keyword, ast.UnaryOp, ast.BinOp,
        ast.Attribute, ast.expr_context, ast.operator, ast.unaryop,
    )  # fmt: skip

    def __init__(self, free: set[str]) -> None:
        self.free, self.count = free, 0

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, self.ALLOWED):
            raise self.NotSimple
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            node.args = [self.visit(part) for part in node.args]
            node.keywords = [ast.keyword(word.arg, self.visit(word.value)) for word in node.keywords]
            return node
        if isinstance(node, (ast.Call, ast.Name, ast.Attribute)):
            raise self.NotSimple
        if isinstance(node, ast.Dict):  # another key would tell two dictionaries apart by itself
            node.values = [self.visit(part) for part in node.values]
            return node
        if isinstance(node, ast.Constant):
            if type(node.value) in (int, float, str, complex) and node.value != "":
                self.count += 1
                return operation("shift", node, ast.Name("_k_", ast.Load()))
            return node
        return self.generic_visit(node)


def used_names_below(tree: ast.AST) -> set[str]:
    """Names that are read, or whose parts are assigned, below a node that may have been rewritten."""
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def bound_inside(node: ast.AST) -> set[str]:
    names = {one.arg for one in walk(node) if isinstance(one, ast.arg)}
    names |= {one.id for one in walk(node) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
    names |= {
        one.name for one in walk(node) if isinstance(one, (*FUNCTIONS, ast.ClassDef, ast.ExceptHandler)) and one.name
    }
    return names


def assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value)


def unittest_condition(call: ast.Call) -> ast.expr | None:
    """The condition that an assertion method of `unittest.TestCase` checks; None for another call."""
    assert isinstance(call.func, ast.Attribute)
    name, args = call.func.attr, call.args
    if any(isinstance(one, ast.Starred) for one in args):
        return None
    if name in OF_TWO and len(args) >= 2:
        return ast.Compare(args[0], [OF_TWO[name]()], [args[1]])
    if name in OF_ONE and args:
        if name == "assertTrue":
            return args[0]
        if name == "assertFalse":
            return ast.UnaryOp(ast.Not(), args[0])
        kind = ast.Is() if name == "assertIsNone" else ast.IsNot()
        return ast.Compare(args[0], [kind], [ast.Constant(None)])
    if name in ("assertIsInstance", "assertNotIsInstance") and len(args) >= 2:
        made = ast.Call(ast.Name("isinstance", ast.Load()), args[:2], [])
        return made if name == "assertIsInstance" else ast.UnaryOp(ast.Not(), made)
    return None


def rewrite(
    tree: ast.Module,
    free: set[str],
    tainted: set[str],
    held: set[str],
    native: set[str],
    deciding: set[str],
    trees: Iterable[ast.Module],
) -> ast.Module:
    """The program of one test; `tree` is changed. `trees` are all that run in one name space."""
    program = TestProgram(free, tainted, held, native, deciding, list(trees))
    return ast.fix_missing_locations(ast.Module(program.statements(tree.body), []))
