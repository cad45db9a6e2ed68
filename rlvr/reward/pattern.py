"""Users' regular expressions: checked when a reward is resolved, run in a guarded worker, never in this process.

`python -m pytest tests/test_reward_pattern.py tests/test_reward_rules.py` exercises it.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

from rlvr.reward.options import is_number, one_of

if TYPE_CHECKING:
    from rlvr.sandbox import Worker

MAX_PATTERN = 10_000  # characters of a regular expression
MAX_SECONDS = 60.0  # that one answer may be asked to take
SECONDS = 1.0  # that one answer may take, where nothing else is asked
NO_WORKER = (
    "could not start the worker, a process of its own in which patterns run; the pattern has no part in it, mend what "
    "the system says and run again: "
)


def check_seconds(what: str, seconds: Any) -> None:
    if not (is_number(seconds) and 0 < seconds <= MAX_SECONDS and math.isfinite(seconds)):
        raise ValueError(f"{what}: seconds={seconds!r}, expected a number above 0, at most {MAX_SECONDS:g}")


def check_pattern(what: str, pattern: Any, match: str = "full", seconds: float = SECONDS) -> None:
    """ValueError where one of these cannot be used; the pattern is compiled once, in the worker."""
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
        raise ValueError(
            f"{what}: pattern={str(pattern)[:80]!r}, expected a regular expression of 1 to {MAX_PATTERN:,} characters "
            "in quotes"
        )
    one_of(f"{what}: match", match, ("full", "search"))
    check_seconds(what, seconds)
    # No more time than an answer has: a child that replaces a killed one compiles within the first answer's.
    (reply,) = matcher().map({"pattern": pattern, "match": "full"}, [None], seconds)
    which = f"{what}: pattern={pattern[:200]!r}"
    if reply.failure == "not_started":
        raise ValueError(f"{what}: {NO_WORKER}{reply.detail}")
    if reply.failure:
        raise ValueError(f"{which} could not be compiled: {reply.detail}; give a simpler one, or raise `seconds`")
    if reply.value:
        place = "" if reply.value["position"] is None else f" at position {reply.value['position']}"
        raise ValueError(
            f"{which} is no regular expression: {reply.value['error']}{place}; mend it there (a character that is "
            "meant literally, such as ( [ { * + ? . \\ takes a backslash before it)"
        )


@cache
def matcher() -> Worker:
    """The worker in which patterns run; its items are texts, its setup is `{"pattern": ..., "match": ...}`."""
    from rlvr.sandbox import Worker  # only where a pattern is used

    return Worker("rlvr.sandbox.regex")
