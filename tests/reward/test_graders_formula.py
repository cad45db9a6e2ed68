"""Formulas of multi graders: the value is that of Python's own arithmetic; nothing hostile hangs or gets through."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.reward.graders.formula import FUNCTIONS, Formula, NoFormulaValue

NAMES = ("a", "b", "style_1")


def value(text: str, **scores: float) -> float:
    return Formula.of(text, set(NAMES) | set(scores)).value(scores)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 - 2 - 3", -4.0),
        ("8 / 4 / 2", 1.0),
        ("2 ^ 3 ^ 2", 512.0),
        ("-2 ^ 2", -4.0),
        ("(-2) ^ 2", 4.0),
        ("2 ^ -1", 0.5),
        ("2 * -3 ^ 2", -18.0),
        ("2 + 3 * 4", 14.0),
        ("--2 - +1", 1.0),
        (".5 + 1e-1 + 2.", 2.6),
        ("min(3, a, 2) + max(a)", 1.0),
        ("abs(-2) + ceil(1.2) + floor(-1.2) + sqrt(9) + exp(0) + log(1)", 2 + 2 - 2 + 3 + 1 + 0),
        ("0.7*a + 0.3*style_1", 0.5),
    ],
)
def test_operators_and_functions_are_those_of_mathematics(text: str, expected: float) -> None:
    assert value(text, a=0.5, style_1=0.5) == pytest.approx(expected, abs=1e-12)


def numbers() -> st.SearchStrategy[str]:
    return st.integers(0, 99).map(str) | st.floats(0, 100, allow_nan=False).map(lambda x: f"{x:.3f}")


def join_parts(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(parts, st.sampled_from(["+", "-", "*", "/", "^"]), parts).map(" ".join)
    call = st.tuples(st.sampled_from(["abs", "sqrt", "floor", "ceil"]), parts).map(lambda p: f"{p[0]}({p[1]})")
    many = st.tuples(st.sampled_from(["min", "max"]), parts, parts).map(lambda p: f"{p[0]}({p[1]},{p[2]})")
    return two | two.map("({})".format) | parts.map("-{}".format) | call | many


@given(st.recursive(numbers() | st.sampled_from(NAMES[:2]), join_parts, max_leaves=12))
def test_a_formula_has_the_value_that_python_gives_it(text: str) -> None:
    scores = {"a": 0.25, "b": -1.5}
    names = {
        "abs": math.fabs,
        "sqrt": math.sqrt,
        "floor": math.floor,
        "ceil": math.ceil,
        "min": min,
        "max": max,
        **scores,
    }
    floats = re.sub(r"(?<![\w.])(\d+)(?![\d.])", r"\1.0", text)  # integers of Python grow without bound
    try:
        expected = eval(floats.replace("^", "**"), {"__builtins__": {}}, names)
    except (ArithmeticError, ValueError, TypeError):  # a TypeError is a complex number in a function
        expected = None
    if expected is None or isinstance(expected, complex) or not math.isfinite(expected):
        with pytest.raises(NoFormulaValue):
            Formula.of(text, NAMES).value(scores)
    else:
        assert Formula.of(text, NAMES).value(scores) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    "text", ["10^10^10", "9^9^9^9^9^9", "(-1)^0.5", "a/0", "log(0)", "sqrt(-1)", "exp(1000)", "0^-1"]
)
def test_a_value_that_is_not_finite_is_an_error_that_names_the_operation(text: str) -> None:
    with pytest.raises(NoFormulaValue, match=r"has no value: "):
        value(text, a=1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a formula over a, b"),
        (3, "expected a formula over"),
        ("a +", "expected a number, a grader's name, a function or '\\(', found its end"),
        ("a b", "expected an operator, .* or the end, found 'b' at character 2"),
        ("(a", "expected '\\)' or an operator"),
        ("styl_1", "did you mean 'style_1'"),
        ("sqr(a)", "did you mean 'sqrt'"),
        ("min", "a function, which needs parentheses"),
        ("sqrt(1, 2)", "sqrt is given 2 values, expected at most 1"),
        ("min()", "found '\\)' at character 4"),
        ("a.real", "found '.' at character 1"),
        ("a)", "found '\\)' at character 1"),
        ("(a, b)", "found ',' at character 2"),
        ("__import__('os')", "the functions are: abs, ceil"),
        ("a if b else 0", "found 'if'"),
        ("a ** 2", "found '\\*' at character 3"),
        ("1e999", "too large"),
        ("a" * 4001, "at most 4,000"),
        ("(" * 2000 + "a" + ")" * 1999, "nested more than 50 deep"),
        ("-" * 3000 + "a", "nested more than 50 deep"),
        ("2^" * 1500 + "a", "nested more than 50 deep"),
        ("min(" * 900 + "a" + ")" * 900, "at most 4,000|nested more than 50 deep"),
    ],
)
def test_a_bad_formula_is_refused_with_the_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Formula.of(text, NAMES)


def test_a_long_formula_needs_no_deep_stack() -> None:
    assert value("+".join(["a"] * 1999), a=1.0) == 1999


def test_the_functions_are_those_of_the_schema() -> None:
    assert sorted(FUNCTIONS) == ["abs", "ceil", "exp", "floor", "log", "max", "min", "sqrt"]
