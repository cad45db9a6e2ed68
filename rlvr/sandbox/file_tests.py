"""What tests do with files, which are made and read beside the answer: read from the text of the tests alone.

`makes_files` says whether they need a folder, `find_file_oracle` finds tests whose expected value is what they read
from a file, which the answer's process could choose.
Standard library only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from rlvr.sandbox.setup_parts import FUNCTIONS, nodes, used_names
from rlvr.sandbox.value_flow import FILES, base_names, native_names, return_values

MAKE = {"makedirs", "mkdir", "touch", "write_bytes", "write_text"}
READ = {
    "DictReader", "getsize", "glob", "iterdir", "listdir", "load", "read", "read_bytes", "read_text", "reader",
    "readline", "readlines", "rglob", "scandir", "stat", "walk",
}  # fmt: skip


def makes_files(trees: Iterable[ast.AST]) -> bool:
    """Whether tests need a folder for files of their own."""
    for node in (one for tree in trees for one in nodes(tree)):
        if native_names(node, ("tempfile",)):
            return True
        if isinstance(node, ast.Call):
            given = [*node.args, *(word.value for word in node.keywords)]
            texts = [one.value for one in given if isinstance(one, ast.Constant) and type(one.value) is str]
            if call_name(node) in MAKE:
                return True
            if call_name(node) == "open" and any(re.fullmatch("[rbt+]*[wax][bt+]*", one) for one in texts):
                return True
    return False


def find_file_oracle(trees: list[ast.Module], free: set[str]) -> str:
    """The fault of tests that compare a value of the answer, or what is in a file, with what they read from a file."""
    everything = [node for tree in trees for node in nodes(tree)]
    sources = {"open"}.union(*(native_names(node, FILES) for node in everything))
    if not any(isinstance(node, ast.Name) and node.id in sources for node in everything):
        return ""
    read, answers = set[str](), set(free)

    def is_read(part: ast.AST) -> bool:
        calls = [one for one in nodes(part) if isinstance(one, ast.Call)]
        return bool(used_names(part) & read) or any(
            call_name(one) in READ and used_names(one) & sources for one in calls
        )

    before = -1
    while before < (before := len(sources) + len(read) + len(answers)):
        for node in everything:
            pairs: list[tuple[ast.expr, ast.expr]] = []
            if isinstance(node, ast.Assign):
                pairs = [(target, node.value) for target in node.targets]
            elif isinstance(node, (ast.For, ast.comprehension)):
                pairs = [(node.target, node.iter)]
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                pairs = [(node.optional_vars, node.context_expr)]
            for target, value in pairs:
                if used_names(value) & answers:
                    answers |= base_names(target)
                elif used_names(value) & (sources | read):
                    sources |= base_names(target)
                    read |= base_names(target) if is_read(value) else set()
            if isinstance(node, FUNCTIONS):
                values = return_values(node)
                if any(used_names(one) & answers for one in values):
                    answers.add(node.name)
                elif any(map(is_read, values)):
                    read.add(node.name)
    for node in everything:
        sides: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert")
        ):
            sides = node.args[:2]
        of_answer = [bool(used_names(side) & answers) for side in sides]
        of_file = [is_read(side) for side in sides]
        if len(sides) > 1 and all(map(any, zip(of_answer, of_file, strict=True))) and not all(of_answer):
            return (
                f"the test compares with what it reads from a file, where the answer runs ({ast.unparse(node)[:60]}): "
                "compare with plain data"
            )
    return ""


def call_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))
