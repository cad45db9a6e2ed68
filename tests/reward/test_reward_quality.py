"""The rules on form: what each takes, that nothing earns it back, and that a clean answer keeps everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.core.types import Outcome
from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case
from rlvr.reward.text.quality import SUGGESTIONS, Draft, examine_form

CLEAN = "The heart pumps blood through the body.\n\nIt has four chambers."
TEXTS = st.text(st.sampled_from("ab \ndefunctionreturnprint(x):"), max_size=60)


@pytest.mark.parametrize(
    ("text", "correctness", "quality", "confidence", "errors"),
    [
        (CLEAN, 1.0, 1.0, 1.0, ()),
        ("def f(n):\n    return n + 1", 1.0, 1.0, 1.0, ()),
        ("def hello():\n    print('hi')", 1.0, 1.0, 1.0, ()),
        ("The function of the heart is to pump blood.", 1.0, 1.0, 1.0, ()),  # a word of prose defines nothing
        ("", 0.0, 0.0, 0.0, ("empty_output",)),
        (" \n\t\n\n\n ", 0.0, 0.0, 0.0, ("empty_output",)),
        ("123456789", 0.3, 0.3, 0.3, ("too_short",)),
        ("1234567890", 1.0, 1.0, 1.0, ()),
        (" " * 20 + "42", 0.3, 0.3, 0.3, ("too_short",)),
        ("a" * 10_000, 1.0, 1.0, 1.0, ()),
        ("a" * 10_001, 0.7, 0.6, 0.65, ("too_long",)),
        ("def f(n):\n    n + 1", 0.8, 1.0, 0.9, ("incomplete_code",)),
        ("function f(n) { n + 1 }", 0.8, 1.0, 0.9, ("incomplete_code",)),
        ("fn f<T>(n: T) { n }", 0.8, 1.0, 0.9, ("incomplete_code",)),
        ("First part.\n\n\nSecond part.", 1.0, 0.9, 0.95, ()),
        ("def f(n):\n\n\n    n", 0.8, 0.9, 0.85, ("incomplete_code",)),
        ("fn f()\n\n\n", 0.24, 0.27, 0.255, ("too_short", "incomplete_code")),
        ("def f(n):\n\n\n    n" + " n" * 5000, 0.56, 0.54, 0.55, ("too_long", "incomplete_code")),
    ],
)
def test_each_rule_lowers_the_score_as_documented(
    text: str, correctness: float, quality: float, confidence: float, errors: tuple[str, ...]
) -> None:
    found = examine_form(text)
    assert (found, found.confidence) == (Draft(correctness, quality, errors), confidence)


def test_the_reward_agrees_with_the_reason_codes() -> None:
    """Passed where no rule with a code was broken; several codes are joined, so that groups of them can be counted."""
    reward = resolve_reward("draft")
    good, spaced, bad = (reward.judge(Case("", t)) for t in (CLEAN, "One.\n\n\nTwo and three.", "fn f()\n\n\n"))
    assert (good.value, good.outcome, good.reason) == (1.0, Outcome.PASSED, "")
    assert (spaced.value, spaced.outcome, spaced.reason) == (0.95, Outcome.PASSED, "")
    assert (bad.value, bad.outcome, bad.reason) == (0.255, Outcome.FAILED, "too_short+incomplete_code")
    assert bad.parts == {"correctness": 0.24, "quality": 0.27}


@given(TEXTS)
def test_scores_stay_in_bounds_and_every_code_has_a_suggestion(text: str) -> None:
    found = examine_form(text)
    assert 0 <= found.correctness <= 1 and 0 <= found.quality <= 1
    assert set(found.errors) <= set(SUGGESTIONS)
    assert (found.confidence == 1) == (not found.errors and "\n\n\n" not in text)


@given(TEXTS)
def test_a_padded_answer_never_gains(text: str) -> None:
    """Ten thousand characters more, or three line breaks, never raise a score of an answer that is long enough."""
    before = examine_form(text)
    blown, spread = examine_form(text + " abc" * 3000), examine_form(text + "\n\n\n")
    assert spread.correctness <= before.correctness and spread.quality <= before.quality
    assert blown.correctness <= 0.7 and blown.quality <= 0.6
    if not {"too_short", "empty_output"} & set(before.errors):
        assert blown.correctness <= before.correctness and blown.quality <= before.quality


@given(TEXTS, st.text(" \n\t", max_size=30))
def test_blanks_around_an_answer_earn_nothing(text: str, blanks: str) -> None:
    assert examine_form(blanks + text + blanks).confidence <= examine_form(text).confidence


@pytest.mark.parametrize("piece", ["def ", "def a", "function " + " " * 50, "def a" + " " * 99])
def test_a_hostile_text_is_searched_in_linear_time(piece: str) -> None:
    """Five million characters: milliseconds, or, for a search that tries every end of every piece, hours."""
    assert examine_form(piece * (5_000_000 // len(piece))).errors == ("too_long",)
