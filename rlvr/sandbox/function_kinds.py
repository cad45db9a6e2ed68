"""Library functions by what they do with an argument: look at its structure or its type, judge, order or run it.

    executes(eval)  # True

Standard library only. Exercised by `python -m pytest tests/test_sandbox_rpc.py tests/test_sandbox_objects.py`.
"""

from __future__ import annotations

from functools import cmp_to_key, partial
from operator import attrgetter, itemgetter, methodcaller
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType
from typing import Any

from rlvr.sandbox.operators import BINARY, COMPARISONS
from rlvr.sandbox.remote import library_path

REVEALING = {"sub", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift"}
# Library functions that only look at their argument's structure: what they get beside it reveals no expected value.
STRUCTURAL = {
    "len", "iter", "next", "list", "tuple", "set", "frozenset", "dict", "sorted", "reversed", "enumerate", "zip", "str",
    "repr", "bool", "int", "float", "complex", "bytes", "type", "isinstance", "issubclass", "callable", "hasattr",
    "getattr", "setattr", "delattr", "hash", "id", "dir", "vars", "sum", "min", "max", "abs", "round", "format", "map",
    "filter", "islice", "chain", "takewhile", "dropwhile", "zip_longest", "tee", "groupby", "accumulate", "starmap",
    "product", "permutations", "combinations", "pairwise", "deque", "Counter", "reduce", "nlargest", "nsmallest",
    "gather", "run", "wait_for", "closing", "wraps", "partial", "defaultdict", "OrderedDict", "Thread", "all", "any",
    "aiter", "anext", "super", "iscoroutinefunction", "isgeneratorfunction", "dump", "dumps", "load", "loads",
}  # fmt: skip
JUDGES = {
    "match", "fullmatch", "search", "fnmatch", "fnmatchcase",
    "isclose", "eq", "ne", "lt", "le", "gt", "ge", "is_", "is_not", "contains", "countOf", "indexOf",
    "compare_digest", "SequenceMatcher", "get_close_matches",
}  # fmt: skip
OF_OPERATORS = {
    *BINARY, *COMPARISONS, "is_", "is_not", "not_", "truth", "contains", "countOf", "indexOf",
}  # fmt: skip
WHOLE = {
    "max", "min", "sorted", "sum", "list", "tuple", "set", "frozenset", "dict", "Counter", "reduce", "deque", "join",
}  # fmt: skip
# Functions that run what an argument holds: never here if it may come from the answer.
EXECUTING = {
    "builtins:eval", "builtins:exec", "builtins:compile", "builtins:__import__", "importlib:import_module",
    "_pickle:loads", "_pickle:load", "pickle:_loads", "pickle:_load", "marshal:loads", "marshal:load",
    "runpy:run_path", "runpy:run_module", "logging.config:dictConfig",
}  # fmt: skip
LOOK_AT_TYPE = {
    "type", "isinstance", "issubclass", "callable", "hasattr", "str", "repr", "format", "hash", "dir", "vars",
}  # fmt: skip
NATIVE_MODULES = (
    "doctest", "code", "timeit", "asyncio", "logging", "threading", "queue", "weakref", "contextlib", "concurrent",
    "unittest.mock", "warnings", "io", "_io", "_thread", "_queue", "_asyncio", "_weakref", "os", "posix", "genericpath",
    "tempfile", "shutil", "glob",
)  # fmt: skip
NATIVE_LOCALLY_FINE = {
    "suppress", "nullcontext", "contextmanager", "asynccontextmanager", "run", "urandom", "fspath", "fsencode",
    "fsdecode",
}  # fmt: skip
ORDERING = {"sorted", "max", "min", "nlargest", "nsmallest"}
KEY_WRAPPER = type(cmp_to_key(lambda left, right: 0))
GETTERS = (attrgetter, itemgetter, methodcaller)
IDENTITY = {"heappush", "heappop", "heapify", "heappushpop", "heapreplace", "insort", "insort_left", "insort_right",
            "shuffle", "copy", "deepcopy", "setattr", "delattr", "next", "iter", "id"}  # fmt: skip


def is_operator(value: Any) -> bool:
    """Whether it is a function of the module `operator` that compares, or stands for an operator with two operands."""
    is_one = type(value) is BuiltinFunctionType and getattr(value, "__module__", "") == "_operator"
    return is_one and value.__name__ in OF_OPERATORS


def judges(value: Any) -> bool:
    """Whether it is a function that compares as `operator.eq` does, or what `partial` makes of one."""
    if type(value) is partial:
        return judges(value.func)
    return is_operator(value) and value.__name__ in JUDGES


def executes(value: Any) -> bool:
    """Whether a value is a function that runs what it is given: `eval` as a key of `sorted`, say."""
    return type(value) in (BuiltinMethodType, FunctionType) and library_path(value) in EXECUTING
