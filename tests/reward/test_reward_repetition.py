"""The reward `repetition`: texts that say the same over and over, and texts that do not."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.core.types import Score
from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case

PROSE = "The keeper lit the lamp. Far out a ship turned, slowly, and the keeper counted its lights until it was gone."


def score(text: str, **options: Any) -> Score:
    return resolve_reward("repetition", **options).judge(Case("", text))


@pytest.mark.parametrize(
    ("text", "options", "repeated"),
    [
        (PROSE, {}, 0.0),
        ("", {}, 0.0),
        ("one two three", {}, 0.0),
        ("a b a b", {"words": 2, "at_most": 0.5}, 1 / 3),  # ab ba ab
        ("a, a. A! a", {"words": 1, "at_most": 0.75}, 3 / 4),
    ],
)
def test_the_share_of_runs_that_came_before_is_counted(text: str, options: dict[str, Any], repeated: float) -> None:
    found = score(text, **options)
    assert (found.value, found.reason) == (1.0, "") and found.parts == {"repeated": pytest.approx(repeated)}


@pytest.mark.parametrize("text", [PROSE * 2, "again and again " * 50, f"{PROSE}\n\n{PROSE.upper()}", "na " * 10])
def test_a_text_that_repeats_itself_fails(text: str) -> None:
    assert (score(text).value, score(text).reason) == (0.0, "repetition")


def test_a_text_over_the_limit_fails() -> None:
    assert score("word " * 1_000_000).reason == "too_large"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"words": 0}, "words=0"),
        ({"words": True}, "words=True"),
        ({"at_most": 1}, "at_most=1"),
        ({"at_most": "x"}, "x"),
    ],
)
def test_options_without_a_rule_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("repetition", **options)
