"""A job of the guarded worker: whether `math-verify` calls two answers equal. Runs in the child, with sympy.

Nothing here is trusted to end: the worker kills it.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import Any

# Each loads another part of sympy, so that no pair pays for it.
_FIRST = (
    ["1+\\sqrt{2}", "\\sqrt{2}+1"],
    ["x<3", "(-\\infty,3)"],
    ["\\int_0^1 x dx", "\\frac{1}{2}"],
)
_loaded = False
_counting = False


class _Late(BaseException):
    """The pair has used up its processor time. Not an `Exception`: those are swallowed on the way."""


def run(setup: dict[str, Any], item: list[str] | None) -> bool | None:
    """Whether `[gold, answer]` are equal, None where that took too long; an item of None only loads what is needed.

    `setup` is `{"paths": where Python finds it, "seconds": of processor time}`.
    """
    global _loaded
    if not _loaded:
        sys.path.extend(path for path in setup["paths"] if path not in sys.path)
        logging.disable(logging.CRITICAL)
        signal.signal(signal.SIGPROF, _late)
        for pair in _FIRST:
            _equal(*pair)
        _loaded = True
    return True if item is None else _in_time(item, setup["seconds"])


def _in_time(item: list[str], seconds: float) -> bool | None:
    global _counting
    _counting = True
    signal.setitimer(signal.ITIMER_PROF, seconds, 0.05)  # again and again, should a bare `except` swallow the first
    try:
        equal = _equal(*item)
        _counting = False
        return equal
    except _Late:
        return None
    finally:
        _counting = False
        signal.setitimer(signal.ITIMER_PROF, 0)


def _late(*_: object) -> None:
    if _counting:
        raise _Late


def _equal(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    # Its own deadlines are alarms of wall time; ours are the timer above and the worker's.
    late: Any = None
    expected, given = (parse(f"${text}$", parsing_timeout=late) for text in (gold, answer))
    return bool(expected and given and verify(expected, given, timeout_seconds=late))
