"""Users' regular expressions: checked when a reward is resolved, run in a guarded worker, never in this process.

`python -m pytest tests/test_reward_pattern.py tests/test_reward_rules.py` exercises it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from rlvr.reward.reward_options import check_choice, check_number

if TYPE_CHECKING:
    from rlvr.sandbox import Worker

MAX_PATTERN = 10_000  # characters of a regular expression
MAX_SECONDS = 60.0  # the largest time limit for one answer
SECONDS = 1.0  # the default time limit for one answer
NO_WORKER = (
    "could not start the worker process in which patterns run; the pattern is not the cause, correct what the system "
    "says and run again: "
)


def check_pattern(pattern: Any, match: str = "full", seconds: float = SECONDS) -> None:
    """ValueError where one of these cannot be used; the pattern is compiled once, in the worker."""
    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN:
        raise ValueError(
            f"pattern={str(pattern)[:80]!r}, expected a regular expression of 1 to {MAX_PATTERN:,} characters in quotes"
        )
    check_choice("match", match, ("full", "search"))
    check_number("seconds", seconds, 0, MAX_SECONDS, above=True)
    # No more time than an answer has: a child that replaces a killed one compiles within the first answer's.
    (reply,) = matcher().map({"pattern": pattern, "match": "full"}, [None], seconds)
    which = f"pattern={pattern[:200]!r}"
    if reply.failure == "not_started":
        raise ValueError(NO_WORKER + reply.detail)
    if reply.failure:
        raise ValueError(f"{which} could not be compiled: {reply.detail}; give a simpler one, or raise `seconds`")
    if reply.value:
        place = "" if reply.value["position"] is None else f" at position {reply.value['position']}"
        raise ValueError(
            f"{which} is not a regular expression: {reply.value['error']}{place}; correct it there (a literal "
            "( [ { * + ? . or \\ takes a backslash before it)"
        )


@cache
def matcher() -> Worker:
    """The worker in which patterns run; its items are texts, its setup is `{"pattern": ..., "match": ...}`."""
    from rlvr.sandbox import Worker  # only where a pattern is used

    return Worker("rlvr.sandbox.regex")
