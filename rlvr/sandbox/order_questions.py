"""Where an object of the answer says by itself whether it is below, above or near a value of the test, or holds it.

    OrderQuestions().ask(operations, "lt", remote, 5)

An object can agree with whatever it is asked, so it is asked about other values too, in random order, and what it says
has to fit together. Standard library only. `python -m pytest tests/test_sandbox_rpc.py` exercises it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from rlvr.sandbox.counter_values import COLLISIONS, WINDOW, far_values, shuffle_range, vary
from rlvr.sandbox.remote import Remote, find_remotes

OPPOSITES = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
MOST_SORTED = 50  # of sorted objects, that are asked about


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
        questions = [(operator, k) for k in shifts for operator in (name, OPPOSITES[name])]
        for operator, k in (questions[place] for place in shuffle_range(len(questions))):
            one = vary(plain, k)
            try:
                says = operations.ask(operator, *((left, one) if remote is left else (one, right)))
            except Exception:
                if (operator, k) == (name, 0):
                    raise
                continue
            if (operator, k) == (name, 0):
                result = says
            if says is True:
                (above if is_above is (operator == name) else below).append(one)
        self.bounds, self.bounds_of = (below, above), (*key[:2], operations.link.changes)
        if result is True and below and above and max(above) > min(below):
            raise operations.link.fail("opaque", "an object of the answer is both above and below the same values")
        return result

    def pair(
        self, operations: Any, name: str, left: Any, right: Any, other: Callable[[int], Any] | None, side: str
    ) -> Any:
        """`left < right` or the like for two objects of the answer, which must not agree with the opposite too.

        Only two that are equal may be each below or at the other: then `other(k)`, the operand on `side` with its
        constants shifted by k, must not be both as well.
        """

        def ask_both(k: int) -> tuple[Any, bool]:
            one = other(k) if other and k else None
            pair = (left, right) if one is None else (left, one) if side == "right" else (one, right)
            said: list[Any] = [None, False]
            for place in shuffle_range(2):
                try:
                    said[place] = operations.ask(name, *(reversed(pair) if place else pair))
                except Exception:
                    if not place and not k:
                        raise
            return said[0], said[1] is True

        result, is_opposite = ask_both(0)
        agrees = result is True and is_opposite
        if agrees and name in ("le", "ge"):
            agrees = other is not None and all(ask_both(k) == (True, True) for k in (WINDOW, -WINDOW))
        if agrees:
            raise operations.link.fail("opaque", "objects of the answer are below and above each other")
        return result

    def check_sorted(self, operations: Any, items: Any, is_reversed: bool) -> None:
        """Raise if objects that sorted themselves do not say the same of neighbours."""
        if type(items) is not Remote or items._exact == 1:
            return
        found = list(operations.iterate(items))[:MOST_SORTED]
        for before, after in pairwise(found):
            pair = (before, after) if is_reversed else (after, before)
            if find_remotes(pair) and operations.compare("lt", *pair) is True:
                raise operations.link.fail("opaque", "sorted objects of the answer are not in the order that they give")

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
