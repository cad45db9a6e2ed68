"""What follows the formula of a sentence, and percent signs, commas and scales around a number.

The rule is a list of what may follow; everything else leaves no answer. So what is refused is drawn at random here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.reward import resolve_reward
from rlvr.reward.math.units import unit_of

CHANGED = [
    "over 6", "minus 1", "plus 1", "to the power of 2", "squared", "cubed", "factorial", "times $3$", "divided by 2",
    "thousandths", "hundredths", "sixteenths", "three-quarters", "less than 20", "negative", "(minus 1)",
    "feet 3 inches", "percent of 20", "percent off", "is wrong", "mod 3", "(mod 3)", "modulo seven", "\\pmod{3}",
    "less", "more", "root", "th power", "at most", "at least", "or more", "dozen", "score", "from 20", "by 3", "by n",
    "by a", "by half",
    "backwards", "in binary", "in dozens", "inverted", "if n is even", "for even n", "with remainder 2",
    "\\pi", "? No", ", so 10 in all", ", which is wrong", ", which we double", ", which is twice the answer",
    ", then 6", "; 6", "as well as 6", "per", "per cent per cent", "x", "cm less", "K", "and a half", "to 6",
    "square of", ", in total 10", ", or six", ", rounded from 5.3", ", thousand", ", maybe six",
]  # fmt: skip
KEPT = [
    "by symmetry", "by AM-GM", "because 2 + 3 = 5", "", "apples", "(see step 3)", "(by symmetry)", "for $x = 3$",
    "at x = 3", "for all students", "cm squared", "in total", "apples in total", "altogether", "each", "as required",
    "to the nearest cent", "rounded to two decimal places", ", since 2 and 3 are prime", ", which is the slope",
    "where the lines meet", "in simplest form", "is correct", "of the apples", "percent of the class", "% of the votes",
    "fifth-graders", "hours", "in base 8", ", rounded to two decimal places", ", to the nearest cent", ", in total",
    ", by symmetry", ", in lowest terms", "hours, in total",
]  # fmt: skip
REFUSED = [
    ("5 cm", "The answer is $5$ cm squared."),
    ("5 inches", "The answer is $5$ inches by 3 inches."),
    *((gold, "\\boxed{28\\% miles}") for gold in ("28 miles", "28", "0.28")),
    ("28\\%", "\\boxed{28 \\%\\%}"),
    ("1234", "\\boxed{$1$,$234$}"),
    ("52", "The answer is $52$ in base 8."),
    ("3.5", "The answer is $3.5$ million dollars."),
    ("5000000", "\\boxed{2 + 3 million}"),
    *(("5", f"The answer is 5{tail}.") for tail in (", so 10 in all", " mod 3", ", which is wrong", "? No")),
    *(("5", f"\\boxed{{$5$ {tail}}}") for tail in ("mod 3", "\\pmod{3}", "\\pi", "less", "root")),
]
MILLIONS = ["The answer is $3.5$ million dollars.", "\\boxed{3.5\\text{ million}}", "The answer is 3.5 million."]
WORDS = st.text(alphabet="abcdefghijklmnopqrtuvwxyz", min_size=1, max_size=9)  # no s at the end, so no plural
# That alone may follow a number, or begin a phrase that does; units are asked for by name, as any letters of theirs may
# be drawn.
CLOSING = {
    *("by", "from", "using", "via", "where", "after", "as"),
    "because",
    "since",
    "only",
    "left",
    "remaining",
    "exactly",
    "overall",
    "total",
    "altogether",
    "each",
    "the",
    "an",
}


def is_five(tail: str) -> bool:
    reward = resolve_reward("math", use_math_verify="never")
    return reward("", f"The answer is $5${tail}.", {"answer": "5"}) == 1.0


@pytest.mark.parametrize("tail", CHANGED)
def test_other_words_leave_no_answer(tail: str) -> None:
    assert not is_five(f" {tail}")


@pytest.mark.parametrize("tail", KEPT)
def test_units_and_closing_phrases_leave_the_answer(tail: str) -> None:
    assert is_five(f" {tail}")


@given(st.lists(WORDS, min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_words_that_are_not_known_leave_no_answer(words: list[str]) -> None:
    unit = unit_of(words[0])
    if words[0] not in CLOSING and not (unit is not None and unit[1]):
        assert not is_five(f" {' '.join(words)}")


@given(st.sampled_from(["", " ", *"+-*/^<>|&@#:!~", "\\cdot "]), st.integers(2, 99), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_sign_and_a_number_leave_no_answer(sign: str, number: int, has_space: bool) -> None:
    assert not is_five(f"{' ' * has_space}{sign}{number}")


def test_words_of_the_labelled_rows_are_judged_alike_in_a_box_and_after_a_formula() -> None:
    """Two ways to the same reading: what stands in a box beside a number, and after a formula."""
    reward = resolve_reward("math", use_math_verify="never")
    rows = Path(__file__).parents[2] / "rlvr/audits/data/math_pairs.jsonl"
    words = {
        word for row in map(json.loads, rows.read_text(encoding="utf-8").splitlines())
        for word in re.findall(r"[a-z]{3,}", row["response"])
    }  # fmt: skip
    said = {word: is_five(f" {word}") for word in words - CLOSING}
    assert {w for w in said if said[w] != (reward("", f"\\boxed{{5 {w}}}", {"answer": "5"}) == 1.0)} == set()
    assert len(words) > 300 and any(said.values())


@pytest.mark.parametrize(("gold", "response"), REFUSED)
def test_another_value_is_refused(gold: str, response: str) -> None:
    assert resolve_reward("math")("", response, {"answer": gold}) == 0.0


def test_the_gold_s_own_words_are_no_other_words() -> None:
    reward = resolve_reward("math", use_math_verify="never")
    assert reward("", "The answer is $5$ sock.", {"answer": "5 sock"}) == 1.0
    assert reward("", "The answer is $5$ sock.", {"answer": "5"}) == 0.0  # it may be a guess


def test_a_small_percentage_is_no_rounded_fraction() -> None:
    reward = resolve_reward("math", profile="lenient")
    assert reward("", "\\boxed{0.33\\%}", {"answer": "1/3"}) == 0.0
    assert reward("", "\\boxed{33.33\\%}", {"answer": "1/3"}) == 1.0


@pytest.mark.parametrize("gold", ["3.5 million", "3500000", "3.5\\text{ million}"])
@pytest.mark.parametrize("response", MILLIONS)
def test_millions_are_numbers(gold: str, response: str) -> None:
    assert resolve_reward("math")("", response, {"answer": gold}) == 1.0


def test_a_dozen_is_twelve() -> None:
    reward = resolve_reward("math")
    assert reward("", "The answer is 2 dozen eggs.", {"answer": "24"}) == 1.0
    assert reward("", "The answer is 2 dozen eggs.", {"answer": "2"}) == 0.0
