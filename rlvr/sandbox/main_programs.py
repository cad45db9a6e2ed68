"""Tests that end as programs do: `if __name__ == "__main__": unittest.main()`.

A test is run as plain Python runs a script, so `__name__` is `"__main__"`. `unittest.main()`, which would look for the
tests in a module of that name and end the process, becomes a run of the test's own classes whose result is asserted.
With `exit=False` it stays: it reports failures and raises none, so such a test checks nothing.
Standard library only. `python -m pytest tests/test_sandbox_cases.py` exercises it.
"""

from __future__ import annotations

import ast
from typing import Any

RUN = "assert unittest.TextTestRunner().run(unittest.TestSuite([{}])).wasSuccessful()"
LOAD = "unittest.defaultTestLoader.loadTestsFromTestCase({})"


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


def lower_main(tree: ast.Module) -> ast.Module:
    return ast.fix_missing_locations(MainProgram(tree).visit(tree))
