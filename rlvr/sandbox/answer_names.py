"""Which names of a test are the answer's to define, and which are missing from the test: its own fault.

    find_missing_name([ast.parse("assert np.allclose(f(3), 9)")], {"np", "f"}, None, frozenset())
    # "the test uses 'np' (numpy), which neither it nor its setup imports"

An answer must never supply what judges it. If the task says what answers define (`answer_names`, or a reference
solution), any other name is missing. Else a name is missing if it is that of a library, or that of a judge: a function
that is only ever given values of the answer, and whose result alone decides an assert (`assert is_ok(f(3))`).
Modules of `codec.MODULES` may come from the answer, since the checker takes its own module of that name.
Standard library only.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Sequence
from functools import lru_cache

from rlvr.sandbox.codec import MODULES
from rlvr.sandbox.setup_parts import nodes, parse_beside_threads, used_names, walk

REMEDY = "define or import it there, or list it under answer_names if answers have to define it"
NO_LIBRARY = "the sandbox has the standard library only: use unittest, or try and except"
# Names by which tests know modules: an attribute of one is a function of that module.
LIBRARIES = {
    "np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "plt": "matplotlib", "sp": "scipy",
    "scipy": "scipy", "sklearn": "scikit-learn", "torch": "torch", "tf": "tensorflow", "sns": "seaborn",
    "nx": "networkx", "sympy": "sympy", "pytest": "pytest", "unittest": "unittest", "doctest": "doctest",
    "mock": "unittest.mock", "asyncio": "asyncio", "os": "os", "io": "io", "time": "time", "types": "types",
    "typing": "typing", "inspect": "inspect", "contextlib": "contextlib", "pathlib": "pathlib", "tempfile": "tempfile",
    "threading": "threading", "dataclasses": "dataclasses", "enum": "enum", "abc": "abc", "uuid": "uuid",
    "hashlib": "hashlib", "base64": "base64", "textwrap": "textwrap", "warnings": "warnings", "logging": "logging",
    "numbers": "numbers", "pickle": "pickle", "csv": "csv", "subprocess": "subprocess", "traceback": "traceback",
}  # fmt: skip
# Names that tests import from libraries, and that are a library's in a test of something else.
IMPORTED = frozenset(
    [
        "Counter",
        "OrderedDict",
        "defaultdict",
        "deque",
        "namedtuple",
        "ChainMap",
        "Decimal",
        "Fraction",
        "timedelta",
        "StringIO",
        "BytesIO",
        "PurePath",
        "PurePosixPath",
        "TestCase",
        "Mock",
        "MagicMock",
        "approx",
        "raises",
        "allclose",
        "assert_allclose",
        "assert_equal",
        "array_equal",
        "assert_array_equal",
        "assert_almost_equal",
        "assert_array_almost_equal",
        "assert_frame_equal",
        "reduce",
        "partial",
        "lru_cache",
        "islice",
        "chain",
        "redirect_stdout",
        "suppress",
        "nullcontext",
        "Iterable",
        "Iterator",
        "Generator",
        "Sequence",
        "Mapping",
        "Hashable",
        "Callable",
        "GeneratorType",
    ]
)
_JUDGE = re.compile(
    r"(assert|expect|verify|judge)\w*|(check|compare)(_?(equal|same|close|result|output|answer|value|test)\w*)?"
    r"|is_?(close|ok|correct|equal)|all_?close|approx\w*|almost_?equal\w*|(is_|are_|arrays?_|lists?_)?equals?",
    re.IGNORECASE,
)


def find_missing_name(
    trees: Sequence[ast.Module], free: set[str], entry_point: str | None, answer_names: Collection[str]
) -> str:
    """The fault of tests with a name that nothing defines; "" if there is none.

    `free`: the names that the tests use and neither they nor their setup bind. `answer_names`: what answers define, as
    far as the task says; empty if it does not.
    """
    free = {name for name in free - bound_inside(trees) if not name.startswith("__")}
    unknown = free - {entry_point, *answer_names} - MODULES
    if answer_names and unknown:
        return f"the test uses {min(unknown)!r}, which neither it nor its setup defines; {REMEDY}"
    if not unknown:
        return ""
    all_nodes = [node for tree in trees for node in nodes(tree)]
    bases = {
        node.value.id for node in all_nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    if modules := sorted(unknown & bases & LIBRARIES.keys()):
        name = modules[0]
        remedy = REMEDY if LIBRARIES[name].split(".")[0] in sys.stdlib_module_names else NO_LIBRARY
        return f"the test uses {name!r} ({LIBRARIES[name]}), which neither it nor its setup imports; {remedy}"
    others = free - IMPORTED - MODULES
    if others and (imported := sorted(unknown & IMPORTED)):
        return f"the test uses {imported[0]!r}, which neither it nor its setup imports; {REMEDY}"
    if len(others) > 1 and (judge := find_judge(all_nodes, unknown, others)):
        return f"the test lets {judge!r} decide, which neither it nor its setup defines; {REMEDY}"
    return ""


def find_judge(all_nodes: Sequence[ast.AST], unknown: set[str], of_answer: set[str]) -> str:
    """A function that only ever decides about values of the answer's other functions; "" if there is none.

    A name such as `is_close` or `check_equal` is one as well if it is given variables.
    """
    calls = [node for node in all_nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    on_answer = [call for call in calls if arguments_use(call, of_answer)]
    called_on_data = {call.func.id for call in calls if call not in on_answer}  # type: ignore[attr-defined]
    deciding: list[ast.expr] = []
    for node in all_nodes:
        if isinstance(node, ast.Assert):
            deciding += conditions(node.test)
        elif isinstance(node, ast.Expr) and _JUDGE.fullmatch(call_name(node.value)):
            deciding.append(node.value)
    for call in (call for call in on_answer if call in deciding):
        name = call_name(call)
        if name in unknown - called_on_data and name[:1].islower():
            return name
    called_on_literals = {call_name(call) for call in calls if not any(map(used_names, call.args))}
    by_name = {name for name in map(call_name, deciding) if name in unknown and _JUDGE.fullmatch(name)}
    return min(by_name - called_on_literals, default="") if of_answer - by_name else ""


def conditions(test: ast.expr) -> list[ast.expr]:
    """The expressions of an assert that decide it alone, or beside others of an `and`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return conditions(test.operand)
    if isinstance(test, ast.BoolOp):
        return [part for value in test.values for part in conditions(value)]
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.Is)):
        right = test.comparators[0]
        return conditions(test.left) if isinstance(right, ast.Constant) and type(right.value) is bool else [test]
    return [test]


def arguments_use(call: ast.Call, of_answer: set[str]) -> bool:
    """Whether an argument holds a call of another function of the answer."""
    own = call_name(call)
    for part in [*call.args, *(word.value for word in call.keywords)]:
        if any(call_name(one) in of_answer - {own} for one in [part, *walk(part)] if isinstance(one, ast.Call)):
            return True
    return False


def call_name(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def bound_inside(trees: Sequence[ast.Module]) -> set[str]:
    """Names that the tests bind in any scope: parameters, loop variables, captures of a pattern."""
    found: set[str] = set()
    for node in (node for tree in trees for node in nodes(tree)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        else:
            found |= {getattr(node, field, None) or "" for field in ("name", "rest") if hasattr(node, field)}
    return found


@lru_cache(1024)
def defined_names(solution: str) -> frozenset[str]:
    """The names that a reference solution defines or imports; empty if that does not show."""
    try:
        tree = parse_beside_threads(solution)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    found = bound_inside([tree])
    is_open = "*" in found or used_names(tree) & {"globals", "exec", "setattr"}
    return frozenset() if is_open else frozenset(found - {""})
