"""Stand-ins for an answer's functions, classes and objects while a test runs: every use of one is a call over.

What comes back is data that the answer chose, so an answer gains nothing by lying about `len`, `bool` or an attribute:
it could have returned the wrong value as well. What it must not choose is a comparison's result. Therefore:
- an object that tells a length gives as many items;
- an object of the answer's compared with plain data ends the test (`opaque`): its `__eq__` could say anything;
- two of its objects are equal if its own `==` says so and what they are made of, read as data, is equal here;
- the order of two of its objects is its own word: such a test holds nothing that the answer could be held to;
- plain operands go over for `+`, `*`, `@` and `**` only. `f(1) - 3` would tell it what it has to be.
Standard library only. `python -m pytest tests/test_sandbox_checker.py` exercises it.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Collection, Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any, NoReturn

from rlvr.sandbox.codec import MODULES, PLAIN_TYPES, Decoder, Encoder, Unfit
from rlvr.sandbox.line import Ended, Line

CALLBACKS, HANDLES = 1_000, 10_000
ENDS = (StopIteration, StopAsyncIteration)
OF_ANSWER = "_of_answer"
TEST = "test"  # the module name of what a test defines
EXCEPTIONS = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
EXCEPTIONS = {name: kind for name, kind in EXCEPTIONS.items() if issubclass(kind, BaseException)}


class BadTest(Exception):
    """A test that is wrong whatever the answer is."""


class Link:
    """Requests of one test run, with the objects that went over.

    Of `modules` the answer may say that a name of the test's, which only it has bound, is one.
    """

    def __init__(self, line: Line, caught: dict[str, type], modules: Collection[str] = ()) -> None:
        self.line, self.caught = line, caught
        self.callbacks: list[Any] = []
        self.given: dict[str, Any] = dict(PLAIN_TYPES)  # builtins that the test passed, beside plain types
        self.remotes: dict[Any, Remote] = {}
        self.sized = set[tuple[Any, ...]]()  # objects that have told their length
        self.failed: Ended | None = None  # the test at hand is over, the line is not
        self.modules, self.expected = modules, set[str]()  # modules that a reply may be, or the test gave away

    def forget(self) -> None:
        self.remotes.clear()
        self.sized.clear()
        self.callbacks.clear()
        self.given.clear()

    def fail(self, reason: str, detail: str) -> Ended:
        self.failed = Ended(reason, detail[:200])
        return Ended(reason, detail[:200])

    def ask(self, request: list[Any], given: list[Any] | None = None) -> Any:
        """Send a request and see it through; `given` are the arguments that the answer may have changed."""
        self.line.write(request)
        while (reply := self.line.read())[0] == "cb":
            self.answer_callback(reply)
        if given is not None and len(reply) > 2 and type(reply[-1]) is list and len(reply[-1]) == len(given):
            for old, new in zip(given, [self.decode(part) for part in reply[-1]], strict=True):
                update(old, new)
        return self.value(reply, ends=request[:2] == ["op", "next"])

    def get(self, name: str) -> Any:
        """What the answer has bound a name to."""
        self.line.write(["get", name])
        return self.module(self.line.read(), {name} if name in MODULES else self.modules)

    def module(self, reply: list[Any], names: Collection[str]) -> Any:
        """A value that may also be one of these modules: our own copy of it."""
        data = reply[1] if reply[0] == "v" and len(reply) > 1 else None
        if type(data) is list and len(data) == 2 and data[0] == "m" and type(data[1]) is str:
            if data[1] not in names:
                raise self.fail("wrong_name", f"the module {data[1][:80]!r} is not what the test asks for")
            return importlib.import_module(data[1])
        return self.value(reply)

    def value(self, reply: list[Any], ends: bool = False) -> Any:
        kind = reply[0]
        if kind == "v" and len(reply) > 1:
            return self.decode(reply[1])
        if kind == "n" and len(reply) > 1:
            raise self.fail("wrong_name", f"{str(reply[1])[:80]!r} is not defined")
        if kind == "x" and len(reply) > 4 and type(reply[1]) is list and reply[1]:
            raise self.exception([str(name)[:100] for name in reply[1][:50]], ends, *reply[2:5])
        raise self.fail("opaque", str(reply[1]) if kind == "u" and len(reply) > 1 else "what came back is no result")

    def exception(self, names: list[str], ends: bool, message: Any, args: Any, attributes: Any) -> BaseException:
        """The answer's exception as one of the same builtin base, that a test can catch by the names it uses.

        But only `next` may end an iteration: else `all(map(f, cases))` would end, and hold, where `f` says so.
        """
        base = next((EXCEPTIONS[name] for name in names if name in EXCEPTIONS), Exception)
        message = str(message)[:200]
        if issubclass(base, ENDS) and not ends:
            base = RuntimeError
        if not issubclass(base, Exception):
            return self.fail("exited", f"{names[0]}: {message}")
        if base is MemoryError:
            return self.fail("memory", message)
        parents = [self.caught[name] for name in names if name in self.caught]
        try:
            kind = type(names[0], (*parents, base), {}) if parents or names[0] != base.__name__ else base
        except (TypeError, ValueError):
            kind = base
        given = self.decode(args) if type(args) is list else (message,)
        try:
            error = kind(*given)
        except Exception:
            error = next((one for one in (_bare(kind, message), _bare(base, message)) if one), Exception(message))
        known = self.decode(attributes) if type(attributes) is list else {}
        for name, value in known.items() if type(known) is dict else ():
            if type(name) is str and not name.startswith("_") and not hasattr(error, name):
                setattr(error, name, value)
        setattr(error, OF_ANSWER, names[0])
        return error

    def decode(self, data: Any) -> Any:
        try:
            return Decoder(self.incoming).decode(data)
        except (Unfit, RecursionError) as error:
            raise self.fail("opaque", str(error)) from None

    def incoming(self, data: list[Any]) -> Any:
        kind, key, *rest = data
        if kind in ("h", "n") and type(key) is (int if kind == "h" else str):
            if key not in self.remotes:
                if len(self.remotes) >= HANDLES:
                    raise Unfit("too many opaque values")
                self.remotes[key] = Remote(self, [kind, key], str(rest[0])[:80] if rest else "object")
            return self.remotes[key]
        if kind == "cb" and type(key) is int and 0 <= key < len(self.callbacks):
            return self.callbacks[key]
        if kind == "builtin" and type(key) is str and (key in self.given or key in EXCEPTIONS):
            return self.given[key] if key in self.given else EXCEPTIONS[key]
        if kind == "m" and type(key) is str and key in self.expected:
            return importlib.import_module(key)
        raise Unfit("not an encoded value")

    def encode(self, value: Any) -> Any:
        try:
            return Encoder(self.outgoing).encode(value)
        except Unfit as error:
            raise self.fail("opaque", f"an argument cannot travel: {error}") from None

    def outgoing(self, value: Any) -> list[Any]:
        if type(value) is Remote:
            return object.__getattribute__(value, "_target")
        if isinstance(value, (type, BuiltinFunctionType)) and getattr(builtins, value.__name__, None) is value:
            self.given[value.__name__] = value
            return ["builtin", value.__name__]
        if type(value) is MethodDescriptorType:  # str.strip, say
            owner = value.__objclass__
            if getattr(builtins, owner.__name__, None) is owner and vars(owner).get(value.__name__) is value:
                return ["builtin", f"{owner.__name__}.{value.__name__}"]
        if isinstance(value, ModuleType) and value.__name__ in MODULES:
            self.expected.add(value.__name__)
            return ["m", value.__name__]
        if isinstance(value, (FunctionType, MethodType, BuiltinFunctionType, type)):
            key = next((key for key, one in enumerate(self.callbacks) if one == value), len(self.callbacks))
            self.callbacks[key:] = self.callbacks[key:] or [value]
            if key < CALLBACKS:
                return ["cb", key]
        if type(value).__module__ == TEST and not self.line.asked:
            raise BadTest(f"an object of the test's own class {type(value).__name__} cannot be given to an answer")
        raise self.fail("opaque", f"an argument of type {type(value).__name__} cannot travel")

    def answer_callback(self, reply: list[Any]) -> None:
        if len(reply) != 4 or type(reply[1]) is not int or not 0 <= reply[1] < len(self.callbacks):
            raise self.line.end("opaque", "what came back is no frame")
        function, args, kwargs = self.callbacks[reply[1]], self.decode(reply[2]), self.decode(reply[3])
        if type(args) is not tuple or type(kwargs) is not dict or any(type(name) is not str for name in kwargs):
            raise self.line.end("opaque", "what came back is no frame")
        try:
            result = ["v", self.encode(function(*args, **kwargs))]
        except Exception as error:
            if isinstance(error, AssertionError):
                self.fail("assertion", str(error))  # also where the answer catches it
            result = ["x", [getattr(error, OF_ANSWER, None) or type(error).__name__, str(error)[:200]]]
        self.line.write(["ret", result])

    def counted(self, items: Iterator[Any], told: int) -> Iterator[Any]:
        """As many as the object has told: else `len(r) == 2` and a loop over `zip(r, wanted)` hold of an empty one."""
        count = 0
        for item in items:
            count += 1
            yield item
        if count != told:
            raise self.fail("opaque", f"an object of the answer told a length of {told}, and gave {count}")

    def op(self, name: str, target: list[Any], *args: Any) -> Any:
        return self.ask(["op", name, target, self.encode(list(args))])


class Names(dict):
    """Builtins for a test's text, then whatever the answer defines: plain data as data, all else as a stand-in."""

    def __init__(self, link: Link) -> None:
        super().__init__(__import__=__import__, __build_class__=builtins.__build_class__)  # what the interpreter takes
        self.link = link

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):  # one at a time: to copy them all would touch all their pages in a fresh fork
            self[name] = getattr(builtins, name)
            return self[name]
        value = self.link.get(name)
        if name in MODULES and type(value) is not ModuleType:
            raise self.link.fail("wrong_name", f"{name} is not the module of that name")
        return value


def _bare(kind: type, message: str) -> Any:
    """An exception without its constructor's say."""
    try:
        error = BaseException.__new__(kind)
        error.args = (message,)
        return error
    except Exception:
        return None


def update(old: Any, new: Any) -> None:
    """Make the test's own object what the answer made of it; parts that stay what they are keep their identity."""
    if type(old) is not type(new):
        return
    if type(old) is list:
        for place, (was, now) in enumerate(zip(old, new, strict=False)):
            if type(was) is type(now) and type(was) in (list, dict, set):
                update(was, now)
                new[place] = was
        old[:] = new
    elif type(old) is dict:
        for key, now in new.items():
            if type(now) in (list, dict, set) and type(old.get(key)) is type(now):
                update(old[key], now)
                new[key] = old[key]
        old.clear()
        old.update(new)
    elif type(old) in (set, bytearray):
        old.clear()
        (old.update if type(old) is set else old.extend)(new)
    elif type(old) is tuple:
        for was, now in zip(old, new, strict=False):
            update(was, now)
    elif hasattr(old, "appendleft"):
        old.clear()
        old.extend(new)


class Remote:
    """A thing of the answer's."""

    __slots__ = ("_kind", "_link", "_target")

    def __init__(self, link: Link, target: list[Any], kind: str) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_kind", kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        link, target = _parts(self)
        return link.ask(["call", target, link.encode(list(args)), link.encode(kwargs)], [list(args), kwargs])

    def __getattr__(self, name: str) -> Any:
        link, target = _parts(self)
        return link.op("getattr", target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        link, target = _parts(self)
        link.op("setattr", target, name, value)

    def __iter__(self) -> Any:
        link, target = _parts(self)
        told = link.op("len", target) if tuple(target) in link.sized else None
        items = iter(link.op("iter", target))
        return items if told is None else link.counted(items, told)

    def __len__(self) -> int:
        link, target = _parts(self)
        told = link.op("len", target)
        link.sized.add(tuple(target))
        return told

    def __contains__(self, item: Any) -> bool:
        return any(item is one or item == one for one in self)

    def __instancecheck__(self, value: Any) -> bool:
        link, _ = _parts(self)
        return type(value) is Remote and link.op("isinstance", _parts(value)[1], self) is True

    def __enter__(self) -> Any:
        return Remote.__getattr__(self, "__enter__")()

    def __exit__(self, *_: object) -> None:
        Remote.__getattr__(self, "__exit__")(None, None, None)  # what a test raises is never the answer's to swallow

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        link, target = _parts(self)
        if type(other) is not Remote:
            _refuse(self)
        if link.op("eq", target, other) is not True:
            return False
        return target == _parts(other)[1] or link.op("state", target) == link.op("state", _parts(other)[1])

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        raise _parts(self)[0].fail("opaque", "an object of the answer cannot be a key here")


def _parts(remote: Remote) -> tuple[Link, list[Any]]:
    return object.__getattribute__(remote, "_link"), object.__getattribute__(remote, "_target")


def _refuse(remote: Remote, *_: Any) -> NoReturn:
    kind = object.__getattribute__(remote, "_kind")
    raise _parts(remote)[0].fail("opaque", f"a {kind} of the answer meets plain data; only its own kind may")


def _define(name: str, plain: bool) -> None:
    def operation(self: Remote, *others: Any) -> Any:
        link, target = _parts(self)
        if not plain and any(type(other) is not Remote for other in others):
            _refuse(self)
        return link.op(name, target, *others)

    setattr(Remote, f"__{name.strip('_')}__", operation)


for _name in ("neg", "pos", "abs", "str", "repr", "bool", "int", "float", "next"):
    _define(_name, True)
for _name in ("getitem", "setitem", "delitem", "add", "mul", "matmul", "pow", "radd", "rmul", "rmatmul", "rpow"):
    _define(_name, True)
for _name in ("lt", "le", "gt", "ge", "sub", "truediv", "floordiv", "mod", "and_", "or_", "xor"):
    _define(_name, False)
for _name in ("rsub", "rtruediv", "rfloordiv", "rmod", "rand", "ror", "rxor"):
    setattr(Remote, f"__{_name}__", _refuse)
