"""Other values than an expected one, for the counter-questions that `rlvr.sandbox.operations` puts to an `==`.

    shift_all((7, "a"), 1)  # (8, "b")

Standard library only. `python -m pytest tests/test_sandbox_rpc.py` exercises it.
"""

from __future__ import annotations

import os
from collections import deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

WINDOW = 8  # values that are asked about where an object's own comparison decides; one of them is expected
COLLISIONS = 1  # how many others may be equal to it too: a residue, say


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
