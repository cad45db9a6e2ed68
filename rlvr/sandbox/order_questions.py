"""Where an object of the answer says by itself whether it is below, above or near a value of the test, or holds it.

    OrderQuestions().ask(operations, "lt", remote, 5)

An object can agree with whatever it is asked, so it is asked about other values too, in random order, and what it says
has to fit together. Standard library only. `python -m pytest tests/test_sandbox_rpc.py` exercises it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rlvr.sandbox.counter_values import COLLISIONS, WINDOW, far_values, shuffle_range, vary
from rlvr.sandbox.remote import Remote


class OrderQuestions:
    """What an object said so far. `operations` is an argument, since a reference to it would be a cycle."""

    def __init__(self) -> None:
        self.bounds: tuple[list[Any], list[Any]] = ([], [])  # what an object said to be below and above
        self.bounds_of: tuple[Any, ...] = ()

    def ask(self, operations: Any, name: str, left: Any, right: Any) -> Any:
        """`left < right` or the like for an object and plain data, which it must not let agree with everything.

        Asked for values on both sides. What the object says to be above and below has to fit, until another request.
        """
        remote, plain = (left, right) if type(left) is Remote else (right, left)
        if type(remote) is not Remote or type(plain) not in (int, float, str):
            return operations.ask(name, left, right)
        is_above = (name in ("gt", "ge")) is (remote is left)
        key = tuple(remote._target), type(plain) is str, operations.link.changes
        below, above = self.bounds if key == self.bounds_of else ([], [])
        here, result = os.urandom(1)[0] % WINDOW, None
        shifts = [-WINDOW, WINDOW, *(place - here for place in range(WINDOW))]
        for k in (shifts[place] for place in shuffle_range(len(shifts))):
            one = vary(plain, k)
            try:
                says = operations.ask(name, *((left, one) if remote is left else (one, right)))
            except Exception:
                if k == 0:
                    raise
                continue
            if k == 0:
                result = says
            if says is True:
                (above if is_above else below).append(one)
        self.bounds, self.bounds_of = (below, above), (*key[:2], operations.link.changes)
        if result is True and below and above and max(above) > min(below):
            raise operations.link.fail("opaque", "an object of the answer is both above and below the same values")
        return result

    def of_two(self, operations: Any, name: str, left: Any, right: Any) -> Any:
        """`left < right` of two objects of the answer, which must not hold the other way round too."""
        says = operations.ask(name, left, right)
        if says is True and name in ("lt", "gt") and operations.asks_back:
            with suppress(Exception):
                if operations.ask(name, right, left) is True:
                    raise operations.link.fail("opaque", "two objects of the answer are each below the other")
        return says

    def contains(self, operations: Any, container: Any, item: Any) -> bool:
        """`item in container` for an object that must not hold every item of the kind."""
        others = far_values(item)
        here, holds = os.urandom(1)[0] % (len(others) + 1), list[bool]()
        asked = [*others[:here], item, *others[here:]]
        for one in asked:
            try:
                holds.append(operations.ask("contains", container, one) is True)
            except Exception:
                if one is item:
                    raise
                holds.append(False)
        if others and all(holds):
            raise operations.link.fail("opaque", "an object of the answer holds whatever it is asked for")
        return holds[here]

    def near(
        self,
        operations: Any,
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
            return verdict(operations.binary(name, *pair), bound)

        step = int(2 * bound) + 1 if type(bound) in (int, float) and 0 <= bound < 1e300 else 1
        if not side or all(plain) or (operations.readable(left)[0] and operations.readable(right)[0]):
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
            raise operations.link.fail(
                "opaque", "an object of the answer is near to others than the expected value too"
            )
        return found[0]
