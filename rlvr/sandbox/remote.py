"""Requests to the answer's process during a test run, and the references to its objects (`Remote`).

What comes back is data that the answer chose. `rlvr.sandbox.operations` decides what may be asked; here is how values
travel. Plain immutable data arrives as itself. Anything else arrives as a `Remote`, with a snapshot of its data where
it has any, which is read again once anything else was asked. An exception of the answer is raised here as one that a
test can catch by the classes it names: builtin and library classes as themselves, its own as a mirror with the same
bases, one for each class object (`exception_class`).
Standard library only.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import inspect
import re
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import WeakValueDictionary

from rlvr.sandbox.argument_changes import has_containers, update
from rlvr.sandbox.channel import NO_FRAME, Channel, ExchangeEnd
from rlvr.sandbox.codec import MODULES, PLAIN_TYPES, CodecError, Decoder, Encoder, ValueTooLarge, is_iterator

CALLBACKS, HANDLES = 1_000, 10_000
ENDS = (StopIteration, StopAsyncIteration)
OF_ANSWER = "_of_answer"
TEST = "test"  # the module name of what a test defines
EXCEPTIONS = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
EXCEPTIONS = {name: kind for name, kind in EXCEPTIONS.items() if issubclass(kind, BaseException)}
CONTAINERS = (list, tuple, set, frozenset, dict, deque, Counter, OrderedDict, defaultdict)
REDUCED = ("attrgetter", "itemgetter", "methodcaller", "partial")
CACHED = "_lru_cache_wrapper"  # the type of a function that `functools.lru_cache` has wrapped
NOT_SENT = "an argument cannot be sent to the answer"


class BadTest(Exception):
    """A test that is wrong whatever the answer is."""


class NeedsObjects(Exception):
    """A value of the answer is no plain data, so the test has to run with references."""


class Link:
    """Requests of one test run, with the objects that were sent and received.

    `modules`: those that the answer may give for a name of the test that only the answer binds. `plain`: values are
    expected to be plain data, and `NeedsObjects` is raised for another.
    """

    def __init__(self, channel: Channel, modules: Collection[str] = (), plain: bool = False) -> None:
        self.channel, self.plain = channel, plain
        self.callbacks: list[Any] = []
        self.builtins: dict[str, Any] = dict(PLAIN_TYPES)  # builtins that the test passed, and plain types
        self.remotes = WeakValueDictionary[Any, Remote]()
        self.released: list[int] = []  # handles that the test has no reference to any more
        self.classes: dict[Any, type] = {}  # mirrors of the answer's exception classes, by their handle
        self.failed: ExchangeEnd | None = None  # the current test is over, the channel is not
        self.modules, self.expected = modules, set[str]()  # modules that a reply may be, and those that the test passed
        self.requests = self.changes = 0  # all, and those that may change an object
        self.in_coroutine = False
        self.lengths = set[tuple[Any, ...]]()  # of objects that gave their length
        self.raised: list[BaseException] = []  # exceptions of the test that the answer got
        self.sentinels: list[object] = []  # plain objects of the test that the answer got

    def clear(self) -> None:
        for held in (
            self.released,
            self.remotes,
            self.callbacks,
            self.builtins,
            self.classes,
            self.raised,
            self.sentinels,
        ):
            held.clear()

    def fail(self, reason: str, detail: str) -> ExchangeEnd:
        self.failed = ExchangeEnd(reason, detail[:200])
        return ExchangeEnd(reason, detail[:200])

    # Requests

    def ask(self, request: list[Any], given: list[Any] | None = None) -> Any:
        """Send a request and return its value; `given` are the arguments that the answer may have changed."""
        self.requests += 1
        self.changes += request[:2] != ["op", "data"]
        in_coroutine = "asyncio" in sys.modules and sys.modules["asyncio"]._get_running_loop() is not None
        if in_coroutine != self.in_coroutine:
            self.channel.write(["loop", in_coroutine])
            self.in_coroutine = in_coroutine
        if self.released:
            released, self.released = self.released, []
            self.channel.write(["drop", released])
        self.channel.write(request)
        while (reply := self.channel.read())[0] == "cb":
            self.answer_callback(reply)
        if given is not None and len(reply) > 2 and type(reply[-1]) is list and len(reply[-1]) == len(given):
            changed = [self.decode(part) for part in reply[-1]]
            pairs = dict[int, Any]()
            for old, new in zip(given, changed, strict=True):
                update(old, new, pairs)
        return self.value(reply, ends=request[:2] in (["op", "next"], ["op", "anext"]))

    def op(self, name: str, *args: Any) -> Any:
        given = list(args)
        return self.ask(["op", name, self.encode(given)], given if has_containers(given) else None)

    def call(self, function: Any, args: Collection[Any], words: dict[str, Any]) -> Any:
        given = [list(args), words]
        return self.ask(["call", self.encode(function), *map(self.encode, given)], given)

    def call_method(self, owner: Any, name: str, args: Collection[Any], words: dict[str, Any]) -> Any:
        given = [list(args), words]
        if name in ("__next__", "send", "throw"):
            return self.op("next", owner, name, *args)
        return self.ask(["method", self.encode(owner), name, *map(self.encode, given)], given)

    def to_number(self, value: Any) -> Any:
        """The float of an object of the answer, by its own `__float__` or `__index__`; other values stay."""
        return (
            self.call_library("math:ldexp", [value, 0], {})
            if type(value) is Remote and not self.data(value)[0]
            else value
        )

    def call_library(self, path: str, args: Collection[Any], words: dict[str, Any]) -> Any:
        if path in ("builtins:next", "builtins:anext"):
            return self.op(path.split(":")[1], *args)
        given = [list(args), words]
        return self.ask(["library", path, *map(self.encode, given)], given)

    def refer(self, name: str) -> Any:
        """The value that the answer has bound to a name, as a reference until it is used."""
        return self.decode_opaque(["n", name])

    def data(self, remote: Remote) -> tuple[bool, Any]:
        """Whether an object can be read as data, and the data."""
        if remote._requests != self.requests:
            reply = self.op("data", remote)
            if type(reply) is Remote and reply is not remote:
                remote._exact, remote._snapshot = reply._exact, reply._snapshot
            elif reply is not remote:
                remote._exact, remote._snapshot = 1, [reply]
            remote._requests = self.requests
        if not remote._exact or remote._snapshot is None:
            return False, None
        if type(remote._snapshot) is tuple:
            remote._snapshot = [self.decode(remote._snapshot[0])]
        return True, remote._snapshot[0]

    def get(self, name: str) -> Any:
        """The value of a name that may be a module."""
        self.requests += 1
        self.channel.write(["get", name])
        return self.module(self.channel.read(), {name} if name in MODULES else self.modules)

    # Replies

    def module(self, reply: list[Any], names: Collection[str]) -> Any:
        """A reply's value, which may also be one of these modules (as imported here)."""
        data = reply[1] if reply[0] == "v" and len(reply) > 1 else None
        if type(data) is list and len(data) == 2 and data[0] == "m" and type(data[1]) is str:
            if data[1] not in names:
                raise self.fail("wrong_name", f"the module {data[1][:80]!r} is not what the test asks for")
            return importlib.import_module(data[1])
        return self.value(reply)

    def value(self, reply: list[Any], ends: bool = False) -> Any:
        """The value in a reply; raises the exception in it. `ends`: it may be a StopIteration."""
        kind = reply[0]
        if kind == "v" and len(reply) > 1:
            return self.decode(reply[1])
        if kind == "n" and len(reply) > 1:
            raise self.fail("wrong_name", f"{str(reply[1])[:80]!r} is not defined")
        if kind == "x" and len(reply) > 1:
            error = self.exception(reply[1])
            if isinstance(error, ENDS) and not ends:  # else `f` could end `all(map(f, cases))` early
                mirrored = RuntimeError(str(error)) if self.plain else error
                if mirrored is not error:
                    setattr(mirrored, OF_ANSWER, type(error).__name__)
                error = mirrored
            raise error
        if kind == "large" and len(reply) > 1:
            raise self.fail("output", str(reply[1]))
        raise self.fail(
            "opaque", str(reply[1]) if kind == "u" and len(reply) > 1 else "the answer's process sent an invalid reply"
        )

    def exception(self, data: Any, depth: int = 0) -> BaseException:
        """The exception here for one of the answer: [classes, message, arguments, handle, inner, place].

        `inner`: exceptions of a group; `place`: in `raised`, if the test raised it.
        """
        if type(data) is not list or len(data) != 6 or type(data[0]) is not list or not data[0] or depth > 5:
            return self.fail("opaque", NO_FRAME)
        classes, message, args, handle, inner, place = data
        if type(place) is int and 0 <= place < len(self.raised):
            return self.raised[place]
        message = str(message)[:200]
        name = str(classes[0][-1])[:100] if type(classes[0]) is list and classes[0] else "Exception"
        kind = self.mirror_class(classes)
        if kind is MemoryError and (self.plain or args in (None, ["t"])):
            return self.fail("memory", message)
        if kind is not None and any(one.__module__.startswith("unittest") for one in kind.__mro__):
            return self.fail("exception", f"{name}: {message}")  # a runner would skip the test, and so pass it
        if kind is None or (
            not issubclass(kind, Exception) and not issubclass(kind, BaseExceptionGroup) and self.plain
        ):
            return self.fail("exited", f"{name}: {message}")
        failed = self.failed
        try:
            given = self.decode(args) if type(args) is list else (message,)
        except ExchangeEnd:
            self.failed = failed
            given = (message,)
        error: Any = None
        if issubclass(kind, BaseExceptionGroup) and type(inner) is list and inner:
            nested = [self.exception(one, depth + 1) for one in inner[:100]]
            error = kind(message, nested)  # type: ignore[arg-type]
        if error is None:
            try:
                error = kind(*given) if kind.__module__ == "builtins" else _bare(kind, given)
            except Exception:
                error = _bare(kind, (message,)) or Exception(message)
        try:
            error._remote = self.decode(handle) if type(handle) is list else None
            setattr(error, OF_ANSWER, name)
        except (AttributeError, ExchangeEnd):
            self.failed = failed
        return error

    def mirror_class(self, classes: list[Any]) -> Any:
        """The class here for a class of the answer, given with its bases in the order of resolution."""
        first, rest = classes[0], classes[1:51]
        if type(first) is not list or not first:
            return None
        if first[0] == "builtin" and first[1] in EXCEPTIONS:
            return EXCEPTIONS[first[1]]
        if first[0] == "lib":
            found = _library_class(str(first[1]), str(first[2]))
            if found is not None:
                return found
        if not rest:
            return None
        key = first[1] if first[0] == "h" and type(first[1]) is int else None
        if key is not None and key in self.classes:
            return self.classes[key]
        bases: list[type] = []
        for place in range(len(rest)):
            base = self.mirror_class(rest[place:])
            if base is not None and not any(issubclass(one, base) for one in bases):
                bases.append(base)
        try:
            made = type(str(first[-1])[:100].replace("\0", ""), tuple(bases), {"__module__": "answer"})
        except TypeError:
            made = type(str(first[-1])[:100], tuple(bases[:1]), {"__module__": "answer"})
        if key is not None:
            self.classes[key] = made
        return made

    def exception_class(self, remote: Remote) -> Any:
        """What `except` catches for a class of the answer."""
        key = remote._target
        self.requests += 1
        self.channel.write(["classes", key])
        reply = self.channel.read()
        if reply[0] == "m" and type(reply[1]) is list and all(type(one) is list for one in reply[1]):
            found = [self.mirror_class(one) for one in reply[1] if one]
            if all(isinstance(one, type) for one in found):
                return tuple(found)
        if reply[0] == "n":
            raise self.fail("wrong_name", f"{str(reply[1])[:80]!r} is not defined")
        raise TypeError("catching classes that do not inherit from BaseException is not allowed")

    def mirror(self, remote: Remote) -> BaseException:
        """The exception here for an exception object, or class, of the answer, to be raised by the test."""
        self.requests += 1
        self.channel.write(["raise", remote._target])
        while (reply := self.channel.read())[0] == "cb":
            self.answer_callback(reply)
        if reply[0] == "x" and len(reply) > 1:
            return self.exception(reply[1])
        raise self.fail("opaque", NO_FRAME)

    # Values

    def decode(self, data: Any) -> Any:
        try:
            return Decoder(self.decode_opaque).decode(data)
        except (CodecError, RecursionError) as error:
            raise self.fail("output" if isinstance(error, ValueTooLarge) else "opaque", str(error)) from None

    def decode_opaque(self, data: list[Any]) -> Any:
        """What a reference stands for: an object of the answer, a callback of the test, a builtin, a module.

        `["h", key, type name, exactness, [data]]`: exactness is 0 without data, 1 for data of a builtin type, 2 for
        that of a subclass, 3 for that of a subclass with an `==` of its own.
        """
        kind, key, *rest = data
        if kind in ("h", "n") and type(key) is (int if kind == "h" else str):
            if self.plain:
                raise NeedsObjects
            remote = self.remotes.get(key)
            if remote is None:
                if len(self.remotes) >= HANDLES:
                    raise CodecError("too many objects of the answer are sent as references")
                remote = self.remotes[key] = Remote(self, [kind, key], str(rest[0])[:80] if rest else "object")
            if key in self.released:
                self.released.remove(key)
            if len(rest) == 3 and rest[1] in (0, 1, 2, 3) and type(rest[2]) is list:
                remote._exact, remote._requests = rest[1], self.requests
                remote._snapshot = (rest[2][0],) if rest[2] else None
            return remote
        if kind == "cb" and type(key) is int and 0 <= key < len(self.callbacks):
            return self.callbacks[key]
        for tag, held in (("exc", self.raised), ("object", self.sentinels)):
            if kind == tag and type(key) is int and 0 <= key < len(held):
                return held[key]
        if kind == "random":
            made = importlib.import_module("random").Random()
            made.setstate(self.decode(key))
            return made
        if kind == "builtin" and type(key) is str and (key in self.builtins or key in EXCEPTIONS):
            return self.builtins[key] if key in self.builtins else EXCEPTIONS[key]
        if kind == "m" and type(key) is str and key in self.expected:
            return importlib.import_module(key)
        raise CodecError("not an encoded value")

    def encode(self, value: Any) -> Any:
        try:
            return Encoder(self.encode_opaque, draws=False, subclass=self.encode_subclass).encode(value)
        except CodecError as error:
            raise self.fail("opaque", f"{NOT_SENT}: {error}") from None

    def encode_subclass(self, value: Any) -> list[Any] | None:
        """A named tuple or a defaultdict as itself; None for others, which travel as their base."""
        fields = getattr(type(value), "_fields", None)
        if isinstance(value, tuple) and type(fields) is tuple:
            return ["N", type(value).__name__, list(fields), [self.encode(item) for item in value]]
        if type(value) is defaultdict:
            return ["DD", self.encode(value.default_factory), self.encode(dict(value))]
        return None

    def encode_opaque(self, value: Any) -> list[Any]:
        if type(value) is Remote:
            return value._target
        if isinstance(value, BaseException) and type(getattr(value, "_remote", None)) is Remote:
            return value._remote._target  # type: ignore[attr-defined]
        kind = type(value)
        if isinstance(value, BaseException):
            return ["exc", place_of(value, self.raised), *describe_exception(value)]
        if kind is object:
            return ["object", place_of(value, self.sentinels)]
        if kind.__module__ in ("operator", "functools") and kind.__name__ in REDUCED:
            made, args = value.__reduce__()[:2]
            if kind.__name__ == "partial":
                args, words = (value.func, *value.args), value.keywords
            else:  # a `methodcaller` with keyword arguments is reduced to a partial function
                args, words = (*getattr(made, "args", ()), *args), getattr(made, "keywords", {})
            path = f"{kind.__module__}:{kind.__name__}"
            return ["make", path, [self.encode(one) for one in args], self.encode(words)]
        if kind is re.Pattern:
            return ["make", "re:compile", [self.encode(value.pattern), value.flags], self.encode({})]
        if kind is re.Match and (found := find_again(value)):
            return ["match", self.encode(value.re), *found]
        if is_iterator(value):
            return ["iter", place_of(value, self.callbacks)]
        if kind.__name__ == "Random" and kind.__module__ == "random":
            return ["random", self.encode(value.getstate())]
        if isinstance(value, (type, BuiltinFunctionType)) and getattr(builtins, value.__name__, None) is value:
            self.builtins[value.__name__] = value
            return ["builtin", value.__name__]
        if type(value) is MethodDescriptorType:  # str.strip, say
            owner = value.__objclass__
            if getattr(builtins, owner.__name__, None) is owner and vars(owner).get(value.__name__) is value:
                return ["builtin", f"{owner.__name__}.{value.__name__}"]
        if isinstance(value, ModuleType):
            self.expected.add(value.__name__)
            return ["m", value.__name__]
        if getattr(value, "__module__", TEST) != TEST and (path := library_path(value)):
            return ["lib", path]
        if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, type)) or kind.__name__ == CACHED:
            key = next((key for key, one in enumerate(self.callbacks) if one == value), len(self.callbacks))
            self.callbacks[key:] = self.callbacks[key:] or [value]
            if key < CALLBACKS:
                return ["cb", key, *describe_function(value)]
        if type(value).__module__ == TEST and not self.channel.has_sent:
            raise BadTest(f"an object of the test's own class {type(value).__name__} cannot be given to an answer")
        raise self.fail("opaque", f"an argument of type {type(value).__name__} cannot be sent to the answer")

    def answer_callback(self, reply: list[Any]) -> None:
        if len(reply) != 4 or type(reply[1]) is not int or not 0 <= reply[1] < len(self.callbacks):
            raise self.channel.end("opaque", NO_FRAME)
        function, args, kwargs = self.callbacks[reply[1]], self.decode(reply[2]), self.decode(reply[3])
        if type(args) is not tuple or type(kwargs) is not dict or any(type(name) is not str for name in kwargs):
            raise self.channel.end("opaque", NO_FRAME)
        try:
            made = draw(function, *args) if is_iterator(function) else function(*args, **kwargs)
            result = ["v", self.encode(made)]
        except Exception as error:
            if isinstance(error, AssertionError):
                self.fail("assertion", str(error))  # even if the answer catches it
            result = ["x", self.encode_opaque(error)]
        self.channel.write(["ret", result])


class Names(dict):
    """Builtins for a test's text, then the names of the answer: plain data as data, all else as a reference."""

    def __init__(self, link: Link) -> None:
        super().__init__(__import__=__import__, __build_class__=builtins.__build_class__)
        self.link = link

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):  # one at a time: copying all would touch all their pages in a new fork
            self[name] = getattr(builtins, name)
            return self[name]
        value = self.link.get(name)
        if name in MODULES and type(value) is not ModuleType:
            raise self.link.fail("wrong_name", f"{name} is not the module of that name")
        return value


class Remote:
    """A reference to an object of the answer's process. What Python asks of it (truth, items) is asked there."""

    __slots__ = ("__weakref__", "_exact", "_is_key", "_kind", "_link", "_requests", "_snapshot", "_target")

    def __init__(self, link: Link, target: list[Any], kind: str) -> None:
        self._link, self._target, self._kind = link, target, kind
        self._exact, self._snapshot, self._requests, self._is_key = 0, None, -1, False
        self._snapshot: Any

    def __del__(self) -> None:
        if self._target[0] == "h":
            self._link.released.append(self._target[1])

    def __bool__(self) -> bool:
        known, data = self._link.data(self)
        if known and self._exact == 1:
            return bool(data)
        return self._link.op("bool", self) is True

    def __iter__(self) -> Iterator[Any]:
        known, data = self._link.data(self)
        if known and self._exact == 1 and type(data) in (list, tuple, dict, set, frozenset, str, bytes, range):
            yield from data
            return
        link = self._link
        length = link.call_library("builtins:len", [self], {}) if tuple(self._target) in link.lengths else None
        items = link.op("iter", self)
        count = 0
        while True:
            ended, item = link.op("step", items)
            if ended is True:
                break
            count += 1
            yield item
        if length is not None and count != length:  # an empty object must not pass `len(r) == 2` and a loop
            raise link.fail("opaque", f"an object of the answer gave a length of {length}, and {count} items")

    def __len__(self) -> int:
        return self._link.call_library("builtins:len", [self], {})

    def __getitem__(self, index: Any) -> Any:
        return self._link.op("getitem", self, index)

    def __index__(self) -> int:
        return self._link.call_library("operator:index", [self], {})

    def __str__(self) -> str:
        return self._text("builtins:str")

    def __repr__(self) -> str:
        return self._text("builtins:repr")

    def __format__(self, spec: str) -> str:
        return self._link.call_library("builtins:format", [self, spec], {})

    def _text(self, path: str) -> str:
        failed = self._link.failed
        try:
            return str(self._link.call_library(path, [self], {}))
        except ExchangeEnd:  # a message about a failure must not be another one
            self._link.failed = failed or self._link.failed
            return f"<{self._kind}>"

    def __eq__(self, other: object) -> bool:
        """Only for a key that was found by its hash: elsewhere `Operations.compare` asks about other values too."""
        if type(other) is not Remote or not (self._is_key and other._is_key):
            raise self._link.fail("opaque", f"a {self._kind} of the answer is used where the checker needs plain data")
        return self._link.op("eq", self, other) is True

    def __hash__(self) -> int:
        """As a key of a library's object of the test, which holds nothing expected: a `functools.cache`, say."""
        value = self._link.call_library("builtins:hash", [self], {})
        if type(value) is not int:
            raise self._link.fail("opaque", "an object of the answer cannot be a key here")
        self._is_key = True
        return hash(value)


def find_remotes(value: Any, depth: int = 4) -> list[Remote]:
    """The references in a value, and in the containers that it holds."""
    kind: Any = type(value)
    if kind is Remote:
        return [value]
    if issubclass(kind, BaseException):
        remote = getattr(value, "_remote", None)
        return [remote] if type(remote) is Remote else []
    if depth and kind in CONTAINERS:
        items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return [one for item in items for one in find_remotes(item, depth - 1)]
    if kind is slice:
        return find_remotes((value.start, value.stop, value.step), 1)
    return []


def library_path(function: Any) -> str:
    """`module:qualified.name` of a function or class of the standard library; empty if it is not reached by one."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    owner = getattr(function, "__self__", None)
    if isinstance(owner, ModuleType):
        module = owner.__name__
    elif isinstance(owner, type):
        module = owner.__module__
    if (
        isinstance(function, type)
        and function.__module__ == "builtins"
        and getattr(builtins, name, None) is not function
    ):
        return next((f"types:{key}" for key, one in vars(types).items() if one is function), "")
    for place in (
        module,
        {"_heapq": "heapq", "_bisect": "bisect", "_io": "io", "_thread": "threading"}.get(str(module)),
    ):
        if not place or place == TEST:
            continue
        try:
            found = importlib.import_module(place)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError, ValueError):
            continue
        if found is function or found == function:
            return f"{place}:{name}"
    return ""


def place_of(value: Any, held: list[Any]) -> int:
    """The place of an object in a list, to which it is added if it is not there."""
    place = next((place for place, one in enumerate(held) if one is value), len(held))
    held[place:] = held[place:] or [value]
    return place


def draw(items: Any, given: Any) -> tuple[bool, Any]:
    """Whether an iterator of the test has ended, and its next item; `given` is sent to a generator."""
    try:
        return False, next(items) if given is None else items.send(given)
    except StopIteration as end:
        return True, end.value


def find_again(match: re.Match[Any]) -> list[Any] | None:
    """How to find a match again: the pattern's method, the text, where to begin and to end; None if none finds it."""
    text, start, end = match.string, match.start(), match.endpos
    if type(text) not in (str, bytes):
        return None
    for name, *place in (("search", match.pos, end), ("match", start, end), ("fullmatch", start, match.end())):
        found = getattr(match.re, name)(text, *place)
        if found and found.regs == match.regs:
            return [name, text, *place]
    return None


def describe_exception(error: BaseException) -> list[Any]:
    """An exception of a test, for its stand-in beside the answer: its library base, name, text, arguments, fields."""
    classes = type(error).__mro__
    base = next(one for one in classes if one.__module__.split(".")[0] in sys.stdlib_module_names)
    attributes: dict[str, Any] = {}
    for holder in [*reversed(classes[: classes.index(base)]), error]:
        for name, value in vars(holder).items():
            with contextlib.suppress(CodecError):
                if not name.startswith("__"):
                    attributes[name] = Encoder(draws=False).encode(value)
    try:
        args = Encoder(draws=False).encode(error.args)
    except CodecError:
        args = ["t", str(error)[:200]]
    return [base.__module__, base.__qualname__, type(error).__name__, str(error)[:200], args, attributes]


def describe_function(function: Any) -> list[Any]:
    """The name, the documentation and the parameters of a test's function, for its stand-in beside the answer."""
    try:
        found = inspect.signature(function)
        named = [one.replace(annotation=name_annotation(one.annotation)) for one in found.parameters.values()]
        signature = str(found.replace(parameters=named))
    except (TypeError, ValueError):
        signature = ""
    return [
        str(getattr(function, "__name__", "")),
        function.__doc__ if type(function.__doc__) is str else None,
        signature,
    ]


def name_annotation(annotation: Any) -> Any:
    """An annotation that is written as the name that the answer has for it."""
    is_name = type(annotation) is Remote and annotation._target[0] == "n"
    return type(annotation._target[1], (), {"__module__": "builtins"}) if is_name else annotation


def _library_class(module: str, name: str) -> Any:
    """An exception class of the standard library; None if there is none at that place.

    Only of modules that the test has imported: the answer chooses the name, and some modules run a program on import.
    """
    found: Any = sys.modules.get(module) if module.split(".")[0] in sys.stdlib_module_names else None
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _bare(kind: type, args: Any) -> Any:
    """An exception made without its constructor; None if that fails."""
    try:
        error = BaseException.__new__(kind)
        error.args = tuple(args)
        return error
    except Exception:
        return None
