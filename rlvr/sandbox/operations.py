"""What a test does with values of the answer: on plain data here, with everything else in the answer's process.

`rlvr.sandbox.test_program` rewrites a test so that each of its operations is a call of `Operations`. A value of the
answer is plain data, or a `Remote`, a reference. An operation on plain data is Python's own. One on a `Remote` is
asked of the answer's process, where it runs natively; `rlvr.sandbox.comparisons` says when its word is believed. A
library's function runs where its kind allows: beside the answer if it only looks at its argument's structure, here if
it judges. Contexts of the answer are entered and left there; what a test asserts inside is never given to the answer,
which could swallow it.
Standard library only.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import cache, cmp_to_key, partial
from io import StringIO
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePosixPath
from random import Random
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from rlvr.sandbox.comparisons import MOCK_ASSERTIONS, Comparisons, check_almost_equal, check_mock
from rlvr.sandbox.operators import BINARY, COMPARISONS
from rlvr.sandbox.remote import CACHED, CONTAINERS, TEST, Link, Remote, find_remotes, library_path
from rlvr.sandbox.value_flow import CAPTURING, DISPATCHING

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


class Operations(Comparisons):
    """The operations of a test. `captures`: it redirects what is printed."""

    def __init__(self, link: Link, uses_objects: bool, captures: bool = False, asks_back: bool = True) -> None:
        super().__init__(link, uses_objects, asks_back)
        self.captures = captures

    # Names and definitions

    def name(self, name: str) -> Any:
        """A reference to the value that the answer binds to `name`."""
        return self.link.refer(name)

    def define(self, name: str, text: str, values: dict[str, Callable[[], Any]]) -> Any:
        """Run a definition in the answer's process, where it finds `values` under their names."""
        given: dict[str, Any] = {}
        for key, value in values.items():
            try:
                given[key] = value()
            except NameError:  # of the answer, or defined later
                continue
        return self.ask("define", name, text, given)

    # Attributes, items, operators

    def getattr(self, owner: Any, name: str) -> Any:
        if remotes := find_remotes(owner, 0):
            return self.ask("getattr", remotes[0], name)
        if isinstance(owner, ModuleType) and owner is sys and name in ("stdin", "stdout", "stderr", "argv"):
            return self.ask("getattr", owner, name)
        if owner is os and name == "environ":
            return self.ask("getattr", owner, name)
        return getattr(owner, name)

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        if type(owner) is Remote:
            self.ask("setattr", owner, name, value)
            return
        if isinstance(owner, ModuleType):
            self.ask("setattr", owner, name, value)
        if not isinstance(owner, ModuleType) or (owner is not builtins and not find_remotes(value)):
            setattr(owner, name, value)

    def delattr(self, owner: Any, name: str) -> None:
        self.ask("delattr", owner, name) if type(owner) is Remote else delattr(owner, name)

    def getitem(self, owner: Any, index: Any) -> Any:
        if type(owner) is not Remote and not find_remotes(index):
            return owner[index]
        if type(owner) is Remote and owner._exact == 1 and not find_remotes(index):
            known, data = self.link.data(owner)
            if known and type(data) in (str, bytes, tuple):
                return data[index]
        return self.ask("getitem", owner, index)

    def setitem(self, owner: Any, index: Any, value: Any) -> None:
        if type(owner) is Remote or find_remotes(index):
            self.ask("setitem", owner, index, value)
        else:
            owner[index] = value

    def delitem(self, owner: Any, index: Any) -> None:
        if type(owner) is Remote or find_remotes(index):
            self.ask("delitem", owner, index)
        else:
            del owner[index]

    # Calls

    def method(self, owner: Any, name: str, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        if type(owner) is Remote and name in MOCK_ASSERTIONS and "unittest.mock" in sys.modules:
            check_mock(self, owner, name, args, words)
            return None
        if type(owner) is Remote:
            if owner._kind == "ThreadPoolExecutor" and args and self.is_local(args[0]):
                args, words = self.keep_arguments(name, args, words)
            value = self.link.call_method(owner, name, args, words)
            if name.strip("_") in COMPARISONS and type(value) is bool and len(args) == 1:
                return self.compare(name.strip("_"), owner, args[0])
            return value
        if isinstance(owner, ModuleType) and owner.__name__ == "random" and name == "seed":
            self.ask("seed", *args)
        if type(owner).__name__ == "PosixPath" and not hasattr(PurePosixPath, name):  # it looks at files
            return self.link.call_method(owner, name, args, words)
        function = self.getattr(owner, name)
        if type(owner) is list and name in ("append", "insert", "extend"):
            return function(*args, **words)
        if type(owner) in CONTAINERS and name in ("index", "count", "remove") and find_remotes([owner, args]):
            return self.search(owner, name, *args)
        if type(owner) is list and name == "sort":
            function(**{**words, "key": self.sort_key(words.get("key"))})
            return None
        return self.call(function, args, words)

    def keep_arguments(self, name: str, args: tuple[Any, ...], words: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Arguments of what makes a thread; those of a function of the test stay here, since they may be expected."""
        if name == "Thread":
            target: Any = words.get("target")
            if not self.is_local(target):
                return args, words
            given, named = tuple(words.get("args", ())), dict(words.get("kwargs") or {})
            rest = {key: value for key, value in words.items() if key not in ("args", "kwargs")}
            return args, {**rest, "target": lambda: target(*given, **named)}
        function, *rest = args
        if name == "map":
            items = list(zip(*rest, strict=False))
            return (lambda place: function(*items[place]), range(len(items))), words
        return (lambda: function(*rest, **words),), {}

    def sort_key(self, key: Any) -> Any:
        """A key for an order that is made here: objects of the answer are compared as elsewhere in the test."""
        if type(key) is KEY_WRAPPER:  # it calls a function that compares
            return key

        def order(left: Any, right: Any) -> int:
            if self.compare("lt", left, right):
                return -1
            return 1 if self.compare("lt", right, left) else 0

        made = cmp_to_key(order)

        def value(item: Any) -> Any:
            found = item if key is None else self.call(key, (item,), {})
            return made(found) if find_remotes(found) else found

        return value

    def call(
        self,
        function: Any,
        args: tuple[Any, ...],
        words: dict[str, Any],
        other: Callable[[int], Any] | None = None,
        side: str = "",
    ) -> Any:
        """`function(*args, **words)`. `other`, `side`: as in `compare`, if the function may be one that compares."""
        if type(function) is Remote:
            return self.link.call(function, args, words)
        kind: Any = type(function)
        if kind.__name__ == "_Call":  # unittest.mock.call
            return function(*args, **words)
        if kind in GETTERS and len(args) == 1 and find_remotes(list(args)):
            return self.get(function, args[0])
        if self.is_local(function):
            return function(*args, **words)
        if (kind is type and function.__module__ == TEST) or kind.__module__ == TEST:
            return function(*args, **words)
        if kind is partial:
            return self.call(function.func, (*function.args, *args), {**function.keywords, **words}, other, side)
        name = getattr(function, "__name__", "")
        if is_operator(function) and find_remotes(list(args)):
            return self.operate(name, args, other, side)
        if function is map or function is filter:
            return self.lazily(function, args[0], *args[1:], other=other, side=side)
        if name in ("zip", "enumerate") and find_remotes(list(args)):
            return function(*args, **words)  # which iterate over a reference as a loop does
        if function is len and args and type(args[0]) is Remote:
            length = (
                len(self.link.data(args[0])[1])
                if self.readable(args[0])[0]
                else self.link.call_library("builtins:len", args, words)
            )
            self.link.lengths.add(tuple(args[0]._target))
            return length
        if name in ORDERING and (self.is_local(words.get("key")) or type(words.get("key")) is KEY_WRAPPER):
            return function(*args, **{**words, "key": self.sort_key(words["key"])})
        if name in WHOLE and any(type(one) is GeneratorType for one in args):
            args = tuple(list(one) if type(one) is GeneratorType else one for one in args)
        judged = any(map(judges, [*args, *words.values()]))
        if judged and function is partial:
            return partial(*args, **words)
        if judged:  # `starmap(operator.eq, pairs)`: each pair is compared here
            args = tuple(self.make_local(one) if judges(one) else one for one in args)
            words = {key: self.make_local(one) if judges(one) else one for key, one in words.items()}
        remotes = find_remotes([list(args), words])
        if name in CAPTURING:
            return self.expect(function, name, args, words)
        path = library_path(function)
        if path == "threading:Thread":
            args, words = self.keep_arguments(name, args, words)
        if path in EXECUTING or (path and any(map(executes, [*args, *words.values()]))):
            return self.link.call_library(path, args, words)
        if function is print and self.captures:
            return self.link.call_library("builtins:print", args, words)
        if not remotes:
            if path and self.is_native(path, name):
                return self.link.call_library(path, args, words)
            return function(*args, **words)
        if kind is BuiltinMethodType and type(function.__self__) in (str, bytes) and not all(map(self.is_exact, args)):
            return self.link.call_method(function.__self__, name, args, words)
        if kind is BuiltinMethodType and not isinstance(function.__self__, (ModuleType, type)):  # of a container here
            return function(*(self.localize(one) if type(function.__self__) is str else one for one in args), **words)
        if function is all or function is any:
            return function(bool(one) for one in args[0])
        if function is print:
            return None
        if name not in IDENTITY and all(self.is_readable_by(name, one) for one in [*args, *words.values()]):
            return function(*map(self.localize, args), **{key: self.localize(one) for key, one in words.items()})
        if name == "TextTestRunner":
            return function(*args, **{key: value for key, value in words.items() if key != "stream"}, stream=StringIO())
        if name.startswith(("assertRaises", "suppress")):
            return self.expect(function, name, args, words)
        if name == "assertAlmostEqual" and len(remotes) == 1:
            check_almost_equal(self, *args, **words)
            return None
        if name == "addCleanup":
            return function(self.call, args[0], args[1:], words)
        if function is issubclass and isinstance(args[0], type) and issubclass(args[0], BaseException):
            with suppress(TypeError):  # of a class that is no exception
                return issubclass(args[0], self.catch(args[-1]))
        if path == "math:isclose":  # which takes the number of an object, as every function of `math` does
            args = tuple(map(self.link.to_number, args))
            remotes = find_remotes([*args, *words.values()])
        if name in JUDGES and all(self.link.data(one)[0] for one in remotes):
            return function(*map(self.localize, args), **{key: self.localize(one) for key, one in words.items()})
        reveals = not self.uses_objects and name not in STRUCTURAL | IDENTITY and has_data([*args, *words.values()])
        if path and not (judged or name in JUDGES or reveals):
            return self.link.call_library(path, args, words)
        if path and not judged and not all(self.link.data(one)[0] or self.is_callable(one) for one in remotes):
            raise self.refuse(*remotes)
        return self.call_here(function, args, words)

    def make_local(self, function: Any) -> Any:
        """A function of the test that calls another one as the test's text does."""

        def call(*args: Any, **words: Any) -> Any:
            return self.call(function, args, words)

        call.__module__ = TEST
        return call

    def operate(self, name: str, args: tuple[Any, ...], other: Callable[[int], Any] | None, side: str) -> Any:
        """A function of the module `operator` on objects of the answer: what its operator does in the test's text."""
        if name in (*COMPARISONS, "is_", "is_not"):
            left, right = args
            return self.compare(name, left, right, other, side)
        if name in ("not_", "truth"):
            return bool(args[0]) is (name == "truth")
        if name == "contains":
            return self.contains(*args)
        if name in ("countOf", "indexOf"):
            return self.search(list(args[0]), name.removesuffix("Of"), args[1])
        return self.binary(name, *args)

    def call_here(self, function: Any, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """Call what must not run beside the answer: `random.Random(0).choice(xs)`, a library's function that judges.

        It gets data, functions that call the answer's, lists with references, else the reference itself.
        """
        lists: list[tuple[Remote, list[Any], list[Any]]] = []

        def stand_in(value: Any) -> Any:
            if type(value) is not Remote:
                return value
            known, data = self.link.data(value)
            if value._kind == "list":  # which may be changed in place
                items = list(value)
                lists.append((value, items, list(items)))
                return items
            if known:
                return data
            return partial(self.call_for_data, value) if self.is_callable(value) else value

        key = words.get("key")
        if self.is_local(key) or (type(key) is Remote and self.is_callable(key)):
            words = {**words, "key": self.sort_key(key)}
        result = function(*map(stand_in, args), **{key: stand_in(one) for key, one in words.items()})
        for remote, items, before in lists:
            if list(map(id, items)) != list(map(id, before)):
                self.ask("setitem", remote, slice(None), items)
        return result

    def call_for_data(self, function: Remote, *args: Any, **words: Any) -> Any:
        """What a function of the answer returns, as a library's function needs it: data if it can be read as such."""
        value = self.call(function, args, words)
        known, data = self.readable(value)
        return data if known else value

    def is_callable(self, value: Remote) -> bool:
        return self.link.call_library("builtins:callable", [value], {}) is True

    def get(self, getter: Any, owner: Any) -> Any:
        """What `attrgetter`, `itemgetter` or `methodcaller` gets from an object."""
        kind, (made, names) = type(getter), getter.__reduce__()[:2]
        if kind is methodcaller:  # its reduction is a partial function if there are keyword arguments
            words = getattr(made, "keywords", {})
            return self.method(owner, (made.args if words else names)[0], tuple(names if words else names[1:]), words)
        found: list[Any] = []
        for name in names:
            value = owner
            for part in name.split(".") if kind is attrgetter else [name]:
                value = self.getattr(value, part) if kind is attrgetter else self.getitem(value, part)
            found.append(value)
        return found[0] if len(found) == 1 else tuple(found)

    def expect(self, function: Any, name: str, args: tuple[Any, ...], words: dict[str, Any]) -> Any:
        """`assertRaises(E, f, ...)`, `suppress(E)`: with the classes here, and a call of `f` that goes there."""
        if name == "suppress":
            return function(*map(self.catch, args))
        if name in CAPTURING:
            case = self.link.call_library("unittest:TestCase", [], {})
            count = len(args) if name in ("assertLogs", "assertNoLogs") else 2 if name.endswith("Regex") else 1
            value = self.link.call_method(case, name, args[:count], {} if args[count:] else words)
            if count == len(args) and name in ("assertLogs", "assertNoLogs"):
                return RemoteLogs(self, value, name == "assertNoLogs")
            context = RemoteWarnings(self, value, self.catch(args[0]), args[1] if name.endswith("Regex") else "")
            if not args[count:]:
                return context
            with context:
                return self.call(args[count], args[count + 1 :], words)
        given = [self.catch(args[0]), *args[1:]]
        place = 2 if name.endswith("Regex") else 1
        if len(given) > place and type(given[place]) is Remote:
            called = given[place]
            given[place] = lambda *rest, **more: self.call(called, rest, more)
        return function(*given, **words)

    def mapping(self, value: Any) -> Any:
        if type(value) is not Remote:
            return value
        known, data = self.link.data(value)
        if known and isinstance(data, dict):
            return data
        return {key: self.ask("getitem", value, key) for key in self.method(value, "keys", (), {})}

    def hold(self, value: Any) -> Any:
        """A container that will hold objects of the answer: made in its process."""
        return (
            self.ask("hold", value)
            if (type(value) in (*CONTAINERS, bytearray) and not isinstance(value, tuple)) or type(value) is Random
            else value
        )

    def is_local(self, function: Any) -> bool:
        """Whether the object is a function that runs here, with its assertions."""
        kind = type(function)
        return (kind in (FunctionType, MethodType) or kind.__name__ == CACHED) and self.is_of_test(function)

    def is_of_test(self, function: Any) -> bool:
        return (
            getattr(function, "__module__", None) in (TEST, None)
            or getattr(function, "__globals__", {}).get("_o_") is self
        )

    def is_native(self, path: str, name: str) -> bool:
        module = path.rpartition(":")[0]
        return name in DISPATCHING or (
            any(module == one or module.startswith(one + ".") for one in NATIVE_MODULES)
            and name not in NATIVE_LOCALLY_FINE
        )

    def lazily(
        self, function: Any, first: Any, *iterables: Any, other: Callable[[int], Any] | None = None, side: str = ""
    ) -> Iterator[Any]:
        """`map` and `filter`, with the items computed here: the answer cannot end them early."""
        others = cache(lambda k: list(other(k))) if other else None
        for place, items in enumerate(zip(*(one for one in iterables), strict=False)):
            part = (lambda k, place=place: others(k)[place]) if others else None
            value = self.call(first, items, {}, part, side) if first is not None else items[0]
            if function is map:
                yield value
            elif value:
                yield items[0]

    def display(self, kind: str, items: list[Any]) -> Any:
        """A container of the test. It goes to the answer only if objects of the answer are its keys."""
        keys = items if kind == "set" else [key for key, _ in items] if kind == "dict" else []
        if keys and find_remotes(keys):
            return self.ask("display", kind, items)
        return getattr(builtins, kind)(items)

    def format(self, value: Any, conversion: int, spec: str) -> str:
        if conversion == ord("r"):
            value = self.call(repr, (value,), {})
        elif conversion == ord("s"):
            value = self.call(str, (value,), {})
        return self.call(format, (value, spec), {})

    # Exceptions and contexts

    def catch(self, kinds: Any) -> Any:
        if type(kinds) is tuple:  # flat, which Python wants
            parts = [self.catch(kind) for kind in kinds]
            return tuple(one for part in parts for one in (part if type(part) is tuple else (part,)))
        return self.link.exception_class(kinds) if type(kinds) is Remote else kinds

    def throw(self, error: Any) -> Any:
        return self.link.mirror(error) if type(error) is Remote else error

    def context(self, value: Any) -> Any:
        return RemoteContext(self, value) if type(value) is Remote else value

    def async_context(self, value: Any) -> Any:
        return RemoteAsyncContext(self, value) if type(value) is Remote else value

    async def async_iterate(self, value: Any) -> Any:
        if type(value) is not Remote:
            async for one in value:
                yield one
            return
        items = self.ask("aiter", value)
        while True:
            ended, one = self.ask("anext", items)
            if ended:
                return
            yield one

    def await_call(self, function: Any, args: tuple[Any, ...], words: dict[str, Any]) -> Awaitable[Any]:
        if find_remotes([function, list(args), words]) and not self.is_local(function):
            path = None if type(function) is Remote else library_path(function)
            return ready(self.ask("await_call", ["path", path] if path else function, list(args), words))
        return self.await_value(self.call(function, args, words))

    def await_value(self, value: Any) -> Awaitable[Any]:
        return ready(self.ask("await_value", value)) if type(value) is Remote else value


def is_operator(value: Any) -> bool:
    """Whether the object is a function of the module `operator` that compares, or stands for an operator with two
    operands."""
    is_one = type(value) is BuiltinFunctionType and getattr(value, "__module__", "") == "_operator"
    return is_one and value.__name__ in OF_OPERATORS


def judges(value: Any) -> bool:
    """Whether the object is a function that compares as `operator.eq` does, or what `partial` makes of one."""
    if type(value) is partial:
        return judges(value.func)
    return is_operator(value) and value.__name__ in JUDGES


def executes(value: Any) -> bool:
    """Whether a value is a function that runs what it is given: `eval` as a key of `sorted`, say."""
    return type(value) in (BuiltinMethodType, FunctionType) and library_path(value) in EXECUTING


async def ready(value: Any) -> Any:
    return value


def has_data(values: list[Any]) -> bool:
    """Whether plain data stands among the arguments, which the answer would learn."""
    plain = (int, float, str, bytes, complex, list, tuple, dict, set)
    return any(isinstance(one, plain) and not isinstance(one, bool) and not find_remotes(one) for one in values)


class RemoteContext:
    def __init__(self, operations: Any, value: Remote) -> None:
        self.operations, self.value = operations, value

    def __enter__(self) -> Any:
        return self.operations.link.call_method(self.value, "__enter__", (), {})

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if isinstance(error, AssertionError) and not find_remotes(error, 0):
            self.operations.ask("exit", self.value, None)
            return False  # the answer must not swallow what a test asserts
        if error is not None and not isinstance(error, Exception):
            return False
        return bool(self.operations.ask("exit", self.value, error))


class RemoteAsyncContext(RemoteContext):
    async def __aenter__(self) -> Any:
        return self.operations.ask("await_call", self.operations.getattr(self.value, "__aenter__"), [], {})

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        given = None if isinstance(error, AssertionError) and not find_remotes(error, 0) else error
        swallowed = self.operations.ask("aexit", self.value, given)
        return bool(swallowed) and given is error


class RemoteLogs(RemoteContext):
    """`assertLogs` and `assertNoLogs`: records are collected beside the answer and counted here."""

    def __init__(self, operations: Any, value: Remote, wants_none: bool) -> None:
        super().__init__(operations, value)
        self.wants_none, self.watcher = wants_none, None

    def __enter__(self) -> Any:
        self.watcher = super().__enter__()
        return self.watcher

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        lines = [] if self.watcher is None else list(self.operations.getattr(self.watcher, "output"))
        with suppress(AssertionError):
            self.operations.ask("exit", self.value, None)
        if error is None and bool(lines) is self.wants_none:
            raise AssertionError(f"{len(lines)} lines were logged")
        return False


class RemoteWarnings(RemoteContext):
    """`assertWarns`: warnings are collected beside the answer; their classes and texts are compared here."""

    def __init__(self, operations: Any, value: Remote, kinds: Any, pattern: Any) -> None:
        super().__init__(operations, value)
        self.kinds, self.pattern = kinds, pattern

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        with suppress(AssertionError):
            self.operations.ask("exit", self.value, None)
        if error is not None:
            return False
        for warning in self.operations.getattr(self.value, "warnings"):
            raised = self.operations.throw(self.operations.getattr(warning, "message"))
            if isinstance(raised, self.kinds) and re.search(self.pattern, str(raised)):
                return False
        raise AssertionError("no such warning was given")
