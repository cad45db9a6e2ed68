"""What of a test has to run beside the answer, told from the text alone: definitions, and what it does with files.

    find_native_classes([ast.parse("class T(Base): pass")], {"Base"})  # {"T"}

What the answer gets, derives from or calculates with runs there; what judges, or holds what is expected, does not.
Files are made and read there too: `makes_files` says whether tests need a folder, `find_file_comparison` finds those
whose expected value is what they read from a file, which the answer's process could choose.
Standard library only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from rlvr.sandbox.setup_parts import BUILTINS, FUNCTIONS, IMPORTS, bound_names, nodes, used_names, walk
from rlvr.sandbox.value_flow import (
    DISPATCHING,
    FILES,
    NATIVE_MODULES,
    THREADING,
    base_names,
    find_objects,
    has_assertion,
    native_names,
    parameters,
    return_values,
    whole_names,
)

MAKE = {"makedirs", "mkdir", "touch", "write_bytes", "write_text"}
READ = {
    "DictReader", "getsize", "glob", "iterdir", "listdir", "load", "read", "read_bytes", "read_text", "reader",
    "readline", "readlines", "rglob", "scandir", "stat", "walk",
}  # fmt: skip


def find_native_classes(trees: list[ast.Module], free: set[str]) -> set[str]:
    """Classes of a test that have to run beside the answer: it gets them or their objects, or they derive from its own.

    A class that only keeps cases (`case.want`) stays here: beside the answer, the answer would choose its values.
    """
    everything = [node for tree in trees for node in nodes(tree)]
    classes = {node.name: node for node in everything if isinstance(node, ast.ClassDef) and not has_assertion(node)}
    modules = set().union(*(bound_names(ast.Module([node], [])) for node in everything if isinstance(node, IMPORTS)))
    functions = {node.name for node in everything if isinstance(node, FUNCTIONS)}
    made_there = [one for one in NATIVE_MODULES if one != "random"]
    from_there = free.union(*(native_names(node, made_there) for node in everything))
    native = {name for name, node in classes.items() if set().union(*map(used_names, node.bases)) & from_there}
    native |= {
        name
        for name, node in classes.items()
        if {getattr(one, "id", getattr(one, "attr", "")) for one in walk(node)} & DISPATCHING
    }
    made = find_made(everything, free)
    memberships = (ast.In, ast.NotIn)
    operators = [one for one in everything if not isinstance(one, ast.Compare) or isinstance(one.ops[0], memberships)]
    before = -1
    while before < len(native):
        before = len(native)
        for name, node in classes.items():
            if set().union(*map(used_names, node.bases)) & native:
                native.add(name)
            objects = find_objects(everything, name)
            for call in (one for one in everything if isinstance(one, ast.Call)):
                function = call.func
                owners = used_names(function.value) if isinstance(function, ast.Attribute) else set[str]()
                is_method = bool(owners - modules - functions - {name} - BUILTINS - {"self", "cls"})
                is_called = isinstance(function, ast.Name) and function.id in free | {"candidate"} | native
                args = [*call.args, *(word.value for word in call.keywords)]
                if (is_method or is_called) and any(whole_names(part) & objects for part in args):
                    native.add(name)
            if any(meets(node, objects, made) for node in operators):
                native.add(name)
    return native


def find_own_comparison(trees: list[ast.Module], free: set[str], native: set[str]) -> str:
    """A class of a test whose object is compared with one of the answer, which decides natively, but stays here."""
    everything = [node for tree in trees for node in nodes(tree)]
    made = find_made(everything, free)
    for node in everything:
        if isinstance(node, ast.ClassDef) and node.name not in native:
            objects = find_objects(everything, node.name)
            if any(isinstance(one, ast.Compare) and meets(one, objects, made) for one in everything):
                return node.name
    return ""


def find_made(everything: list[ast.AST], free: set[str]) -> set[str]:
    """The answer's classes by the text, which are capitalized, and names that only hold objects of them."""
    found = {name for name in free if name[:1].isupper() and "_" not in name}
    before = -1
    while found and before < len(found):
        before = len(found)
        for node in everything:
            if isinstance(node, ast.Assign) and makes_one(node.value, found):
                found |= {one.id for one in node.targets if isinstance(one, ast.Name)}
    return found


def makes_one(node: ast.AST, made: set[str]) -> bool:
    if isinstance(node, ast.BinOp):
        return makes_one(node.left, made) or makes_one(node.right, made)
    node = node.func if isinstance(node, ast.Call) else node
    return isinstance(node, ast.Name) and node.id in made


def meets(node: ast.AST, objects: set[str], made: set[str]) -> bool:
    """Whether an operator or a comparison takes one of `objects` and an object of the answer."""
    if isinstance(node, ast.Compare):
        sides: list[ast.AST] = [node.left, *node.comparators]
    elif isinstance(node, (ast.BinOp, ast.AugAssign, ast.Subscript)):
        sides = list(ast.iter_child_nodes(node))
    else:
        return False
    given = [one for one in sides if makes_one(one, made)]
    return bool(given) and any(whole_names(one) & objects for one in sides if one not in given)


def find_native_functions(trees: list[ast.Module], free: set[str], tainted: set[str], deciding: set[str]) -> set[str]:
    """The functions of a test that run as a whole in the answer's process: in a thread or in its event loop.

    They have no assertions, and are passed to what makes threads, or as coroutines to a function of the answer or of
    `asyncio`. A function that a thread calls with values of the test stays in the test's process, as these values do.
    """
    everything = [node for tree in trees for node in nodes(tree)]
    functions = {
        node.name: node
        for node in everything
        if isinstance(node, FUNCTIONS)
        and not (has_assertion(node) or node.name in deciding)
        and not any(isinstance(one, (ast.Global, ast.Nonlocal)) for one in walk(node))
    }
    calls = [node for node in everything if isinstance(node, ast.Call)]
    called = {node.func.id for node in calls if isinstance(node.func, ast.Name)}
    loaded = {node.id for node in everything if isinstance(node, ast.Name)} & functions.keys()
    found = set[str]()
    for call in calls:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        owners = used_names(call.func)
        given = [*call.args, *(word.value for word in call.keywords)]
        passed = {node.id for one in given for node in nodes(one) if isinstance(node, ast.Name)} & functions.keys()
        if name in THREADING:
            others = set().union(*map(used_names, given)) - passed - tainted - BUILTINS
            found |= set() if others else passed
            if not passed:  # `Thread(target=one) for one in (give, take)`
                found |= {one for one in loaded - called if not parameters(functions[one].args)}
        elif owners & free or (owners & {"asyncio"} and name != "run") or name == "create_task":
            found |= {one for one in passed if isinstance(functions[one], ast.AsyncFunctionDef)}
    return found | find_formulas(everything, functions, free)


def find_formulas(everything: list[ast.AST], functions: dict[str, Any], free: set[str]) -> set[str]:
    """Functions of a test that are only given to functions of the answer: `derivative(poly, 2)`.

    Beside the answer they may calculate with its objects, as in plain Python. One that compares, or that uses a value
    of the test, stays here.
    """
    given = set[int]()
    for call in (node for node in everything if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id in free:
            given |= set(map(id, call.args))
    imported = set().union(*(bound_names(ast.Module([node], [])) for node in everything if isinstance(node, IMPORTS)))
    found = {name for name, node in functions.items() if is_formula(node)}
    before = -1
    while before != len(found):
        before = len(found)
        inside = given.union(*(map(id, walk(functions[name])) for name in found))
        elsewhere = {node.id for node in everything if isinstance(node, ast.Name) and id(node) not in inside}
        known = found | imported | free | BUILTINS
        found = {
            name for name in found - elsewhere if used_names(functions[name]) - own_names(functions[name]) <= known
        }
    return found


def own_names(function: ast.AST) -> set[str]:
    """Parameters and variables of a function."""
    stored = {one.id for one in walk(function) if isinstance(one, ast.Name) and not isinstance(one.ctx, ast.Load)}
    return stored | {one.arg for one in walk(function) if isinstance(one, ast.arg)}


def is_formula(function: ast.AST) -> bool:
    """Whether a function calculates and does not decide anything."""
    decides = (ast.Compare, ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, ast.Global, ast.Nonlocal, ast.Assert)
    parts = walk(function)
    return any(isinstance(one, ast.BinOp) for one in parts) and not any(isinstance(one, decides) for one in parts)


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


def find_file_comparison(trees: list[ast.Module], free: set[str]) -> str:
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
