"""What follows the formula of a sentence, and percent signs, commas and scales around a number."""

from __future__ import annotations

import pytest

from rlvr.reward import resolve_reward

CHANGED = [
    "over 6", "minus 1", "plus 1", "to the power of 2", "squared", "cubed", "factorial", "times $3$", "divided by 2",
    "thousandths", "hundredths", "less than 20", "negative", "(minus 1)", "feet 3 inches", "percent of 20", "is wrong",
]  # fmt: skip
KEPT = ["by symmetry", "because 2 + 3 = 5", "", "apples", "(see step 3)", "for $x = 3$", "cm squared", "in total"]
REFUSED = [
    ("5 cm", "The answer is $5$ cm squared."),
    ("5 inches", "The answer is $5$ inches by 3 inches."),
    *((gold, "\\boxed{28\\% miles}") for gold in ("28 miles", "28", "0.28")),
    ("28\\%", "\\boxed{28 \\%\\%}"),
    ("1234", "\\boxed{$1$,$234$}"),
    ("52", "The answer is $52$ in base 8."),
    ("3.5", "The answer is $3.5$ million dollars."),
    ("5000000", "\\boxed{2 + 3 million}"),
]
MILLIONS = ["The answer is $3.5$ million dollars.", "\\boxed{3.5\\text{ million}}", "The answer is 3.5 million."]


@pytest.mark.parametrize("tail", CHANGED)
def test_words_that_change_the_value_leave_no_answer(tail: str) -> None:
    assert resolve_reward("math")("", f"The answer is $5$ {tail}.", {"answer": "5"}) == 0.0


@pytest.mark.parametrize("tail", KEPT)
def test_other_words_change_nothing(tail: str) -> None:
    assert resolve_reward("math")("", f"The answer is $5$ {tail}.", {"answer": "5"}) == 1.0


@pytest.mark.parametrize(("gold", "response"), REFUSED)
def test_another_value_is_refused(gold: str, response: str) -> None:
    assert resolve_reward("math")("", response, {"answer": gold}) == 0.0


def test_a_small_percentage_is_no_rounded_fraction() -> None:
    reward = resolve_reward("math", profile="lenient")
    assert reward("", "\\boxed{0.33\\%}", {"answer": "1/3"}) == 0.0
    assert reward("", "\\boxed{33.33\\%}", {"answer": "1/3"}) == 1.0


@pytest.mark.parametrize("gold", ["3.5 million", "3500000", "3.5\\text{ million}"])
@pytest.mark.parametrize("response", MILLIONS)
def test_millions_are_numbers(gold: str, response: str) -> None:
    assert resolve_reward("math")("", response, {"answer": gold}) == 1.0
