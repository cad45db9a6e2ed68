"""What a test does with values of the answer: on plain data here, with everything else in the answer's process.

`rlvr.sandbox.test_program` rewrites a test so that each of its operations is a call of `Operations`. A value of the
answer is plain data, or a `Remote`, a reference. An operation on plain data is Python's own. One on a `Remote` is
asked of the answer's process, where it runs natively, with two rules that keep expected values here:

- *Data decides.* A `Remote` whose value can be read as data (a list, a named tuple, an enumeration's integer) is read
  and compared here. The answer learns nothing and may only guess.
- *An opaque object compared with plain data* ends the test (`opaque`), unless the tests themselves use objects
  (`uses_objects`: they name a class, call methods, ...). Then the comparison is the answer's own `==`, and is believed
  only if it also tells the expected value from others: the same question is put for `WINDOW` values, one of which is
  the expected one, in random order. An `==` that accepts everything, or remembers, fails.

Two objects of the answer are compared natively, with the constants of one of them shifted for the counter-questions.
Standard library only. `python -m pytest tests/test_sandbox_rpc.py` exercises it.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import cache, cmp_to_key, partial
from io import StringIO
from operator import attrgetter, methodcaller
from pathlib import PurePosixPath
from random import Random
from types import BuiltinMethodType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from rlvr.sandbox.assertion_methods import MOCK_ASSERTIONS, check_almost_equal, check_mock, same_items
from rlvr.sandbox.counter_values import COLLISIONS, WINDOW, shift_all, shuffle_range, vary
from rlvr.sandbox.function_kinds import (
    EXECUTING,
    GETTERS,
    IDENTITY,
    JUDGES,
    KEY_WRAPPER,
    LOOK_AT_TYPE,
    NATIVE_LOCALLY_FINE,
    NATIVE_MODULES,
    ORDERING,
    REVEALING,
    STRUCTURAL,
    WHOLE,
    executes,
    is_operator,
    judges,
)
from rlvr.sandbox.operators import COMPARISONS, OPERATORS, in_place
from rlvr.sandbox.order_questions import OrderQuestions
from rlvr.sandbox.remote import CACHED, CONTAINERS, TEST, Link, Remote, find_remotes, library_path
from rlvr.sandbox.remote_contexts import RemoteAsyncContext, RemoteContext, RemoteLogs, RemoteWarnings
from rlvr.sandbox.value_flow import CAPTURING, DISPATCHING


class Operations:
    """The operations of a test. `uses_objects`: by its own text, the test works with objects of the answer.

    `asks_back`: of two objects it may also ask for the order the other way round, which the test cannot notice.
    """

    def __init__(self, link: Link, uses_objects: bool, captures: bool = False, asks_back: bool = True) -> None:
        self.link, self.uses_objects, self.captures, self.asks_back = link, uses_objects, captures, asks_back
        self.orders = OrderQuestions()

    # Names and definitions

    def name(self, name: str) -> Any:
        """What the answer binds to a name."""
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

    def ask(self, name: str, *args: Any) -> Any:
        return self.link.op(name, *args)

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

    def unary(self, name: str, value: Any) -> Any:
        if type(value) is not Remote:
            return OPERATORS[name](value)
        return self.ask(name, value)

    def readable(self, value: Any) -> tuple[bool, Any]:
        """Whether a value is data that operators may take here, and the data."""
        if type(value) is not Remote:
            return not find_remotes(value), value
        known, data = self.link.data(value)
        return known and (value._exact == 1 or not self.uses_objects), data

    def is_readable_by(self, name: str, value: Any) -> bool:
        """Whether a function may take the data of a value here; those that look at the type need an exact one."""
        known, _ = self.readable(value)
        return known and not (type(value) is Remote and value._exact != 1 and name in LOOK_AT_TYPE)

    def is_exact(self, value: Any) -> bool:
        return type(value) is not Remote or (self.link.data(value)[0] and value._exact == 1)

    def binary(self, name: str, left: Any, right: Any) -> Any:
        if type(left) is not Remote and type(right) is not Remote and not find_remotes([left, right]):
            return OPERATORS[name](left, right)
        known_left, data_left = self.readable(left)
        known_right, data_right = self.readable(right)
        if known_left and known_right:
            return OPERATORS[name](data_left, data_right)
        formats = name == "mod" and type(left) is str
        one_sided = name in REVEALING and not formats and not (find_remotes(left) and find_remotes(right))
        if not self.uses_objects and one_sided:
            raise self.refuse(left, right)
        return self.ask(name, left, right)

    def change(self, name: str, left: Any, right: Any) -> Any:
        """`left op= right`."""
        if type(left) is not Remote and type(right) is not Remote and not find_remotes(right):
            return OPERATORS[in_place(name)](left, right)
        if type(left) is list and name == "add":
            left += list(self.iterate(right))
            return left
        if type(left) is Remote and (
            left._exact != 1 or type(self.link.data(left)[1]) in (list, dict, set, deque, bytearray)
        ):
            if not self.uses_objects and name in REVEALING and type(right) is not Remote and left._exact != 1:
                raise self.refuse(left, right)
            return self.ask(in_place(name), left, right)
        return self.binary(name, left, right)

    def refuse(self, *values: Any) -> BaseException:
        kind = (
            next(one._kind for one in values if type(one) is Remote)
            if any(type(one) is Remote for one in values)
            else "value"
        )
        return self.link.fail("opaque", f"a {kind} of the answer is used with plain data; only its own kind may be")

    # Comparisons

    def chain(self, left: Any, *rest: tuple[str, Callable[[], Any]]) -> Any:
        result: Any = True
        for name, make in rest:
            right = make()
            result = self.compare(name, left, right)
            if not result:
                return result
            left = right
        return result

    def compare(
        self, name: str, left: Any, right: Any, other: Callable[[int], Any] | None = None, side: str = ""
    ) -> Any:
        """`left op right`. `other(k)`: the operand on `side` with its constants shifted by k."""
        if name == "not_in":
            return not self.compare("in_", left, right)
        if name in ("is_", "is_not"):
            return self.is_same(left, right) is (name == "is_")
        if not find_remotes([left, right]):
            return left in right if name == "in_" else OPERATORS[name](left, right)
        if name == "in_":
            return self.contains(right, left)
        known_left, data_left = self.comparable(left)
        known_right, data_right = self.comparable(right)
        if known_left and known_right:
            return OPERATORS[name](data_left, data_right)
        both = bool(find_remotes(left) and find_remotes(right))
        if not both and not self.uses_objects:
            raise self.refuse(left, right)
        if name not in ("eq", "ne"):
            return (self.orders.of_two if both else self.orders.ask)(self, name, left, right)
        if type(left) is type(right) and type(left) in (list, tuple, dict):
            return self.is_equal_by_parts(left, right, other, side) is (name == "eq")
        if not both:
            plain, side = (right, "right") if find_remotes(left) else (left, "left")
            if vary(plain, 1) is not plain:
                other = lambda k: vary(plain, k)  # noqa: E731
        return self.ask_among_others(name, left, right, other, side)

    def is_equal_by_parts(self, left: Any, right: Any, other: Callable[[int], Any] | None, side: str) -> bool:
        """Whether two containers of the test are equal, of which one holds objects: each part decides by itself."""
        if len(left) != len(right) or (type(left) is dict and left.keys() != right.keys()):
            return False
        for place in left if type(left) is dict else range(len(left)):
            part = (lambda k, place=place: other(k)[place]) if other else None
            is_one = type(left[place]) is Remote and left[place] is right[place]
            if not is_one and not self.compare("eq", left[place], right[place], part, side):
                return False
        return True

    def same_items(self, *given: Any) -> bool:
        return same_items(self, *given)

    def near(self, name: str, left: Any, right: Any, *given: Any) -> Any:
        return self.orders.near(self, name, left, right, *given)

    def comparable(self, value: Any) -> tuple[bool, Any]:
        """Whether a value compares as data does, and the data."""
        if type(value) is Remote:
            known, data = self.link.data(value)
            return known and not (value._exact == 3 and self.uses_objects), data
        remotes = find_remotes(value)
        if not remotes:
            return True, value
        if isinstance(value, BaseException):
            return False, value
        if not all(self.link.data(one)[0] for one in remotes):
            return False, value
        return True, self.localize(value)

    def localize(self, value: Any) -> Any:
        """A copy of a container in which references are replaced by their data."""
        kind: Any = type(value)
        if kind is Remote:
            return self.link.data(value)[1]
        if isinstance(value, dict):
            return {self.localize(key): self.localize(item) for key, item in value.items()}
        made: Any = kind if kind in CONTAINERS else None
        return made(self.localize(item) for item in value) if made else value

    def ask_among_others(self, name: str, left: Any, right: Any, other: Callable[[int], Any] | None, side: str) -> bool:
        if other is None:
            return self.ask(name, left, right) is True
        here = os.urandom(1)[0] % WINDOW
        equal: dict[int, bool] = {}
        for position in shuffle_range(WINDOW):
            k = position - here
            try:
                one = (right if side == "right" else left) if k == 0 else other(k)
                pair = (left, one) if side == "right" else (one, right)
                equal[k] = (self.ask(name, *pair) is True) is (name == "eq")
            except Exception:
                if k == 0:
                    raise
                equal[k] = False
        expected = equal.pop(0)
        if expected and sum(equal.values()) > COLLISIONS:
            raise self.link.fail("opaque", "an object of the answer is equal to others than the expected one too")
        return expected is (name == "eq")

    def is_same(self, left: Any, right: Any) -> bool:
        if not find_remotes([left, right]):
            return left is right
        if left is None or right is None or type(left) is bool or type(right) is bool:
            return False
        return self.ask("is_", left, right) is True

    def contains(self, container: Any, item: Any) -> bool:
        known, data = self.comparable(container)
        known_item, item_data = self.comparable(item)
        if known and known_item:
            return item_data in data
        if type(container) is not Remote and not isinstance(container, dict):
            return any(one is item or self.is_equal(one, item) for one in container)
        if find_remotes(item):
            return self.ask("contains", container, item) is True
        if self.uses_objects:
            return self.orders.contains(self, container, item)
        if type(container) is Remote and container._exact:
            return any(self.is_equal(one, item) for one in self.iterate(container))
        raise self.refuse(container)

    def is_equal(self, left: Any, right: Any) -> bool:
        if type(left) is Remote and type(right) is Remote and self.is_same(left, right):
            return True
        return bool(self.compare("eq", left, right))

    def shift(self, value: Any, k: int) -> Any:
        return shift_all(value, k)

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
            items = list(zip(*map(self.iterate, rest), strict=False))
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

    def search(self, owner: Any, name: str, item: Any) -> Any:
        places = [place for place, one in enumerate(owner) if self.is_equal(one, item)]
        if name == "count":
            return len(places)
        if not places:
            raise ValueError("the item is not there")
        if name == "remove":
            del owner[places[0]]
            return None
        return places[0]

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
            return function(bool(one) for one in self.iterate(args[0]))
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

        def called(*args: Any, **words: Any) -> Any:
            return self.call(function, args, words)

        called.__module__ = TEST
        return called

    def operate(
        self, name: str, args: tuple[Any, ...], other: Callable[[int], Any] | None, side: str
    ) -> Any:
        """A function of the module `operator` on objects of the answer: what its operator does in the test's text."""
        if name in (*COMPARISONS, "is_", "is_not"):
            return self.compare(name, *args, other, side)
        if name in ("not_", "truth"):
            return bool(args[0]) is (name == "truth")
        if name == "contains":
            return self.contains(*args)
        if name in ("countOf", "indexOf"):
            return self.search(list(self.iterate(args[0])), name.removesuffix("Of"), args[1])
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
        """Whether it is a function that runs here, with its assertions."""
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
        others = cache(lambda k: list(self.iterate(other(k)))) if other else None
        for place, items in enumerate(zip(*(self.iterate(one) for one in iterables), strict=False)):
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

    def iterate(self, value: Any) -> Any:
        return value

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
            ended, one = self.iterate(self.ask("anext", items))
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


async def ready(value: Any) -> Any:
    return value


def has_data(values: list[Any]) -> bool:
    """Whether plain data stands among the arguments, which the answer would learn."""
    plain = (int, float, str, bytes, complex, list, tuple, dict, set)
    return any(isinstance(one, plain) and not isinstance(one, bool) and not find_remotes(one) for one in values)
