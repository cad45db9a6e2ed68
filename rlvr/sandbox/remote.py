"""Stand-ins for an answer's functions, classes and objects while a test runs: every use of one is a call to the answer.

What comes back is data that the answer chose. It gains nothing by lying about `len`, `bool` or an attribute, because it
could as well have returned the wrong value. It must not choose the result of a comparison. Therefore:
- an object that gave a length must yield as many items;
- comparing an object of the answer with plain data ends the test (`opaque`): its `__eq__` could say anything;
- two of its objects are equal if its own `==` says so and their state, read as data, is equal here;
- the order of two of its objects is the answer's own choice: such a test checks nothing;
- plain operands are sent for `+`, `*`, `@` and `**` only: `f(1) - 3` would tell the answer the expected value.
Standard library only. `python -m pytest tests/test_sandbox_checker.py` exercises it.
"""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Collection, Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any, NoReturn

from rlvr.sandbox.channel import NO_FRAME, Channel, ExchangeEnd
from rlvr.sandbox.codec import MODULES, PLAIN_TYPES, CodecError, Decoder, Encoder, ValueTooLarge

CALLBACKS, HANDLES = 1_000, 10_000
ENDS = (StopIteration, StopAsyncIteration)
OF_ANSWER = "_of_answer"
TEST = "test"  # the module name of what a test defines
EXCEPTIONS = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
EXCEPTIONS = {name: kind for name, kind in EXCEPTIONS.items() if issubclass(kind, BaseException)}


NOT_SENT = "an argument cannot be sent to the answer"


class BadTest(Exception):
    """A test that is wrong whatever the answer is."""


class Link:
    """Requests of one test run, with the objects that were sent and received.

    `modules`: those that the answer may give for a name of the test that only the answer binds.
    """

    def __init__(self, channel: Channel, caught: dict[str, type], modules: Collection[str] = ()) -> None:
        self.channel, self.caught = channel, caught
        self.callbacks: list[Any] = []
        self.builtins: dict[str, Any] = dict(PLAIN_TYPES)  # builtins that the test passed, and plain types
        self.remotes: dict[Any, Remote] = {}
        self.sized = set[tuple[Any, ...]]()  # objects that gave their length
        self.failed: ExchangeEnd | None = None  # the current test is over, the channel is not
        self.modules, self.expected = modules, set[str]()  # modules that a reply may be, and those that the test passed

    def clear(self) -> None:
        self.remotes.clear()
        self.sized.clear()
        self.callbacks.clear()
        self.builtins.clear()

    def fail(self, reason: str, detail: str) -> ExchangeEnd:
        self.failed = ExchangeEnd(reason, detail[:200])
        return ExchangeEnd(reason, detail[:200])

    def ask(self, request: list[Any], given: list[Any] | None = None) -> Any:
        """Send a request and return its value; `given` are the arguments that the answer may have changed."""
        self.channel.write(request)
        while (reply := self.channel.read())[0] == "cb":
            self.answer_callback(reply)
        if given is not None and len(reply) > 2 and type(reply[-1]) is list and len(reply[-1]) == len(given):
            for old, new in zip(given, [self.decode(part) for part in reply[-1]], strict=True):
                update(old, new)
        return self.value(reply, ends=request[:2] == ["op", "next"])

    def get(self, name: str) -> Any:
        """The value that the answer has bound to a name."""
        self.channel.write(["get", name])
        return self.module(self.channel.read(), {name} if name in MODULES else self.modules)

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
        if kind == "x" and len(reply) > 4 and type(reply[1]) is list and reply[1]:
            _, names, message, args, attributes = reply[:5]
            raise self.exception([str(name)[:100] for name in names[:50]], ends, message, args, attributes)
        if kind == "large" and len(reply) > 1:
            raise self.fail("output", str(reply[1]))
        raise self.fail(
            "opaque", str(reply[1]) if kind == "u" and len(reply) > 1 else "the answer's process sent an invalid reply"
        )

    def exception(self, names: list[str], ends: bool, message: Any, args: Any, attributes: Any) -> BaseException:
        """The answer's exception with the same builtin base, which a test can catch by the names it uses.

        Only `next` may end an iteration. Else `f` could end `all(map(f, cases))` early, and the test would pass.
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
        values = self.decode(attributes) if type(attributes) is list else {}
        for name, value in values.items() if type(values) is dict else ():
            if type(name) is str and not name.startswith("_") and not hasattr(error, name):
                setattr(error, name, value)
        setattr(error, OF_ANSWER, names[0])
        return error

    def decode(self, data: Any) -> Any:
        try:
            return Decoder(self.decode_opaque).decode(data)
        except (CodecError, RecursionError) as error:
            raise self.fail("output" if isinstance(error, ValueTooLarge) else "opaque", str(error)) from None

    def decode_opaque(self, data: list[Any]) -> Any:
        """What a reference stands for: an object of the answer, a callback of the test, a builtin, a module."""
        kind, key, *rest = data
        if kind in ("h", "n") and type(key) is (int if kind == "h" else str):
            if key not in self.remotes:
                if len(self.remotes) >= HANDLES:
                    raise CodecError("too many opaque values")
                self.remotes[key] = Remote(self, [kind, key], str(rest[0])[:80] if rest else "object")
            return self.remotes[key]
        if kind == "cb" and type(key) is int and 0 <= key < len(self.callbacks):
            return self.callbacks[key]
        if kind == "builtin" and type(key) is str and (key in self.builtins or key in EXCEPTIONS):
            return self.builtins[key] if key in self.builtins else EXCEPTIONS[key]
        if kind == "m" and type(key) is str and key in self.expected:
            return importlib.import_module(key)
        raise CodecError("not an encoded value")

    def encode(self, value: Any) -> Any:
        try:
            return Encoder(self.encode_opaque).encode(value)
        except CodecError as error:
            raise self.fail("opaque", f"{NOT_SENT}: {error}") from None

    def encode_opaque(self, value: Any) -> list[Any]:
        if type(value) is Remote:
            return object.__getattribute__(value, "_target")
        if isinstance(value, (type, BuiltinFunctionType)) and getattr(builtins, value.__name__, None) is value:
            self.builtins[value.__name__] = value
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
            result = ["v", self.encode(function(*args, **kwargs))]
        except Exception as error:
            if isinstance(error, AssertionError):
                self.fail("assertion", str(error))  # even if the answer catches it
            result = ["x", [getattr(error, OF_ANSWER, None) or type(error).__name__, str(error)[:200]]]
        self.channel.write(["ret", result])

    def check_length(self, items: Iterator[Any], length: int) -> Iterator[Any]:
        """Yield the items and require `length` of them: an empty object must not pass `len(r) == 2` and a loop."""
        count = 0
        for item in items:
            count += 1
            yield item
        if count != length:
            raise self.fail("opaque", f"an object of the answer gave a length of {length}, and {count} items")

    def op(self, name: str, target: list[Any], *args: Any) -> Any:
        return self.ask(["op", name, target, self.encode(list(args))])


class Names(dict):
    """Builtins for a test's text, then the names of the answer: plain data as data, all else as a stand-in."""

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


def _bare(kind: type, message: str) -> Any:
    """An exception made without its constructor; None if that fails."""
    try:
        error = BaseException.__new__(kind)
        error.args = (message,)
        return error
    except Exception:
        return None


def update(old: Any, new: Any) -> None:
    """Change the test's object as the answer changed it; parts of unchanged type keep their identity."""
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
    """A stand-in for an object of the answer."""

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
        length = link.op("len", target) if tuple(target) in link.sized else None
        items = iter(link.op("iter", target))
        return items if length is None else link.check_length(items, length)

    def __len__(self) -> int:
        link, target = _parts(self)
        length = link.op("len", target)
        link.sized.add(tuple(target))
        return length

    def __contains__(self, item: Any) -> bool:
        return any(item is one or item == one for one in self)

    def __instancecheck__(self, value: Any) -> bool:
        link, _ = _parts(self)
        return type(value) is Remote and link.op("isinstance", _parts(value)[1], self) is True

    def __enter__(self) -> Any:
        return Remote.__getattr__(self, "__enter__")()

    def __exit__(self, *_: object) -> None:
        Remote.__getattr__(self, "__exit__")(None, None, None)  # the answer must not swallow what a test raises

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
    raise _parts(remote)[0].fail("opaque", f"a {kind} of the answer is used with plain data; only its own kind may be")


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
