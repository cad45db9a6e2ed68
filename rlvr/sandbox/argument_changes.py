"""What an answer changes in its arguments, changed in the test's own objects too, as a call in one process would."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

CHANGED_WHOLE = ("array", "memoryview", "Random")
MUTABLE = (list, dict, set, bytearray, deque, OrderedDict, Counter, defaultdict)


def has_containers(values: list[Any]) -> bool:
    return any(type(one) in MUTABLE or type(one).__name__ in CHANGED_WHOLE for one in values)


def update(old: Any, new: Any, pairs: dict[int, Any]) -> None:
    """Change the test's object as the answer changed it; parts of unchanged type keep their identity.

    `pairs`: objects that were changed already, by identity: one that stands in two places is changed once.
    """
    if id(old) in pairs or not is_alike(old, new):
        return
    kind: Any = type(old)
    if kind in MUTABLE:
        pairs[id(old)] = old
    if kind in (list, deque):
        items = list(new)
        for place, (was, now) in enumerate(zip(old, new, strict=False)):
            if is_alike(was, now) and can_change(was):
                update(was, now, pairs)
                items[place] = was
        old.clear()
        old.extend(items)
    elif issubclass(kind, dict):
        items = dict(new)
        for key, now in new.items():
            if can_change(old.get(key)) and is_alike(old[key], now):
                update(old[key], now, pairs)
                items[key] = old[key]
        old.clear()
        old.update(items)
    elif kind.__name__ == "array":
        old[:] = new
    elif kind is memoryview:
        if not old.readonly and old.nbytes == new.nbytes and old.format == new.format:
            old[:] = new
    elif kind.__name__ == "Random":
        old.setstate(new.getstate())
    elif kind in (set, bytearray):
        old.clear()
        (old.update if kind is set else old.extend)(new)
    elif kind is tuple:
        for was, now in zip(old, new, strict=False):
            update(was, now, pairs)


def is_alike(old: Any, new: Any) -> bool:
    return type(old) is type(new) or (isinstance(old, dict) and isinstance(new, dict))


def can_change(value: Any) -> bool:
    """Whether an object, or a part of it, may be changed in place."""
    return type(value) in (*MUTABLE, tuple) or type(value).__name__ in CHANGED_WHOLE
