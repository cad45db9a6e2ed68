"""The grammar before the scorers that evaluate answers: hostile texts never pass, and right answers do."""

from __future__ import annotations

import time

import pytest

from rlvr.audits.gym_audit import HOSTILE
from rlvr.reward.reasoning_gym.answer_grammar import GRAMMARS, find_fault

HARMLESS = {"9" * 900}  # a literal


@pytest.mark.parametrize("family", GRAMMARS)
def test_no_hostile_text_reaches_a_scorer_that_evaluates(family: str) -> None:
    passed = {text for text in HOSTILE if not find_fault(family, text)}
    allowed = set[str]() if GRAMMARS[family].is_expression else HARMLESS
    assert passed <= allowed


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("countdown", "14*(1*3 + 64) - 20 + 39"),
        ("puzzle24", "(4 - 1) * (3 + 5)"),
        ("simple_integration", "70*x**6/3 + 5*x**2 + C"),
        ("intermediate_integration", "-2*X*cos(3*X + 1)/3 + exp(-x)*sin(x) + sqrt(x**2 + 1) + C"),
        ("intermediate_integration", "log(Abs(x)) + x**(3/2) + E**x + pi*asin(x)"),
        ("polynomial_multiplication", "-24*x**7 + 15*x*y - z**10 + 3"),
        ("binary_matrix", "0 1 2\n1 0 1"),
        ("binary_matrix", "[[0, 1], [1, 0]]"),
        ("spiral_matrix", "[1, 2, 3]"),
        ("spiral_matrix", "1 -2 3"),
        ("string_insertion", "ABCDEAAB"),
        ("string_insertion", "['A', \"B\"]"),
        ("n_queens", "_ _ Q _\nQ _ _ _"),
        ("n_queens", "[['_', 'Q'], ('Q', '_')]"),
        ("chain_sum", "__import__('os')"),  # nothing evaluates this one
    ],
)
def test_answers_of_the_family_pass(family: str, answer: str) -> None:
    assert find_fault(family, answer) == ""


@pytest.mark.parametrize(
    ("family", "answer", "fault"),
    [
        ("countdown", "x + 1", "'x' is not allowed"),
        ("countdown", "2**3", "'**' is not allowed"),
        ("countdown", "1 +", "the end"),
        ("countdown", "1 = 1", "'= 1' is not allowed"),
        ("countdown", "(" * 60 + "1" + ")" * 60, "levels deep"),
        ("countdown", "1" * 50, "a number of 50 characters"),
        ("countdown", "-" * 60 + "1", "signs in a row"),
        ("countdown", "1*" * 300 + "1", "degree"),
        ("countdown", "1+" * 3000 + "1", "characters"),
        ("countdown", "３+4", "ASCII"),
        ("polynomial_multiplication", "x(2)", "'x' is not allowed"),
        ("polynomial_multiplication", "x.y", "'.y' is not allowed"),
        ("polynomial_multiplication", "x[0]", "'[0]' is not allowed"),
        ("polynomial_multiplication", "9**9**9", "a power of a power"),
        ("polynomial_multiplication", "9**999", "degree"),
        ("polynomial_multiplication", "((9**64)**64)", "degree"),
        ("polynomial_multiplication", "9**(9*9*9)", "degree"),
        ("polynomial_multiplication", "9**(9)**9", "a power of a power"),
        ("simple_integration", "integrate(x)", "'integrate' is not allowed"),
        ("simple_integration", "sin", "( is expected"),
        ("simple_integration", "lambda x, y", "', y' is not allowed"),
        ("simple_integration", "lambda", "'lambda' is not allowed"),
        ("simple_integration", "x if x else x", "'if'"),
        ("binary_matrix", "[x for x in y]", "'x for x in y]' is not allowed"),
        ("binary_matrix", "[1, 2", "the end"),
        ("binary_matrix", "[1] * 9", "'* 9' is not allowed"),
        ("string_insertion", "answer", "'answer' is not allowed"),
        ("string_insertion", "'a\\x41'", "is not allowed"),
        ("n_queens", "[" * 60 + "]" * 60, "levels deep"),
        ("n_queens", "f'{1}'", "is not allowed"),
    ],
)
def test_other_answers_are_refused_with_a_reason(family: str, answer: str, fault: str) -> None:
    assert fault in find_fault(family, answer)


@pytest.mark.parametrize("family", GRAMMARS)
def test_the_longest_texts_are_read_in_no_time(family: str) -> None:
    start = time.perf_counter()
    for text in ("(" * 4000, "1" * 4000, "1+" * 2000, " " * 3999 + "!", "[" * 4000, "'" * 4000, "1 " * 2000):
        find_fault(family, text)
    assert time.perf_counter() - start < 1
