"""Assertion methods of `unittest` and of mocks, checked where the expected values are.

    same_items(operations, left, right, None, "")  # assertCountEqual

Each of them compares as `rlvr.sandbox.operations` does. Standard library only.
`python -m pytest tests/test_sandbox_objects.py` exercises it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlvr.sandbox.counter_values import COLLISIONS, WINDOW, shuffle_range
from rlvr.sandbox.remote import Remote

MOCK_ASSERTIONS = {
    "assert_called", "assert_called_once", "assert_not_called", "assert_called_with", "assert_called_once_with",
    "assert_any_call", "assert_has_calls", "assert_awaited", "assert_awaited_once", "assert_not_awaited",
    "assert_awaited_with", "assert_awaited_once_with", "assert_any_await", "assert_has_awaits",
}  # fmt: skip


def same_items(operations: Any, left: Any, right: Any, other: Callable[[int], Any] | None, side: str) -> bool:
    """`assertCountEqual`, where each item is compared as elsewhere."""

    def holds(left: Any, right: Any) -> bool:
        rest = list(operations.iterate(right))
        for one in operations.iterate(left):
            place = next((place for place, item in enumerate(rest) if operations.is_equal(one, item)), None)
            if place is None:
                return False
            del rest[place]
        return not rest

    known, ours = operations.comparable(left)
    known_right, theirs = operations.comparable(right)
    if known and known_right:
        with suppress(TypeError):  # of items that cannot be hashed
            return Counter(ours) == Counter(theirs)
        return holds(ours, theirs)
    left, right = list(operations.iterate(left)), list(operations.iterate(right))
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
        raise operations.link.fail("opaque", "objects of the answer are equal to others than the expected ones too")
    return found[0]


def check_mock(operations: Any, mock: Remote, name: str, args: tuple[Any, ...], words: dict[str, Any]) -> None:
    """Check here what a mock's own assertion would check beside the answer, which could make it hold."""
    asked, awaits = name, "await" in name
    name = name.replace("awaited", "called").replace("awaits", "calls").replace("await", "call")
    calls = list(operations.iterate(operations.getattr(mock, "await_args_list" if awaits else "call_args_list")))

    def is_made(call: Any) -> bool:
        return operations.is_equal(operations.getattr(call, "args"), args) and operations.is_equal(
            operations.getattr(call, "kwargs"), words
        )

    if name == "assert_has_calls":
        wanted, any_order = (
            list(args[0]),
            (words | dict(zip(("any_order",), args[1:], strict=False))).get("any_order"),
        )
        made = calls if awaits else list(operations.iterate(operations.getattr(mock, "mock_calls")))
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
