"""Values as tagged JSON with exact types: how arguments reach an answer and its results come back.

    decode(json.loads(json.dumps(Encoder().encode((1, {2.5: float("nan")})))))

A scalar is itself; everything else is a list that begins with a tag. Nothing is pickled or evaluated. Subclasses are
read through their base's own methods and arrive as the base. Depth is capped, and so is the memory that a value would
take. A value without an encoding is opaque: a type's name and a handle. Plain types and modules of the standard library
travel by name. An iterator travels as its items, a long one as its first items and a handle on the rest. Named tuples
arrive as tuples; default dictionaries keep a factory that is a plain type. Standard library only.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

DEPTH = 100
MEMORY = 64 << 20  # bytes that one value may take, by the estimate of `_Room`
DRAWN = 10_000  # items taken from an iterator that must travel whole
CHUNK = 500  # items taken at a time from one that can be asked for more
DIGITS = 1 << 19  # hexadecimal digits of an integer
SAFE = 1 << 53
PLAIN_TYPES = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, object)
}
MODULES = frozenset(
    [
        "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
        "json", "math", "operator", "random", "re", "statistics", "string", "sys",
    ]
)  # fmt: skip

_maxlen: Callable[[Any], int | None] = deque.maxlen.__get__  # type: ignore[attr-defined]
_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
_SCALARS = (bool, type(None), str)
_ITEMS = {list: "l", tuple: "t", set: "s", frozenset: "z", deque: "q"}
_PAIRS = {dict: "d", OrderedDict: "O", Counter: "C"}
_FACTORIES = {
    kind.__name__: kind for kind in (bool, int, float, str, list, tuple, set, dict)
}  # of default dictionaries
_VIEWS = {type({}.keys()): "k", type({}.values()): "v", type({}.items()): "e"}
_SIZES = {"l": 64, "t": 56, "s": 224, "z": 224, "q": 768, "d": 240, "O": 480, "C": 320, "G": 480}  # of an empty one
_SIZE, _ITEM = 320, 48  # of another container; of an item with its place
_ITERATORS = tuple(
    {type(iter(kind)) for kind in ([], (), set(), {}, "", b"", range(0), {}.values(), {}.items(), reversed([]))}
    | {type(_ for _ in ()), map, filter, zip, enumerate, reversed}
)
CONSTANTS = {type(NotImplemented): "NotImplemented", type(...): "Ellipsis"}
_TIMES = ("datetime", "date", "time")
_BASES = (float, int, str, bytes, bytearray, complex, list, tuple, set, frozenset, deque, Counter, OrderedDict, dict)


# Values of the library that travel by what makes them, as they are compared: class -> arguments.
_MADE_BY: dict[str, Callable[[Any], list[Any]]] = {
    "pathlib:PurePosixPath": lambda value: [str(value)], "pathlib:PosixPath": lambda value: [str(value)],
    "pathlib:PureWindowsPath": lambda value: [str(value)], "uuid:UUID": lambda value: [str(value)],
    "array:array": lambda value: [value.typecode, value.tolist()],
    "datetime:timezone": lambda value: list(value.__getinitargs__()),
    "ipaddress:IPv4Address": lambda value: [str(value)], "ipaddress:IPv6Address": lambda value: [str(value)],
    "ipaddress:IPv4Network": lambda value: [str(value)], "ipaddress:IPv6Network": lambda value: [str(value)],
}  # fmt: skip


class CodecError(Exception):
    """A value is too deep or cyclic, or encoded data is not what an encoder writes."""


class ValueTooLarge(CodecError):
    """A value would take more than `MEMORY`."""


class _Room:
    """The memory that is left for a value. A part that it holds twice counts twice, since it would travel twice."""

    def __init__(self) -> None:
        self.left = MEMORY

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise ValueTooLarge(f"the value takes more than {MEMORY >> 20} MiB; test a smaller case")

    def take_container(self, tag: str, items: int) -> None:
        self.take(_SIZES.get(tag, _SIZE) + _ITEM * items)


class Encoder:
    """Encodes values as tagged JSON. `opaque` is called for a value without an encoding; its result is written.

    `draws`: iterators travel as their items; else they have no encoding. `exact` turns False once an object of a
    subclass was written as its base; `subclass` may write it in another way. `known` writes what has a handle already.
    """

    def __init__(
        self,
        opaque: Callable[[Any], list[Any]] | None = None,
        draws: bool = True,
        subclass: Callable[[Any], list[Any] | None] | None = None,
        known: Callable[[Any], list[Any] | None] | None = None,
    ) -> None:
        self.known = known
        self.opaque, self.draws, self.room, self.exact, self.subclass = opaque, draws, _Room(), True, subclass

    def encode(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind is int:
            return value if -SAFE < value < SAFE else self._big(value)
        if kind is str:
            self.room.take(len(value))
            return value
        if kind in _SCALARS:
            return value
        if kind is float:
            return value if value - value == 0 else ["f", repr(value)]
        if depth > DEPTH:
            raise CodecError(f"the value is nested more than {DEPTH} deep, or holds itself")
        if self.known is not None and (written := self.known(value)) is not None:
            return written
        base = kind
        if kind not in _ITEMS and kind not in _PAIRS:
            base = next((one for one in _mro(kind) if one in _BASES), kind)
            if kind is defaultdict and self.subclass is None:
                return self._default_dictionary(value, depth)
            if base is not kind:
                self.exact = False
                if self.subclass is not None and (written := self.subclass(value)) is not None:
                    return written
        if base in _ITEMS:
            items = base.__iter__(value)  # pyright: ignore[reportAttributeAccessIssue]
            if base is deque and (most := _maxlen(value)) is not None:
                return ["Q", most, *self._all("q", items, len(value), depth)[1:]]
            return self._all(_ITEMS[base], items, base.__len__(value), depth)  # pyright: ignore[reportAttributeAccessIssue]
        if base in _PAIRS:
            pairs = OrderedDict.items(value) if base is OrderedDict else dict.items(value)
            return self._all(_PAIRS[base], (part for pair in pairs for part in pair), 2 * dict.__len__(value), depth)
        if base in (int, float, str):
            reduced = {int: int.__int__, float: float.__float__, str: str.__str__}[base](value)
            return self.encode(reduced, depth + 1)
        return self._rare(value, kind, base, depth)

    def _all(self, tag: str, items: Any, count: int, depth: int) -> list[Any]:
        self.room.take_container(tag, count)
        return [tag, *[self.encode(item, depth + 1) for item in items]]

    def _default_dictionary(self, value: Any, depth: int) -> Any:
        factory = value.default_factory
        if factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory:
            tag, *pairs = self._all("d", (part for pair in value.items() for part in pair), 2 * len(value), depth)
            return [tag * 2, factory and factory.__name__, *pairs]
        if self.opaque is not None and self.draws:
            return self.opaque(value)
        self.exact = False
        return self.encode(dict(value), depth)

    def _big(self, value: int) -> list[Any]:
        if value.bit_length() > 4 * DIGITS:
            raise ValueTooLarge(f"an integer of more than {4 * DIGITS:,} bits; test a smaller case")
        self.room.take(value.bit_length() // 8)
        return ["i", hex(value)]

    def _rare(self, value: Any, kind: type, base: type, depth: int) -> Any:
        if base in (bytes, bytearray):
            self.room.take(base.__len__(value))
            return ["b" if base is bytes else "B", base.hex(value)]
        if base is complex:
            number = complex.__add__(value, 0j) if kind is not complex else value
            return ["c", self.encode(number.real), self.encode(number.imag)]
        if kind is range:
            return ["r", *(self.encode(part) for part in (value.start, value.stop, value.step))]
        if kind is _imported_type("fractions", "Fraction"):
            return ["F", self.encode(value.numerator), self.encode(value.denominator)]
        if kind is _imported_type("decimal", "Decimal"):
            return ["D", str(value)]
        if kind is _imported_type("datetime", "timedelta"):
            return ["T", "timedelta", value.days, value.seconds, value.microseconds]
        if any(kind is _imported_type("datetime", name) for name in _TIMES):
            zone = getattr(value, "tzinfo", None)
            if zone is None:
                return ["T", kind.__name__, value.isoformat()]
            if type(zone) is _imported_type("datetime", "timezone"):
                naive = value.replace(tzinfo=None)
                return ["T", kind.__name__, naive.isoformat(), self.encode(zone, depth + 1), value.fold]
        if (path := f"{kind.__module__}:{kind.__qualname__}") in _MADE_BY and _imported_type(*path.split(":")) is kind:
            return ["M", path, *(self.encode(part, depth + 1) for part in _MADE_BY[path](value))]
        if kind is MappingProxyType:
            items = dict(value)
            return self._all("p", (part for pair in items.items() for part in pair), 2 * len(items), depth)
        if kind is memoryview and value.ndim == 1 and value.format != "P":
            self.room.take(value.nbytes)
            return ["mv", value.format, value.readonly, value.hex()]
        if kind in _VIEWS:
            return self._all(_VIEWS[kind], value, len(value), depth)
        if kind in CONSTANTS:
            return ["K", CONSTANTS[kind]]
        if kind is slice:
            return ["y", *(self.encode(part, depth + 1) for part in (value.start, value.stop, value.step))]
        if self.draws and is_iterator(value):
            bound = CHUNK if self.opaque else DRAWN
            drawn = list(itertools.islice(value, bound))
            if len(drawn) < bound:
                return self._all("g", drawn, len(drawn), depth)
            if self.opaque is None:
                raise CodecError(f"an iterator of more than {DRAWN} items")
            tag, *items = self._all("G", drawn, len(drawn), depth)
            return [tag, self.opaque(value), *items]
        if self.opaque is None:
            raise CodecError(f"a {kind.__name__}")
        return self.opaque(value)


def _imported_type(module: str, name: str) -> Any:
    """A type; None if its module is not imported, since each imported module makes the zygote's forks dearer."""
    return getattr(sys.modules.get(module), name, None)


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of a builtin type or of `itertools`."""
    return type(value) in _ITERATORS or type(value).__module__ == "itertools"


class Decoder:
    """Decodes what `Encoder` writes, else raises `CodecError`. `opaque` is called for lists with other tags."""

    def __init__(self, opaque: Callable[[list[Any]], Any] | None = None) -> None:
        self.opaque, self.room = opaque, _Room()

    def decode(self, data: Any, depth: int = 0) -> Any:
        kind = type(data)
        if kind in _SCALARS or kind is float:
            return data
        if kind is int:
            if -SAFE < data < SAFE:
                return data
            raise CodecError("an integer above 2**53 must be sent as hexadecimal digits")
        if kind is not list or not data or depth > DEPTH + 2:
            raise CodecError("not an encoded value")
        tag, rest = data[0], data[1:]
        try:
            if type(tag) is str and tag in "ltszqgkvedOCp" and len(tag) == 1:
                self.room.take_container(tag, len(rest))
                return self._collect(tag, [self.decode(item, depth + 1) for item in rest])
            return self._rare(tag, data, rest, depth)
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise CodecError(f"not an encoded value: {type(error).__name__}") from None

    def _collect(self, tag: str, items: list[Any]) -> Any:
        if tag == "l":
            return items
        if tag == "t":
            return tuple(items)
        if tag in "sz":
            done = set(items) if tag == "s" else frozenset(items)
            return done
        if tag in "dOCp":
            if len(items) % 2:
                raise CodecError("a dictionary with a key but no value")
            pairs = zip(items[::2], items[1::2], strict=True)
            if tag == "p":
                return MappingProxyType(dict(pairs))
            return dict(pairs) if tag == "d" else OrderedDict(pairs) if tag == "O" else Counter(dict(pairs))
        if tag == "q":
            return deque(items)
        if tag == "g":
            return (item for item in items)
        if tag == "k":
            return dict.fromkeys(items).keys()
        return dict(enumerate(items)).values() if tag == "v" else dict(items).items()

    def _rare(self, tag: Any, data: list[Any], rest: list[Any], depth: int) -> Any:
        if tag == "i":
            (digits,) = rest
            if len(digits) > DIGITS + 3:
                raise CodecError("an integer with too many digits")
            return int(digits, 16)
        if tag == "f":
            return {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}[rest[0]]
        if tag in ("b", "B"):
            return (bytes if tag == "b" else bytearray).fromhex(rest[0])
        if tag in ("c", "r", "F"):
            parts = [self.decode(part, depth + 1) for part in rest]
            if any(type(part) not in ((int, float) if tag == "c" else (int,)) for part in parts):
                raise CodecError("not an encoded value")
            made = {"c": complex, "r": range}.get(tag)
            return (made or importlib.import_module("fractions").Fraction)(*parts)
        if tag == "K":
            return {"NotImplemented": NotImplemented, "Ellipsis": Ellipsis}[rest[0]]
        if tag == "y":
            return slice(*(self.decode(part, depth + 1) for part in rest))
        if tag == "D":
            if len(rest[0]) > 10_000:
                raise CodecError("a Decimal with too many digits")
            number = importlib.import_module("decimal").Decimal(rest[0])
            if abs(number.adjusted()) > 10_000:  # cheap to write, and millions of digits as an integer
                raise CodecError("a Decimal with too large an exponent")
            return number
        if tag == "T":
            times = importlib.import_module("datetime")
            if rest[0] == "timedelta":
                return times.timedelta(*rest[1:])
            if rest[0] not in _TIMES:
                raise CodecError("an unknown type of datetime")
            time = getattr(times, rest[0]).fromisoformat(rest[1])
            return (
                time
                if len(rest) == 2
                else time.replace(tzinfo=self.decode(rest[2], depth + 1), fold=int(bool(rest[3])))
            )
        if tag == "Q":
            return deque(self.decode(["q", *rest[1:]], depth), int(rest[0]))
        if tag == "dd":
            return defaultdict(_FACTORIES[rest[0]] if rest[0] else None, self.decode(["d", *rest[1:]], depth))
        if tag == "mv":
            made = bytes.fromhex(rest[2])
            return memoryview(made if rest[1] else bytearray(made)).cast(rest[0])
        if tag == "M" and rest[0] in _MADE_BY:
            module, name = rest[0].split(":")
            return getattr(importlib.import_module(module), name)(*(self.decode(part, depth + 1) for part in rest[1:]))
        if self.opaque is None or len(data) < 2:
            raise CodecError(f"an opaque value ({str(rest[-1])[:50] if rest else ''})")
        if tag == "G":
            self.room.take_container(tag, len(rest) - 1)
            return _chain([self.decode(item, depth + 1) for item in rest[1:]], self.decode(rest[0], depth + 1))
        return self.opaque(data)


def _chain(items: list[Any], rest: Any) -> Any:
    yield from items
    yield from rest


def decode(data: Any) -> Any:
    return Decoder().decode(data)
