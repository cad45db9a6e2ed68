"""How a test compares, orders and calculates with values of the answer, and when an object's own word is believed.

Data decides: what can be read as data is read and compared here, and the answer learns nothing. An opaque object
compared with plain data ends the test (`opaque`), unless the tests themselves use objects (`uses_objects`: they name a
class, call methods, ...). Then its own `==`, `<` or `in` is asked, for `WINDOW` values in random order, of which one is
the expected one: an object can agree with whatever it is asked, so what it says has to fit together, and what accepts
everything, or remembers, fails. Two objects of the answer are compared natively, with the constants of one of them
shifted for the counter-questions; an order of two has to be false the other way round.
Standard library only.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rlvr.sandbox.operators import OPERATORS, in_place
from rlvr.sandbox.remote import CONTAINERS, Link, Remote, find_remotes

WINDOW = 8  # values that are asked about where an object's own comparison decides; one of them is expected
COLLISIONS = 1  # how many others may be equal to it too: a residue, say
# Operators that an opaque object must not get with plain data: what it gets beside it may be what is expected.
REVEALING = {"sub", "truediv", "floordiv", "mod", "and_", "or_", "xor", "lshift", "rshift"}
# Library functions that look at the type of what they get.
LOOK_AT_TYPE = {
    "type", "isinstance", "issubclass", "callable", "hasattr", "str", "repr", "format", "hash", "dir", "vars",
}  # fmt: skip
MOCK_ASSERTIONS = {
    "assert_called", "assert_called_once", "assert_not_called", "assert_called_with", "assert_called_once_with",
    "assert_any_call", "assert_has_calls", "assert_awaited", "assert_awaited_once", "assert_not_awaited",
    "assert_awaited_with", "assert_awaited_once_with", "assert_any_await", "assert_has_awaits",
}  # fmt: skip


class Comparisons:
    """The comparisons and operators of a test. `uses_objects`: by its own text, the test works with objects.

    `asks_back`: of two objects it may also ask for the order the other way round, which the test cannot notice.
    """

    def __init__(self, link: Link, uses_objects: bool, asks_back: bool = True) -> None:
        self.link, self.uses_objects, self.asks_back = link, uses_objects, asks_back
        self.bounds: tuple[list[Any], list[Any]] = ([], [])  # what an object said to be below and above
        self.bounds_of: tuple[Any, ...] = ()

    def ask(self, name: str, *args: Any) -> Any:
        return self.link.op(name, *args)

    # Operators

    def unary(self, name: str, value: Any) -> Any:
        if type(value) is not Remote:
            return OPERATORS[name](value)
        return self.ask(name, value)

    def readable(self, value: Any) -> tuple[bool, Any]:
        """(whether a value is plain data that operators may be applied to here, that data)."""
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
            left += list(right)
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
            return (self.ask_order_of_two if both else self.ask_order)(name, left, right)
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

    def comparable(self, value: Any) -> tuple[bool, Any]:
        """(whether a value can be compared as plain data, that data)."""
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
            return self.ask_contains(container, item)
        if type(container) is Remote and container._exact:
            return any(self.is_equal(one, item) for one in container)
        raise self.refuse(container)

    def is_equal(self, left: Any, right: Any) -> bool:
        if type(left) is Remote and type(right) is Remote and self.is_same(left, right):
            return True
        return bool(self.compare("eq", left, right))

    def shift(self, value: Any, k: int) -> Any:
        return shift_all(value, k)

    # Counter-questions

    def ask_order(self, name: str, left: Any, right: Any) -> Any:
        """`left < right` or the like for an object and plain data, which it must not let agree with everything.

        Asked for values on both sides. What the object says to be above and below has to fit, until another request.
        """
        remote, plain = (left, right) if type(left) is Remote else (right, left)
        if type(remote) is not Remote or type(plain) not in (int, float, str):
            return self.ask(name, left, right)
        is_above = (name in ("gt", "ge")) is (remote is left)
        key = tuple(remote._target), type(plain) is str, self.link.changes
        below, above = self.bounds if key == self.bounds_of else ([], [])
        here, result = os.urandom(1)[0] % WINDOW, None
        shifts = [-WINDOW, WINDOW, *(place - here for place in range(WINDOW))]
        for k in (shifts[place] for place in shuffle_range(len(shifts))):
            one = vary(plain, k)
            try:
                says = self.ask(name, *((left, one) if remote is left else (one, right)))
            except Exception:
                if k == 0:
                    raise
                continue
            if k == 0:
                result = says
            if says is True:
                (above if is_above else below).append(one)
        self.bounds, self.bounds_of = (below, above), (*key[:2], self.link.changes)
        if result is True and below and above and max(above) > min(below):
            raise self.link.fail("opaque", "an object of the answer is both above and below the same values")
        return result

    def ask_order_of_two(self, name: str, left: Any, right: Any) -> Any:
        """`left < right` of two objects of the answer, which must not hold the other way round too."""
        says = self.ask(name, left, right)
        if says is True and name in ("lt", "gt") and self.asks_back:
            with suppress(Exception):
                if self.ask(name, right, left) is True:
                    raise self.link.fail("opaque", "two objects of the answer are each below the other")
        return says

    def ask_contains(self, container: Any, item: Any) -> bool:
        """`item in container` for an object that must not hold every item of the kind."""
        others = far_values(item)
        here, holds = os.urandom(1)[0] % (len(others) + 1), list[bool]()
        asked = [*others[:here], item, *others[here:]]
        for one in asked:
            try:
                holds.append(self.ask("contains", container, one) is True)
            except Exception:
                if one is item:
                    raise
                holds.append(False)
        if others and all(holds):
            raise self.link.fail("opaque", "an object of the answer holds whatever it is asked for")
        return holds[here]

    def near(
        self,
        name: str,
        left: Any,
        right: Any,
        bound: Any,
        verdict: Callable[[Any, Any], Any],
        other: Callable[[int], Any] | None = None,
        side: str = "",
        actual: Callable[[Any], Any] | None = None,
    ) -> Any:
        """`verdict(left - right, bound)`, as in `abs(left - right) < bound`, for no more than `COLLISIONS` others.

        An object that makes the difference knows both sides, and would else only have to say that it is small.
        `other(k)`: the operand on `side` with its constants shifted by k. `actual`: the verdict on a difference that
        was made before.
        """
        plain = [type(one) in (int, float, complex) for one in (left, right)]
        if any(plain):
            other, side = None, "left" if plain[0] else "right"

        def holds(k: int) -> Any:
            if k == 0 and actual is not None:
                return actual(bound)
            pair = [left, right]
            if k:
                place = ("left", "right").index(side)
                pair[place] = other(k) if other else vary(pair[place], k)
            return verdict(self.binary(name, *pair), bound)

        step = int(2 * bound) + 1 if type(bound) in (int, float) and 0 <= bound < 1e300 else 1
        if not side or all(plain) or (self.readable(left)[0] and self.readable(right)[0]):
            return holds(0)
        here = os.urandom(1)[0] % WINDOW
        found: dict[int, Any] = {}
        for position in shuffle_range(WINDOW):
            try:
                found[position - here] = holds((position - here) * step)
            except Exception:
                if position == here:
                    raise
        if found[0] and sum(map(bool, found.values())) > 1 + COLLISIONS:
            raise self.link.fail("opaque", "an object of the answer is near to others than the expected value too")
        return found[0]

    # Orders and assertion methods

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

    def same_items(self, left: Any, right: Any, other: Callable[[int], Any] | None, side: str) -> bool:
        """`assertCountEqual`, where each item is compared as elsewhere."""

        def holds(left: Any, right: Any) -> bool:
            rest = list(right)
            for one in left:
                place = next((place for place, item in enumerate(rest) if self.is_equal(one, item)), None)
                if place is None:
                    return False
                del rest[place]
            return not rest

        known, ours = self.comparable(left)
        known_right, theirs = self.comparable(right)
        if known and known_right:
            with suppress(TypeError):  # of items that cannot be hashed
                return Counter(ours) == Counter(theirs)
            return holds(ours, theirs)
        left, right = list(left), list(right)
        here = os.urandom(1)[0] % WINDOW
        found: dict[int, bool] = {}
        for k in (position - here for position in shuffle_range(WINDOW)) if other else [0]:
            changed = other(k) if other and k else None
            pair = (left, right) if changed is None else (left, changed) if side == "right" else (changed, right)
            try:
                found[k] = holds(*pair)
            except Exception:
                if k == 0:
                    raise
        if found[0] and sum(found.values()) > 1 + COLLISIONS:
            raise self.link.fail("opaque", "objects of the answer are equal to others than the expected ones too")
        return found[0]


def shift_all(value: Any, k: int) -> Any:
    """The value with each number and text in it changed by k; itself if it holds none."""
    kind = type(value)
    if kind in (int, float, complex):
        return value + k
    if kind is str:
        if not value:
            return value
        place = next((index for index, one in enumerate(value) if one.isalnum()), 0)
        code = ord(value[place]) + k
        return value[:place] + chr(code if 0 < code < 0xD800 else ord(value[place]) + abs(k) + 1) + value[place + 1 :]
    if kind in (list, tuple, set, frozenset, deque):
        items = [shift_all(one, k) for one in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
    if kind is dict:
        items = {key: shift_all(one, k) for key, one in value.items()}
        return value if all(items[key] is one for key, one in value.items()) else items
    return value


def vary(value: Any, k: int) -> Any:
    """Another value of the same kind for each k but 0, also for an empty one or True; itself if none is known."""
    kind = type(value)
    if k == 0:
        return value
    if kind is bool:
        return not value
    if value is None:
        return k
    if kind in (Decimal, Fraction):
        return value + k
    if kind in (date, datetime, timedelta):
        return value + timedelta(days=k)
    if kind in (bytes, bytearray):
        return value + kind([k % 256])
    if kind is str and not value:
        return str(k)
    changed = shift_all(value, k)
    if changed is not value:
        return changed
    if kind in (list, tuple, set, frozenset, deque):
        return kind([*value, k])
    return {**value, k: k} if kind is dict else value


def far_values(value: Any) -> list[Any]:
    """Random values of the same kind that hardly any container with this one holds; none for other kinds."""
    kind = type(value)
    if kind is str:
        length = max(len(value), 4)
        return ["".join(chr(97 + byte % 26) for byte in os.urandom(length)) for _ in range(WINDOW - 1)]
    if kind in (int, float):
        return [kind(value + (-1) ** place * int.from_bytes(os.urandom(place), "big")) for place in range(2, WINDOW)]
    return [value[:-1] + (one,) for one in far_values(value[-1])] if kind is tuple and value else []


def shuffle_range(count: int) -> list[int]:
    order = list(range(count))
    for place, byte in zip(range(count - 1, 0, -1), os.urandom(2 * count)[::2], strict=False):
        other = byte % (place + 1)
        order[place], order[other] = order[other], order[place]
    return order


def check_mock(operations: Any, mock: Remote, name: str, args: tuple[Any, ...], words: dict[str, Any]) -> None:
    """Check here what a mock's own assertion would check beside the answer, which could make it hold."""
    asked, awaits = name, "await" in name
    name = name.replace("awaited", "called").replace("awaits", "calls").replace("await", "call")
    calls = list(operations.getattr(mock, "await_args_list" if awaits else "call_args_list"))

    def is_made(call: Any) -> bool:
        return operations.is_equal(operations.getattr(call, "args"), args) and operations.is_equal(
            operations.getattr(call, "kwargs"), words
        )

    if name == "assert_has_calls":
        wanted, any_order = (
            list(args[0]),
            (words | dict(zip(("any_order",), args[1:], strict=False))).get("any_order"),
        )
        made = calls if awaits else list(operations.getattr(mock, "mock_calls"))
        made = [operations.localize(one) for one in made]
        places = range(len(made) - len(wanted) + 1)
        if any_order:
            holds = all(wanted.count(one) <= made.count(one) for one in wanted)
        else:
            holds = any(made[place : place + len(wanted)] == wanted for place in places)
    elif name.endswith("_with"):
        holds = bool(calls) and is_made(calls[-1]) and (len(calls) == 1 or name == "assert_called_with")
    elif name == "assert_any_call":
        holds = any(map(is_made, calls))
    else:
        count = len(calls)
        holds = count == 0 if name == "assert_not_called" else count == 1 if name.endswith("once") else count > 0
    if not holds:
        raise AssertionError(f"{asked} does not hold after {len(calls)} calls")


def check_almost_equal(
    operations: Any, first: Any, second: Any, places: int | None = None, msg: Any = None, delta: Any = None
) -> None:
    bound = delta if delta is not None else 0.5 * 10 ** -(7 if places is None else places)

    def is_small(value: Any, bound: Any) -> Any:
        return operations.compare("le", operations.call(abs, (value,), {}), bound)

    if not operations.near("sub", first, second, bound, is_small):
        raise AssertionError(msg or f"the two differ by more than {bound}")
