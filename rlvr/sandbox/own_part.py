"""What of a test does not depend on the answer, which alone may make the test itself to blame for its time.

    OwnPart(trees, tainted, native).of(tree)

The statements that are left run without an answer: if they do not end in time, no answer can pass. What may depend on
an answer is left out, with all that may have to happen first for a loop to end: a statement that uses its values keeps
only the parts that do not, a loop or branch whose condition does is dropped. So no answer can slow this part down.
Standard library only.
"""

from __future__ import annotations

import ast
from typing import Any

from rlvr.sandbox.setup_parts import BUILTINS, FUNCTIONS, IMPORTS, bound_names, nodes, used_names, walk
from rlvr.sandbox.value_flow import find_tainted, is_generator

BRANCHES = (ast.If, ast.While, ast.For, ast.AsyncFor, ast.Try, ast.TryStar)
LEAVE = (ast.Break, ast.Continue, ast.Return, ast.Raise, ast.Yield, ast.YieldFrom)
TAKES_TIME = (ast.While, ast.For, ast.Call, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.BinOp)


class OwnPart:
    """Finds the parts of a test that do not depend on the answer. `dependent`: names whose values may depend on the
    answer; `defined`: functions and classes of the tests."""

    def __init__(self, trees: list[ast.Module], tainted: set[str], native: set[str]) -> None:
        everything = [node for tree in trees for node in nodes(tree)]
        definitions = [node for node in everything if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
        self.defined = {node.name for node in definitions}
        self.imported = set().union(
            *(bound_names(ast.Module([node], [])) for node in everything if isinstance(node, IMPORTS))
        )
        self.dependent, before = set(tainted), -1
        while before < len(self.dependent):
            before = len(self.dependent)
            for node in everything:
                if isinstance(node, ast.Call) and used_names(node.func) & self.dependent - self.imported:
                    self.dependent |= self.within_reach([*node.args, *node.keywords], definitions)
                elif isinstance(node, BRANCHES) and self.uses(*conditions(node)):
                    changed = [
                        one for one in walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
                    ]
                    self.dependent |= {one.id for one in changed}
            self.dependent = find_tainted(trees, self.dependent, native)
        for node in definitions:
            if is_generator(node) and self.uses(node):
                self.defined.discard(node.name)

    def within_reach(self, given: list[Any], definitions: list[Any]) -> set[str]:
        """Names of which the answer may change the value, if it is given this: with those that its functions use."""
        found, before = set().union(*map(used_names, given)), -1
        while before < len(found):
            before = len(found)
            found |= set().union(*(used_names(one) for one in definitions if one.name in found))
        return found - BUILTINS - self.imported - self.defined

    def uses(self, *parts: ast.AST) -> bool:
        """Whether parts may depend on the answer."""
        names = {one.id for part in parts for one in nodes(part) if isinstance(one, ast.Name)}
        return bool(names & self.dependent - self.imported)

    def is_own(self, node: ast.AST) -> bool:
        """Whether an expression can be evaluated without the answer; what functions of the test do is cut elsewhere."""
        names = {one.id for one in nodes(node) if isinstance(one, ast.Name)}
        inner = any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in nodes(node))
        return not inner and not names & self.dependent - self.imported - self.defined

    def of(self, tree: ast.Module) -> ast.Module:
        return ast.fix_missing_locations(ast.Module(self.body(tree.body), []))

    def body(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for node in statements:
            may_return = isinstance(node, (*BRANCHES, ast.With, ast.AsyncWith)) and self.uses(node)
            may_return = may_return and any(isinstance(one, ast.Return) for one in walk(node))
            done += self.statement(node)
            if may_return:  # what follows may not be reached
                break
        return done

    def statement(self, node: Any) -> list[ast.stmt]:
        if isinstance(node, FUNCTIONS):
            if node.name not in self.defined:
                return []
            node.decorator_list = [one for one in node.decorator_list if self.is_own(one)]
            node.args.defaults = [one if self.is_own(one) else ast.Constant(None) for one in node.args.defaults]
            node.args.kw_defaults = [
                one if one and self.is_own(one) else ast.Constant(None) for one in node.args.kw_defaults
            ]
            node.body = self.body(node.body) or [ast.Pass()]
            return [node]
        if isinstance(node, ast.ClassDef):
            node.decorator_list = [one for one in node.decorator_list if self.is_own(one)]
            node.body = self.body(node.body) or [ast.Pass()]
            return [node] if all(map(self.is_own, node.bases)) else []
        if not self.uses(node):
            return [node]
        leaves = [one for one in walk(node) if isinstance(one, LEAVE)]
        if isinstance(node, ast.While):  # only what no answer can end
            endless = isinstance(node.test, ast.Constant) and node.test.value and not leaves
            node.body = self.body(node.body) or [ast.Pass()]
            return [node] if endless else []
        if isinstance(node, (ast.For, ast.AsyncFor)):
            if leaves or self.uses(*conditions(node)):
                return self.evaluate(node.iter)
            node.body, node.orelse = self.body(node.body) or [ast.Pass()], self.body(node.orelse)
            return [node]
        if isinstance(node, ast.If):
            if self.uses(node.test):
                return self.evaluate(node.test)
            node.body, node.orelse = self.body(node.body) or [ast.Pass()], self.body(node.orelse)
            return [node]
        if isinstance(node, (ast.Try, ast.TryStar)):
            return self.body(node.finalbody)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            contexts = [one.context_expr for one in node.items]
            names = {getattr(one, "attr", getattr(one, "id", "")) for part in contexts for one in nodes(part)}
            catches = any("aises" in name or name == "suppress" for name in names) or self.uses(*contexts)
            return [] if catches else self.body(node.body)
        if isinstance(node, (ast.Return, ast.Raise)):
            values = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
            end = ast.Return() if isinstance(node, ast.Return) else ast.Raise(ast.Name("Exception", ast.Load()))
            return [*(one for value in values for one in self.evaluate(value)), end]
        return [one for part in ast.iter_child_nodes(node) for one in self.evaluate(part)]

    def evaluate(self, node: ast.AST) -> list[ast.stmt]:
        """The parts of an expression that are evaluated in any case, and do not depend on the answer."""
        made = self.without_answer(getattr(node, "value", None) if isinstance(node, ast.keyword) else node)
        if made is not None:
            return [ast.Expr(made)] if any(isinstance(one, TAKES_TIME) for one in ast.walk(made)) else []
        parts: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.Lambda, ast.GeneratorExp)):
            parts = []
        elif isinstance(node, ast.BoolOp):
            parts = node.values[:1]  # type: ignore[assignment]
        elif isinstance(node, ast.IfExp):
            parts = [node.test]
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
            parts = [node.generators[0].iter]
        return [one for part in parts for one in self.evaluate(part)]

    def without_answer(self, node: Any) -> Any:
        """An expression of which only arguments of the test's functions depend on the answer, with None for these."""
        if not isinstance(node, (ast.expr, ast.keyword)) or isinstance(
            getattr(node, "ctx", None), (ast.Store, ast.Del)
        ):
            return None
        if self.is_own(node):
            return node
        if isinstance(node, ast.Await):
            value = self.without_answer(node.value)
            return ast.Await(value) if value is not None else None
        if not isinstance(node, ast.Call) or not self.is_own(node.func):
            return None
        is_defined = isinstance(node.func, ast.Name) and node.func.id in self.defined
        args: list[Any] = [self.without_answer(one) for one in node.args]
        words: list[Any] = [self.without_answer(one.value) for one in node.keywords]
        if None in [*args, *words]:
            if not is_defined or any(isinstance(one, ast.Starred) for one in node.args):
                return None
            args, words = ([one or ast.Constant(None) for one in given] for given in (args, words))
        keywords = [ast.keyword(one.arg, word) for one, word in zip(node.keywords, words, strict=True)]
        return ast.Call(node.func, args, keywords)


def conditions(node: Any) -> list[ast.AST]:
    """What decides whether, and how often, the parts of a statement run."""
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return [node.iter]
    return [node.test] if isinstance(node, (ast.If, ast.While)) else list(node.body)


def takes_time(trees: list[ast.Module]) -> bool:
    """Whether statements may take long: they hold more than definitions, literals and calls of these definitions."""
    everything = [node for tree in trees for node in ast.walk(tree)]
    defined = {node.name for node in everything if isinstance(node, FUNCTIONS)}
    calls = [node for node in everything if isinstance(node, TAKES_TIME)]
    return any(getattr(getattr(node, "func", None), "id", "") not in defined for node in calls)
