"""Writes a test's `match` statements as `if` statements, which `rlvr.sandbox.test_program` can send to an answer.

    lower_matches(ast.parse(text))

Each pattern becomes the condition that the language reference gives it: an instance test, `==`, `is`, lengths, items
and attributes, with captured names assigned as the condition is evaluated. Subjects of the answer are then asked for
each part natively. Standard library only. `python -m pytest tests/test_sandbox_rpc.py` exercises it.
"""

from __future__ import annotations

import ast

SELF_MATCHING = {
    "bool", "bytearray", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple",
}  # fmt: skip
SEQUENCE, MAPPING = "_sequence_", "_mapping_"  # the abstract classes, which the checker supplies


def lower_matches(tree: ast.Module) -> ast.Module:
    """The tree, changed where it holds a `match` statement."""
    if any(isinstance(node, ast.Match) for node in ast.walk(tree)):
        tree = ast.fix_missing_locations(MatchLowering().visit(tree))
    return tree


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
