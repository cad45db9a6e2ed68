"""Values keep their exact types over the codec; what is hostile, deep, cyclic or malformed is refused."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import pytest

from rlvr.sandbox.codec import CodecError, Encoder, ValueTooLarge, decode


def travel(value: Any) -> Any:
    return decode(json.loads(json.dumps(Encoder().encode(value))))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1, -(1 << 53), 1 << 5000, -0.0, 1.5, math.inf, 2j, "a\udc80\0", b"\0\xff", bytearray(b"x"),
        [1, [2]], (1, ()), {1, "a"}, frozenset({(1, 2)}), {(1, 2.5): [None]}, range(1, 9, 2), deque([1]),
        Counter("aab"), OrderedDict(b=1, a=2), Fraction(1, 3), Decimal("1.50"), deque([1, 2], maxlen=2),
        deque(maxlen=0), defaultdict(list, a=[1]), defaultdict(None, a=1), MappingProxyType({"a": [1]}),
    ],
)  # fmt: skip
def test_a_value_arrives_equal_and_of_its_own_type(value: Any) -> None:
    got = travel(value)
    assert (got, type(got), str(got)) == (value, type(value), str(value))


def test_containers_arrive_with_what_else_they_hold() -> None:
    window = travel(deque([1, 2], maxlen=2))
    window.append(3)
    assert (list(window), window.maxlen) == ([2, 3], 2)
    assert travel(defaultdict(int))["absent"] == 0
    with pytest.raises(CodecError):
        decode(["Q", -1, 2])
    with pytest.raises(CodecError):
        decode(["dd", "eval", 1, 2])


@pytest.mark.parametrize("value", [memoryview(b"abc"), memoryview(bytearray(b"abcd")).cast("H")])
def test_a_view_arrives_with_its_format(value: memoryview) -> None:
    got = travel(value)
    assert (got, got.format, got.readonly) == (value, value.format, value.readonly)


def test_nan_arrives_as_nan_and_an_iterator_as_its_items() -> None:
    assert math.isnan(travel(math.nan))
    assert list(travel(x * x for x in range(3))) == [0, 1, 4]


def test_a_lying_subclass_arrives_as_its_base() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

        def __int__(self) -> int:
            return 99

    class List(list):
        def __iter__(self) -> Any:
            return iter([99])

    assert travel(Liar(3)) == 3 and type(travel(Liar(3))) is int
    assert travel(List([1, 2])) == [1, 2]


def test_cycles_depth_and_endless_iterators_are_unfit() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (cycle, iter(int, 1), (x for x in iter(lambda: 1, 2)), object(), 1 << (1 << 22)):
        with pytest.raises(CodecError):
            Encoder().encode(value)


def test_a_value_is_bounded_by_the_memory_that_it_takes() -> None:
    """64 MiB: 64 bytes of a list and 48 of an item. One more item is refused, here and on the other side."""
    assert len(Encoder().encode([0] * 1_398_100)) == 1_398_101
    assert travel(list(range(200_000))) == list(range(200_000))
    with pytest.raises(ValueTooLarge, match=r"64 MiB; test a smaller case"):
        Encoder().encode([0] * 1_398_101)
    with pytest.raises(ValueTooLarge):
        decode(["l", *[0] * 1_398_101])


def share_parts() -> list[Any]:
    value: list[Any] = [0] * 10
    for _ in range(30):
        value = [value] * 10
    return value


HUGE: dict[str, Callable[[], Any]] = {
    "shared parts": share_parts,
    "shared texts": lambda: ["x" * 1_000_000] * 100,
    "shared integers": lambda: [1 << 2_000_000] * 300,
    "items": lambda: [0] * 10_000_000,
    "bytes": lambda: bytes(65 << 20),
    "keys": lambda: dict.fromkeys(range(800_000)),
    "views": lambda: [{}.values()] * 250_000,
}


@pytest.mark.parametrize("name", HUGE)
def test_what_would_take_too_much_memory_is_refused_before_it_is_built(name: str) -> None:
    with pytest.raises(ValueTooLarge):
        Encoder().encode(HUGE[name]())


@pytest.mark.parametrize(("empty", "count"), [("q", 83_000), ("s", 250_000), ("d", 240_000), ("l", 600_000)])
def test_many_small_containers_are_refused_by_the_decoder(empty: str, count: int) -> None:
    """Five bytes of JSON may stand for 760 of memory: an empty deque."""
    with pytest.raises(ValueTooLarge):
        decode(["l", *[[empty]] * count])


@pytest.mark.parametrize(
    "data",
    ["[]", '["?", 1]', '["d", 1]', '["s", ["l"]]', '["i", 5]', '["r", 1.5, 2, 3]', "[" * 300 + "]" * 300, "1" * 30],
)
def test_malformed_encodings_are_refused(data: str) -> None:
    with pytest.raises(CodecError):
        decode(json.loads(data))
