"""Rewrites a test before it is planned: `match` statements, `__name__`, `unittest.main()`, `operator.eq(a, b)`.

    simplify(ast.parse(text), text)

A `match` statement becomes `if` statements, so that subjects of the answer are asked for each part natively: each
pattern is the condition that the language reference gives it, with captured names assigned as it is evaluated. A test
runs as plain Python runs a script, so `__name__` is `"__main__"`. `unittest.main()`, which would look for the tests in
a module of that name and end the process, becomes a run of the test's own classes whose result is asserted; with
`exit=False` it stays: it reports failures and raises none, so such a test checks nothing. A call of a comparison of the
module `operator` becomes the comparison, which is judged for objects of the answer too.
Standard library only.
"""

from __future__ import annotations

import ast
from typing import Any

SELF_MATCHING = {
    "bool", "bytearray", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple",
}  # fmt: skip
SEQUENCE, MAPPING = "_sequence_", "_mapping_"  # the abstract classes, which the checker supplies
RUN = "assert unittest.TextTestRunner().run(unittest.TestSuite([{}])).wasSuccessful()"
LOAD = "unittest.defaultTestLoader.loadTestsFromTestCase({})"


def simplify(tree: ast.Module, text: str) -> ast.Module:
    """The tree of a test, changed where its text may need it."""
    rewriters = list[ast.NodeTransformer]()
    if "__name__" in text or "unittest.main" in text:
        rewriters.append(MainProgram(tree))
    if "operator" in text and (names := find_comparisons(tree)):
        rewriters.append(ComparisonCalls(names))
    if "match" in text:
        rewriters.append(MatchLowering())
    for rewriter in rewriters:
        tree = rewriter.visit(tree)
    return ast.fix_missing_locations(tree) if rewriters else tree


COMPARISONS: dict[str, type[ast.cmpop]] = {
    "eq": ast.Eq, "ne": ast.NotEq, "lt": ast.Lt, "le": ast.LtE, "gt": ast.Gt, "ge": ast.GtE, "is_": ast.Is,
    "is_not": ast.IsNot,
}  # fmt: skip


def find_comparisons(tree: ast.Module) -> dict[str, type[ast.cmpop]]:
    """Which comparison a name, or `module.name`, calls: those of `operator` that the test imports and never rebinds."""
    found: dict[str, type[ast.cmpop]] = {}
    bound: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                bound.append(one.asname or one.name)
                if one.name == "operator":
                    found |= {f"{bound[-1]}.{name}": kind for name, kind in COMPARISONS.items()}
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                bound.append(one.asname or one.name)
                if node.module == "operator" and not node.level and one.name in COMPARISONS:
                    found[bound[-1]] = COMPARISONS[one.name]
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.append(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.append(node.name)
        elif isinstance(node, ast.arg):
            bound.append(node.arg)
    return {name: kind for name, kind in found.items() if bound.count(name.partition(".")[0]) == 1}


class ComparisonCalls(ast.NodeTransformer):
    """`operator.lt(a, b)` as `a < b`."""

    def __init__(self, names: dict[str, type[ast.cmpop]]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        kind = self.names.get(ast.unparse(node.func)) if isinstance(node.func, (ast.Name, ast.Attribute)) else None
        if kind is None or len(node.args) != 2 or node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            return node
        return ast.copy_location(ast.Compare(node.args[0], [kind()], [node.args[1]]), node)


class MainProgram(ast.NodeTransformer):
    """Rewrites one test. `cases`: the names of its `TestCase` classes."""

    def __init__(self, tree: ast.Module) -> None:
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        self.cases = [one.name for one in classes if any(ast.unparse(base).endswith("TestCase") for base in one.bases)]

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id == "__name__" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant("__main__"), node)
        return node

    def visit_If(self, node: ast.If) -> Any:
        """`if __name__ == "__main__":` holds, so its statements follow the others."""
        if ast.unparse(node.test).replace('"', "'") not in ("__name__ == '__main__'", "'__main__' == __name__"):
            return self.generic_visit(node)
        return [self.visit(one) for one in node.body]

    def visit_Expr(self, node: ast.Expr) -> Any:
        call = node.value
        is_main = isinstance(call, ast.Call) and ast.unparse(call.func) == "unittest.main"
        if is_main and self.cases and not any(word.arg == "exit" for word in call.keywords):  # type: ignore[union-attr]
            run = ast.parse(RUN.format(", ".join(map(LOAD.format, self.cases)))).body[0]
            return ast.copy_location(run, node)
        return self.generic_visit(node)


class MatchLowering(ast.NodeTransformer):
    def __init__(self) -> None:
        self.count = 0

    def visit_Match(self, node: ast.Match) -> list[ast.stmt]:
        self.generic_visit(node)
        subject = self.name()
        chain: list[ast.stmt] = []
        for case in reversed(node.cases):
            condition = self.condition(case.pattern, subject)
            if case.guard is not None:
                condition = both([condition, case.guard])
            chain = [ast.copy_location(ast.If(condition, case.body, chain), node)]
        return [ast.copy_location(ast.Assign([ast.Name(subject, ast.Store())], node.subject), node), *chain]

    def name(self) -> str:
        self.count += 1
        return f"_m{self.count}_"

    def condition(self, pattern: ast.pattern, subject: str) -> ast.expr:
        """Whether a pattern matches the value of a name; true conditions bind the pattern's names."""
        value = ast.Name(subject, ast.Load())
        if isinstance(pattern, ast.MatchValue):
            return ast.Compare(value, [ast.Eq()], [pattern.value])
        if isinstance(pattern, ast.MatchSingleton):
            return ast.Compare(value, [ast.Is()], [ast.Constant(pattern.value)])
        if isinstance(pattern, ast.MatchOr):
            return ast.BoolOp(ast.Or(), [self.condition(one, subject) for one in pattern.patterns])
        if isinstance(pattern, ast.MatchAs):
            parts = [] if pattern.pattern is None else [self.condition(pattern.pattern, subject)]
            return both([*parts, *([bind(pattern.name, value)] if pattern.name else [])])
        if isinstance(pattern, ast.MatchSequence):
            return both(self.sequence(pattern, value))
        if isinstance(pattern, ast.MatchMapping):
            return both(self.mapping(pattern, value))
        assert isinstance(pattern, ast.MatchClass)
        return both(self.instance(pattern, value))

    def part(self, pattern: ast.pattern, value: ast.expr) -> list[ast.expr]:
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
            return [bind(pattern.name, value)] if pattern.name else []
        name = self.name()
        return [bind(name, value), self.condition(pattern, name)]

    def sequence(self, pattern: ast.MatchSequence, value: ast.expr) -> list[ast.expr]:
        texts = ast.Tuple([ast.Name(name, ast.Load()) for name in ("str", "bytes", "bytearray")], ast.Load())
        parts: list[ast.expr] = [
            call("isinstance", value, ast.Name(SEQUENCE, ast.Load())),
            ast.UnaryOp(ast.Not(), call("isinstance", value, texts)),
        ]
        stars = [place for place, one in enumerate(pattern.patterns) if isinstance(one, ast.MatchStar)]
        fixed = len(pattern.patterns) - len(stars)
        parts.append(ast.Compare(call("len", value), [ast.GtE() if stars else ast.Eq()], [ast.Constant(fixed)]))
        for place, one in enumerate(pattern.patterns):
            behind = len(pattern.patterns) - place
            if isinstance(one, ast.MatchStar):
                end = ast.Constant(1 - behind) if behind > 1 else None
                items = ast.Subscript(value, ast.Slice(ast.Constant(place), end, None), ast.Load())
                parts += [bind(one.name, call("list", items))] if one.name else []
                continue
            index = place if not stars or place < stars[0] else -behind
            parts += self.part(one, ast.Subscript(value, ast.Constant(index), ast.Load()))
        return parts

    def mapping(self, pattern: ast.MatchMapping, value: ast.expr) -> list[ast.expr]:
        parts: list[ast.expr] = [call("isinstance", value, ast.Name(MAPPING, ast.Load()))]
        for key, one in zip(pattern.keys, pattern.patterns, strict=True):
            parts.append(ast.Compare(key, [ast.In()], [value]))
            parts += self.part(one, ast.Subscript(value, key, ast.Load()))
        if pattern.rest:
            pair = ast.Tuple([ast.Name("_k_", ast.Store()), ast.Name("_v_", ast.Store())], ast.Store())
            items = call("list", ast.Call(ast.Attribute(call("dict", value), "items", ast.Load()), [], []))
            other = ast.Compare(ast.Name("_k_", ast.Load()), [ast.NotIn()], [ast.Tuple(pattern.keys, ast.Load())])
            loop = ast.comprehension(pair, items, [other], 0)
            rest = ast.DictComp(ast.Name("_k_", ast.Load()), ast.Name("_v_", ast.Load()), [loop])
            parts.append(bind(pattern.rest, rest))
        return parts

    def instance(self, pattern: ast.MatchClass, value: ast.expr) -> list[ast.expr]:
        parts: list[ast.expr] = [call("isinstance", value, pattern.cls)]
        itself = isinstance(pattern.cls, ast.Name) and pattern.cls.id in SELF_MATCHING
        for place, one in enumerate(pattern.patterns):
            names = ast.Attribute(pattern.cls, "__match_args__", ast.Load())
            name = ast.Subscript(names, ast.Constant(place), ast.Load())
            parts += self.part(one, value if itself else call("getattr", value, name))
        for attribute, one in zip(pattern.kwd_attrs, pattern.kwd_patterns, strict=True):
            parts.append(call("hasattr", value, ast.Constant(attribute)))
            parts += self.part(one, ast.Attribute(value, attribute, ast.Load()))
        return parts


def call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def bind(name: str, value: ast.expr) -> ast.expr:
    """An expression that assigns a name, and is true."""
    return ast.List([ast.NamedExpr(ast.Name(name, ast.Store()), value)], ast.Load())


def both(parts: list[ast.expr]) -> ast.expr:
    if not parts:
        return ast.Constant(True)
    return parts[0] if len(parts) == 1 else ast.BoolOp(ast.And(), parts)
