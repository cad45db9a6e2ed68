"""Users' regular expressions: checked when a reward is resolved, run in a guarded worker, never in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from rlvr.core.types import Score
from rlvr.reward.references import find_reference_text
from rlvr.reward.reward_options import check_choice, check_number
from rlvr.reward.signatures import Case
from rlvr.reward.text.guarded_rules import NO_WORKER, GuardedRule

if TYPE_CHECKING:
    from rlvr.sandbox import Worker

MAX_PATTERN = 10_000  # characters of a regular expression
MAX_SECONDS = 60.0  # the largest time limit for one answer
SECONDS = 1.0  # the default time limit for one answer
REMEDY = (
    "; where one repeat stands in another, as in (a+)+, every way to split a text is tried: write a+ or a possessive "
    "(a++)+ instead, or raise `seconds`"
)


class PatternOptions(Protocol):
    @property
    def pattern(self) -> str | None: ...
    @property
    def match(self) -> str | None: ...
    @property
    def seconds(self) -> float | None: ...


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
            f"{which} is not a regular expression: {reply.value['error']}{place}; correct the expression (a literal "
            "( [ { * + ? . or \\ takes a backslash before it)"
        )


def match_pattern(cases: Sequence[Case], options: PatternOptions, read: Callable[[bool], Score]) -> list[Score]:
    """One score per case, by `read`, from whether its response fits the (checked) pattern."""
    setup = {"pattern": options.pattern, "match": options.match or "full"}
    rule = GuardedRule(
        matcher(),
        setup,
        SECONDS if options.seconds is None else options.seconds,
        lambda value: read(value["fits"]),
        f"; the pattern is {str(options.pattern)[:200]!r}{REMEDY}",
    )
    return rule.score([case.response for case in cases], [find_reference_text(case.meta or {}) for case in cases])


@cache
def matcher() -> Worker:
    """The worker in which patterns run; its items are texts, its setup is `{"pattern": ..., "match": ...}`."""
    from rlvr.sandbox import Worker  # only where a pattern is used

    return Worker("rlvr.sandbox.regex")
