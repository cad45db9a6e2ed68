"""Rewrites a test's statements so that each operation on a value of the answer goes through `Operations`.

The test runs in the checker and values of the answer stay in its process, where they are used natively: the checker
holds references. No stand-in has to imitate them, so nothing of a stand-in can leak into the test: what Python's syntax
does to a value (a call, an operator, a comparison, `with`, `except`, `await`) becomes a call of `_o_`, an
`rlvr.sandbox.operations.Operations`, which acts here on plain data and asks the answer's process for the rest. Text
that no value of the answer can reach (`find_tainted`) stays as it is. Definitions that a process must run as a whole
(generators, coroutines without assertions, classes) go to the answer's process as text (`_o_.define`), unless they hold
an assertion. Methods of `unittest.TestCase` become the assertions that they stand for.
Standard library only. `python -m pytest tests/test_sandbox_rpc.py` exercises it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from rlvr.sandbox.codec import MODULES
from rlvr.sandbox.setup_parts import BUILTINS, FUNCTIONS, IMPORTS, bound_names, nodes, used_names, walk

OPERATIONS = "_o_"
OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.MatMult: "matmul", ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor",
    ast.LShift: "lshift", ast.RShift: "rshift", ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert",
    ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Is: "is_",
    ast.IsNot: "is_not", ast.In: "in_", ast.NotIn: "not_in",
}  # fmt: skip
NATIVE_MODULES = (
    "asyncio", "builtins", "concurrent", "contextlib", "io", "queue", "random", "sys", "threading", "unittest.mock", "weakref",
)  # fmt: skip
DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.Call, ast.ListComp, ast.DictComp, ast.SetComp)
# Assertions of unittest.TestCase with two operands, and with one.
OF_TWO = {
    "assertEqual": ast.Eq, "assertEquals": ast.Eq, "assertNotEqual": ast.NotEq, "assertListEqual": ast.Eq,
    "assertTupleEqual": ast.Eq, "assertSetEqual": ast.Eq, "assertDictEqual": ast.Eq, "assertSequenceEqual": ast.Eq,
    "assertMultiLineEqual": ast.Eq, "assertIs": ast.Is, "assertIsNot": ast.IsNot, "assertIn": ast.In,
    "assertNotIn": ast.NotIn, "assertGreater": ast.Gt, "assertGreaterEqual": ast.GtE, "assertLess": ast.Lt,
    "assertLessEqual": ast.LtE,
}  # fmt: skip
OF_ONE = ("assertTrue", "assertFalse", "assertIsNone", "assertIsNotNone")


def find_tainted(trees: list[ast.Module], free: set[str]) -> set[str]:
    """Names whose values may come from the answer, or hold such a value, wherever in the trees they are bound.

    A name is tainted in all scopes if it is in one, control flow is ignored, and so are the values of parameters: those
    of a function that gets a tainted argument, or that is passed on, are tainted.
    """
    tainted = set(free)
    everything = [node for tree in trees for node in nodes(tree)]
    tainted |= set().union(*map(native_names, everything))
    modules = MODULES | set().union(*(bound_names(ast.Module([node], [])) for node in everything if isinstance(node, IMPORTS)))
    if captures_output(trees):
        tainted.add("print")
    functions = {node.name: node for node in everything if isinstance(node, FUNCTIONS)}
    if "check" in functions:
        tainted |= parameters(functions["check"].args)
    methods = {one for node in everything if isinstance(node, ast.ClassDef) for one in node.body}
    called = {id(node.func) for node in everything if isinstance(node, ast.Call)}
    before = -1
    while before < len(tainted):
        before = len(tainted)

        def is_tainted(*parts: ast.AST | None) -> bool:
            return any(used_names(part) & tainted for part in parts if part is not None)

        for node in everything:
            if isinstance(node, FUNCTIONS):
                if is_tainted(*node.body, *node.decorator_list):
                    tainted.add(node.name)
                if node in methods or node.decorator_list:
                    tainted |= parameters(node.args)
            elif isinstance(node, ast.Lambda):
                tainted |= parameters(node.args)
            elif isinstance(node, ast.ClassDef):
                if is_tainted(node) or not has_assertion(node):
                    tainted.add(node.name)
            elif isinstance(node, ast.Name) and node.id in functions and id(node) not in called:
                if isinstance(node.ctx, ast.Load):
                    tainted |= parameters(functions[node.id].args)
            elif isinstance(node, ast.Call):
                given = [*node.args, *(word.value for word in node.keywords)]
                if isinstance(node.func, ast.Name) and node.func.id in functions and is_tainted(*given):
                    tainted |= parameters(functions[node.func.id].args)
                if isinstance(node.func, ast.Attribute) and is_tainted(*given):
                    tainted |= base_names(node.func.value) - modules
            elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                if node.value is not None and is_tainted(node.value):
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        tainted |= base_names(target)
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
                if is_tainted(node.iter):
                    tainted |= base_names(node.target)
            elif isinstance(node, ast.withitem):
                if node.optional_vars is not None and is_tainted(node.context_expr):
                    tainted |= base_names(node.optional_vars)
            elif isinstance(node, (ast.With, ast.AsyncWith)):  # `with assertRaises(E) as caught:`
                if is_tainted(*node.body):
                    tainted |= set().union(*(base_names(one.optional_vars) for one in node.items if one.optional_vars))
            elif isinstance(node, (ast.Try, ast.TryStar)) and is_tainted(*node.body):
                tainted |= {handler.name for handler in node.handlers if handler.name}
    return tainted


def find_held(trees: list[ast.Module], tainted: set[str]) -> set[str]:
    """Names of containers that have to be made beside the answer, because it may keep them or they hold its objects.

    They are given to a call whose value is kept, to a method, or together with a value of the answer; they get a value
    of the answer as a key or an item; or they are part of what is given so.
    """
    everything = [node for tree in trees for node in nodes(tree)]
    values: dict[str, list[ast.expr]] = {}
    for node in everything:
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
            for target, value in pairs:
                if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                    pairs += zip(target.elts, value.elts, strict=True)
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(value)
    made = {name for name, given in values.items() if all(isinstance(one, DISPLAYS) for one in given)}

    def is_tainted(*parts: ast.AST) -> bool:
        return any(used_names(part) & tainted for part in parts)

    held: set[str] = set()
    kept = [node.value for node in everything if isinstance(node, (ast.Assign, ast.Return)) and node.value is not None]
    kept += [node.context_expr for node in everything if isinstance(node, ast.withitem)]
    kept_calls = {id(one) for value in kept for one in nodes(value) if isinstance(one, ast.Call)}
    for node in everything:
        if isinstance(node, ast.Call):
            args = [*node.args, *(word.value for word in node.keywords)]
            names = {one.id for one in args if isinstance(one, ast.Name)}
            if any(is_tainted(one) for one in args):
                if isinstance(node.func, ast.Attribute):
                    held |= base_names(node.func.value)
                if not is_tainted(node.func):
                    held |= names
            if is_tainted(node.func):
                inside = {name for name in names for value in values.get(name, ()) if any(isinstance(one, ast.Name) for one in walk(value))}
                held |= names if id(node) in kept_calls or isinstance(node.func, ast.Attribute) else inside
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and is_tainted(node.slice):
            held |= base_names(node.value)
        elif isinstance(node, DISPLAYS) and is_tainted(node):
            held |= {one.id for one in walk(node) if isinstance(one, ast.Name)}
    before = -1
    while before < len(held):
        before = len(held)
        for name in tuple(held):
            for value in values.get(name, ()):
                if isinstance(value, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
                    held |= {one.id for one in walk(value) if isinstance(one, ast.Name)}
    return held & made


def native_names(node: ast.AST) -> set[str]:
    """Names that an import binds to what has to be made where the answer runs: locks, streams, patches, seeds."""
    if isinstance(node, ast.Import):
        return {(one.asname or one.name).split(".")[0] for one in node.names if is_native_module(one.name)}
    if isinstance(node, ast.ImportFrom):
        inside = is_native_module(node.module or "")
        return {one.asname or one.name for one in node.names if inside or is_native_module(f"{node.module}.{one.name}")}
    return set()


def is_native_module(name: str) -> bool:
    return any(name == one or name.startswith(one + ".") for one in NATIVE_MODULES)


def captures_output(trees: Iterable[ast.AST]) -> bool:
    """Whether tests redirect what is printed."""
    names = ("redirect_stdout", "redirect_stderr", "stdout", "stderr")
    return any(isinstance(one, (ast.Attribute, ast.Name)) and getattr(one, "attr", getattr(one, "id", "")) in names
               for tree in trees for one in nodes(tree))


def parameters(args: ast.arguments) -> set[str]:
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *(one for one in (args.vararg, args.kwarg) if one)]
    return {one.arg for one in every}


def base_names(target: ast.AST) -> set[str]:
    """The names that an assignment to `target` changes: `x` of `x`, `x[0]`, `x.a` and `(x, y)`."""
    if isinstance(target, (ast.Attribute, ast.Subscript)):
        return base_names(target.value)
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*map(base_names, target.elts))
    if isinstance(target, ast.Starred):
        return base_names(target.value)
    return {target.id} if isinstance(target, ast.Name) else set()


def operation(name: str, *args: ast.expr, starred: ast.expr | None = None) -> ast.Call:
    function = ast.Attribute(ast.Name(OPERATIONS, ast.Load()), name, ast.Load())
    return ast.Call(function, list(args), [])


def deferred(body: ast.expr, *names: str) -> ast.Lambda:
    return ast.Lambda(ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, []), body)


class TestProgram(ast.NodeTransformer):
    """Rewrites one test. `free`: names of the answer; `imports`: the test's import statements, by bound name."""

    __test__ = False

    def __init__(self, free: set[str], tainted: set[str], held: set[str], trees: list[ast.Module]) -> None:
        self.free, self.tainted = free, tainted | held
        self.imports: dict[str, ast.stmt] = {}
        self.values: dict[str, ast.expr | None] = {}  # of names that are assigned once
        self.held = held
        self.defined = {node.name for tree in trees for node in nodes(tree) if self.runs_natively(node)}
        self.temporary = 0

    # Definitions

    def runs_natively(self, node: ast.AST) -> bool:
        """Whether a definition goes to the answer's process as text."""
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)) or has_assertion(node):
            return False
        if not isinstance(node, ast.ClassDef) and not self.is_tainted(node):
            return False
        if isinstance(node, ast.ClassDef):
            return True
        inner = walk(node)
        return isinstance(node, ast.AsyncFunctionDef) or any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in inner)

    def definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> ast.stmt:
        used = used_names(node)
        imports = [self.imports[name] for name in sorted(used & self.imports.keys())]
        unique = list({id(one): one for one in imports}.values())
        text = ast.unparse(ast.Module([*unique, node], []))
        inside = bound_inside(node)
        given = sorted(used - BUILTINS - self.imports.keys() - self.free - inside - {node.name} - self.defined)
        pairs = [deferred(ast.Name(name, ast.Load())) for name in given]
        values = ast.Dict([ast.Constant(name) for name in given], list(pairs))
        return assign(node.name, operation("define", ast.Constant(node.name), ast.Constant(text), values))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if self.runs_natively(node):
            return self.definition(node)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | list[ast.stmt]:
        if self.runs_natively(node):
            return self.definition(node)
        decorators = node.decorator_list
        node.decorator_list = []
        body = [self.generic_visit(node)] if self.is_tainted(node) else [node]
        for decorator in reversed(decorators):
            if self.is_tainted(decorator):
                inner = operation("call", self.visit(decorator), ast.Tuple([ast.Name(node.name, ast.Load())], ast.Load()), ast.Dict([], []))
                body.append(assign(node.name, inner))
            else:
                body[0].decorator_list.append(decorator)  # type: ignore[attr-defined]
        return body  # type: ignore[return-value]

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        """A function of the answer's objects runs beside them; one that compares, or uses a value of the test, here."""
        inside = bound_inside(node) | parameters(node.args)
        used = used_names(node) - inside - BUILTINS - self.imports.keys()
        compares = any(isinstance(one, (ast.Compare, ast.Yield, ast.Await, ast.NamedExpr)) for one in walk(node.body)) or isinstance(node.body, ast.Compare)
        if not used or compares or not used <= self.tainted | self.free or used_names(node) & self.imports.keys():
            return self.generic_visit(node)
        given = sorted(used - self.free)
        values = ast.Dict([ast.Constant(name) for name in given], [deferred(ast.Name(name, ast.Load())) for name in given])
        return operation("define", ast.Constant(""), ast.Constant(ast.unparse(node)), values)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self.definition(node) if self.runs_natively(node) else self.generic_visit(node)

    # Statements

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and self.is_tainted(call):
            condition = unittest_condition(call)
            if condition is not None:
                return self.visit(ast.Assert(condition, None))
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        if all(isinstance(target, ast.Name) for target in node.targets):
            holds = isinstance(node.targets[0], ast.Name) and node.targets[0].id in self.held
            node.value = self.visit(node.value)
            if holds and isinstance(node.value, DISPLAYS):
                node.value = operation("hold", node.value)
            return node
        if not self.is_tainted(node):
            return node
        self.temporary += 1
        name = f"_t{self.temporary}_"
        done: list[ast.stmt] = [assign(name, self.visit(node.value))]
        for target in node.targets:
            done += self.store(target, ast.Name(name, ast.Load()))
        return done

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
                if isinstance(element, ast.Name) or (isinstance(element, ast.Starred) and isinstance(element.value, ast.Name)):
                    elements.append(element)
                    continue
                self.temporary += 1
                name = f"_t{self.temporary}_"
                elements.append(ast.Name(name, ast.Store()))
                later += self.store(element, ast.Name(name, ast.Load()))
            return [ast.Assign([ast.Tuple(elements, ast.Store())], value), *later]
        return [ast.Assign([target], value)]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | list[ast.stmt]:
        if node.value is None or not self.is_tainted(node.value, node.target):
            return node
        return self.store(node.target, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST | list[ast.stmt]:
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
        return [*done, ast.Expr(change)]

    def visit_Delete(self, node: ast.Delete) -> ast.AST | list[ast.stmt]:
        done: list[ast.stmt] = []
        for target in node.targets:
            if isinstance(target, ast.Attribute) and self.is_tainted(target):
                done.append(ast.Expr(operation("delattr", self.visit(target.value), ast.Constant(target.attr))))
            elif isinstance(target, ast.Subscript) and base_names(target) & self.tainted:
                done.append(ast.Expr(operation("delitem", self.visit(target.value), self.index(target.slice))))
            else:
                done.append(ast.Delete([target]))
        return done

    def visit_With(self, node: ast.With) -> ast.AST:
        if self.is_tainted(node):
            for item in node.items:
                item.context_expr = operation("context", self.visit(item.context_expr))
            node.body = self.statements(node.body)
        return node

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        for item in node.items:
            item.context_expr = operation("async_context", self.visit(item.context_expr))
        node.body = self.statements(node.body)
        return node

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        node.iter = operation("async_iterate", self.visit(node.iter))
        node.body, node.orelse = self.statements(node.body), self.statements(node.orelse)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        if node.type is not None:
            node.type = operation("catch", self.visit(node.type))
        node.body = self.statements(node.body)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
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

    def visit(self, node: ast.AST) -> ast.AST:  # type: ignore[override]
        if isinstance(node, ast.expr) and not self.is_tainted(node):
            return node
        made = super().visit(node)
        if isinstance(made, ast.AST):
            return ast.copy_location(made, node)
        return made

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if isinstance(node.ctx, ast.Load) and node.id in self.free:
            return operation("name", ast.Constant(node.id))
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return operation("getattr", self.visit(node.value), ast.Constant(node.attr))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return operation("getitem", self.visit(node.value), self.index(node.slice))

    def index(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Slice):
            parts = [self.visit(part) if part else ast.Constant(None) for part in (node.lower, node.upper, node.step)]
            return ast.Call(ast.Name("slice", ast.Load()), parts, [])
        if isinstance(node, ast.Tuple):
            return ast.Tuple([self.index(part) for part in node.elts], ast.Load())
        return self.visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Name) and function.id == "super":
            return self.generic_visit(node)
        args = ast.Tuple([self.visit(part) for part in node.args], ast.Load())
        keys: list[ast.expr | None] = [ast.Constant(word.arg) if word.arg else None for word in node.keywords]
        values = [self.visit(word.value) if word.arg else operation("mapping", self.visit(word.value)) for word in node.keywords]
        words = ast.Dict(keys, values)
        if isinstance(function, ast.Attribute):
            return operation("method", self.visit(function.value), ast.Constant(function.attr), args, words)
        return operation("call", self.visit(function), args, words)

    def visit_Starred(self, node: ast.Starred) -> ast.AST:
        return ast.Starred(operation("iterate", self.visit(node.value)), node.ctx)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        name = ast.Constant(OPERATORS[type(node.op)])
        return operation("binary", name, self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not):
            return self.generic_visit(node)
        return operation("unary", ast.Constant(OPERATORS[type(node.op)]), self.visit(node.operand))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        names = [OPERATORS[type(one)] for one in node.ops]
        if len(names) == 1:
            right = node.comparators[0]
            other = self.counterpart(right) or self.counterpart(node.left)
            side = "right" if self.counterpart(right) else "left"
            args = [ast.Constant(names[0]), self.visit(node.left), self.visit(right)]
            if other is not None and names[0] in ("eq", "ne"):
                args += [deferred(self.visit(other), "_k_"), ast.Constant(side)]
            return operation("compare", *args)
        rest = [
            ast.Tuple([ast.Constant(name), deferred(self.visit(part))], ast.Load())
            for name, part in zip(names, node.comparators, strict=True)
        ]
        return operation("chain", self.visit(node.left), *rest)

    def counterpart(self, node: ast.expr) -> ast.expr | None:
        """The expression with other constants, for a counter-question; None if it has none or may have side effects."""
        if isinstance(node, ast.Name):
            value = self.values.get(node.id)
            if value is None or isinstance(value, ast.Name):
                return None
            node = value
        shifter = Shifter(self.free)
        try:
            made = shifter.visit(ast.parse(ast.unparse(node), mode="eval").body)
        except Shifter.Refused:
            return None
        return made if shifter.count else None

    def visit_List(self, node: ast.List) -> ast.AST:
        return operation("display", ast.Constant("list"), ast.List([self.visit(one) for one in node.elts], ast.Load()))

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        if isinstance(node.ctx, ast.Store):
            return node
        return operation("display", ast.Constant("tuple"), ast.List([self.visit(one) for one in node.elts], ast.Load()))

    def visit_Set(self, node: ast.Set) -> ast.AST:
        return operation("display", ast.Constant("set"), ast.List([self.visit(one) for one in node.elts], ast.Load()))

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        if any(key is None for key in node.keys):
            values = [self.visit(value) if key else operation("mapping", self.visit(value)) for key, value in zip(node.keys, node.values, strict=True)]
            return ast.Dict([self.visit(key) if key else None for key in node.keys], values)
        pairs = [
            ast.Tuple([self.visit(key), self.visit(value)], ast.Load())  # type: ignore[arg-type]
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        return operation("display", ast.Constant("dict"), ast.List(pairs, ast.Load()))

    def comprehension(self, node: ast.expr, kind: str, element: ast.expr) -> ast.AST:
        for part in node.generators:  # type: ignore[attr-defined]
            part.iter = operation("iterate", self.visit(part.iter))
            part.ifs = [self.visit(one) for one in part.ifs]
        return operation("display", ast.Constant(kind), ast.ListComp(element, node.generators))  # type: ignore[attr-defined]

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        return self.comprehension(node, "list", self.visit(node.elt))

    def visit_SetComp(self, node: ast.SetComp) -> ast.AST:
        return self.comprehension(node, "set", self.visit(node.elt))

    def visit_DictComp(self, node: ast.DictComp) -> ast.AST:
        return self.comprehension(node, "dict", ast.Tuple([self.visit(node.key), self.visit(node.value)], ast.Load()))

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        spec = self.visit(node.format_spec) if node.format_spec else ast.Constant("")
        return ast.FormattedValue(operation("format", self.visit(node.value), ast.Constant(node.conversion), spec), -1, None)

    def visit_Await(self, node: ast.Await) -> ast.AST:
        value = node.value
        if isinstance(value, ast.Call):
            made = self.visit(value)
            arguments = made.args if isinstance(made, ast.Call) else []  # type: ignore[attr-defined]
            if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in ("call", "method"):
                if made.func.attr == "method":
                    arguments = [operation("getattr", arguments[0], arguments[1]), *arguments[2:]]
                return ast.Await(operation("await_call", *arguments))
            return ast.Await(operation("await_value", made))
        return ast.Await(operation("await_value", self.visit(value)))


class Shifter(ast.NodeTransformer):
    """Replaces each constant of an expression of constructors and literals by `_o_.shift(constant, _k_)`."""

    class Refused(Exception):
        """The expression may have side effects, or depends on more than constants."""

    ALLOWED = (
        ast.Call, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.keyword, ast.UnaryOp, ast.BinOp,
        ast.Attribute, ast.expr_context, ast.operator, ast.unaryop,
    )  # fmt: skip

    def __init__(self, free: set[str]) -> None:
        self.free, self.count = free, 0

    def visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, self.ALLOWED):
            raise self.Refused
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            node.args = [self.visit(part) for part in node.args]  # type: ignore[misc]
            node.keywords = [ast.keyword(word.arg, self.visit(word.value)) for word in node.keywords]  # type: ignore[arg-type]
            return node
        if isinstance(node, (ast.Call, ast.Name, ast.Attribute)):
            raise self.Refused
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
    names |= {one.name for one in walk(node) if isinstance(one, (*FUNCTIONS, ast.ClassDef, ast.ExceptHandler)) and one.name}
    return names


def has_assertion(node: ast.AST) -> bool:
    for one in walk(node):
        if isinstance(one, ast.Assert):
            return True
        if isinstance(one, ast.Attribute) and one.attr.startswith("assert"):
            return True
    return False


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
    tree: ast.Module, free: set[str], tainted: set[str], held: set[str], trees: Iterable[ast.Module]
) -> ast.Module:
    """The program of one test; `tree` is changed. `trees` are all that run in one name space."""
    program = TestProgram(free, tainted, held, list(trees))
    return ast.fix_missing_locations(ast.Module(program.statements(tree.body), []))


__all__ = ["OPERATIONS", "TestProgram", "bound_names", "find_tainted", "rewrite"]
