"""`format_compliance` with a user's pattern: what it says of answers, of runaway patterns, and of wrong options."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.core.types import Outcome, Score, Trajectory
from rlvr.reward import resolve_reward

ENDLESS = "a" * 60 + "!"
HUNGRY = "(?:" + "|".join("(b)" for _ in range(300)) + "|(a))*"  # keeps 301 marks per letter: a gigabyte


def scores(texts: list[str], **kwargs: Any) -> list[Score]:
    reward = resolve_reward("format_compliance", required_format="regex", **kwargs)
    return reward.score([Trajectory("p", [1], text, [2]) for text in texts])


def test_the_whole_response_must_match_unless_a_search_is_asked_for() -> None:
    texts = ["42", "42\n", "is 42", "", "4" * 100_001]
    assert [s.value for s in scores(texts, pattern="[0-9]+")] == [1, 0, 0, 0, 0]
    found = scores(texts, pattern="[0-9]+", match="search")
    assert [s.value for s in found] == [1, 1, 1, 0, 0]
    assert [(s.outcome, s.reason) for s in found][-2:] == [(Outcome.FAILED, "wrong_format")] * 2
    assert resolve_reward("format_compliance", required_format="regex", pattern="(?is)<a>.*</A>")("p", "<A>\n</a>") == 1


def test_a_pattern_that_runs_away_is_an_error_and_never_a_zero() -> None:
    got = scores(["aaa", ENDLESS], pattern="(a+)+", seconds=0.3)
    assert got[0] == Score(1.0, Outcome.PASSED)
    assert (got[1].value, got[1].outcome, got[1].reason) == (None, Outcome.ERROR, "regex_timeout")
    assert "pattern '(a+)+' on an answer of 61 characters" in got[1].detail and "raise `seconds`" in got[1].detail
    hungry = scores(["a" * 100_000], pattern=HUNGRY, seconds=60)[0]
    assert (hungry.value, hungry.outcome, hungry.reason) == (None, Outcome.ERROR, "regex_failed")


def test_in_a_composite_a_runaway_pattern_is_an_error_of_the_whole() -> None:
    part = {"required_format": "regex", "pattern": "(a+)+", "seconds": 0.2}
    rewards = [{"name": "length_penalty"}, {"name": "format_compliance", "kwargs": part}]
    (got,) = resolve_reward("composite", rewards=rewards).score([Trajectory("p", [1], ENDLESS, [2])])
    assert (got.value, got.reason) == (None, "regex_timeout") and "part format_compliance" in got.detail


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"pattern": "(a"},
            r"pattern='\(a' is not a regular expression: missing \), .* at position 0; correct it there",
        ),
        ({"pattern": "ab**"}, "multiple repeat at position 3"),
        ({"pattern": "a{99999999999999999999}"}, "the repetition number is too large"),
        ({"pattern": "(" * 4000 + ")" * 4000}, "is not a regular expression: .*recursion"),
        ({}, "expected a regular expression of 1 to 10,000 characters"),
        ({"pattern": ""}, "expected a regular expression"),
        ({"pattern": 3}, "pattern='3', expected a regular expression of .* in quotes"),
        ({"pattern": "a" * 10_001}, "expected a regular expression of 1 to 10,000"),
        ({"pattern": "a", "match": "ful"}, r"match='ful' \(did you mean 'full'\?\); known: full, search"),
        ({"pattern": "a", "seconds": 0}, "seconds=0, expected a finite number above 0, at most 60"),
        ({"pattern": "a", "seconds": True}, "seconds=True"),
        ({"pattern": "a", "flags": "i"}, "does not take 'flags'"),
        (
            {"required_format": "json", "pattern": "a"},
            "pattern has no effect with required_format='json'",
        ),
        ({"required_format": "json", "match": "full"}, "match has no effect"),
    ],
)
def test_a_bad_pattern_or_option_is_refused_when_resolved(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("format_compliance", **{"required_format": "regex", **kwargs})
