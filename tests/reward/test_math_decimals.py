"""Constants to 120 digits: against printed digits, identities, near misses and floating point."""

from __future__ import annotations

import cmath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.reward.math.algebra import Ratio
from rlvr.reward.math.decimals import equal_constants, evaluate
from rlvr.reward.math.numeric import approximate
from rlvr.reward.math.parse import Reader

PRINTED = {
    "\\pi": "3.14159265358979323846264338327950288419716939937510",
    "e": "2.71828182845904523536028747135266249775724709369995",
    "\\sqrt2": "1.41421356237309504880168872420969807856967187537694",
    "\\ln 2": "0.69314718055994530941723212145817656807550013436025",
    "\\sin 1": "0.84147098480789650665250232163029899962256306079837",
    "\\cos 1": "0.54030230586813971740093660744297660373231042061792",
}
EQUAL = [
    ("\\sqrt{3+2\\sqrt2}", "1+\\sqrt2"), ("\\sqrt[3]{20+14\\sqrt2}", "2+\\sqrt2"), ("\\tan 1\\cot 1", "1"),
    ("\\sqrt{10+2\\sqrt5}", "4\\sin 72^\\circ"), ("\\arctan\\frac12+\\arctan\\frac13", "\\frac{\\pi}{4}"),
    ("4\\arctan\\frac15-\\arctan\\frac{1}{239}", "\\frac{\\pi}{4}"),
    ("\\arcsin\\frac35+\\arcsin\\frac45", "\\frac{\\pi}{2}"),
    ("\\ln 6", "\\ln 2+\\ln 3"), ("2\\sinh 1", "e-e^{-1}"), ("\\cosh^2 3-\\sinh^2 3", "1"),
    ("5e^{i\\arctan\\frac43}", "3+4i"),
    ("\\tan 20^\\circ\\tan 40^\\circ\\tan 80^\\circ", "\\sqrt3"),
    ("\\cos 20^\\circ\\cos 40^\\circ\\cos 80^\\circ", "\\frac18"),
    ("\\sin(10^6)^2+\\cos(10^6)^2", "1"), ("e^{\\frac{\\ln 2}{2}}", "\\sqrt2"), ("\\sqrt{-3+4i}\\sqrt{-3+4i}", "-3+4i"),
]  # fmt: skip
NEAR_MISSES = [  # digits in which they agree
    ("\\sqrt2+\\sqrt3", "\\pi"),  # 2
    ("e^{\\pi\\sqrt{163}}", "262537412640768744"),  # 30
    ("\\sqrt{3+2\\sqrt2}", "2.4142135623730950488016887242096980785"),  # 37
    ("\\sin 1", "0.841470984807896506652502321630298999622"),  # 39
    ("\\ln 2", "\\ln 2+10^{-30}\\sin 1"),
]


def read(text: str) -> Ratio:
    return Reader(text).expression()


@pytest.mark.parametrize(("text", "digits"), PRINTED.items())
def test_printed_digits(text: str, digits: str) -> None:
    assert str(evaluate(read(text))).startswith(digits[:-1])


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_identities_of_constants(a: str, b: str) -> None:
    assert equal_constants(read(a), read(b)) is True
    assert equal_constants(read(f"{a}+10^{{-30}}"), read(b)) is False


@pytest.mark.parametrize(("a", "b"), NEAR_MISSES)
def test_values_that_agree_in_many_digits_differ(a: str, b: str) -> None:
    assert equal_constants(read(a), read(b)) is False


def test_between_40_and_100_digits_there_is_no_verdict() -> None:
    """So much agreement is no accident of an honest answer, and no proof."""
    assert equal_constants(read("\\ln 2"), read("\\ln 2+10^{-60}")) is None
    assert equal_constants(read("\\ln 2"), read("\\ln 2+10^{-110}")) is True


@pytest.mark.parametrize(
    "text", ["x", "\\sin(10^{30})", "\\ln(0)", "\\ln(-2)", "\\arcsin 2", "\\infty", "e^{10^{9}}", "\\sin i"]
)
def test_what_has_no_value_here(text: str) -> None:
    try:
        value = read(text)
    except ValueError:
        return
    assert evaluate(value) is None
    assert equal_constants(value, read("1")) is None


PARTS = [
    "\\sqrt{2+\\sqrt3}",
    "\\sin 2",
    "\\cos 3",
    "\\tan 4",
    "\\ln 5",
    "e^{1.5}",
    "\\arctan 7",
    "\\pi",
    "\\frac{3}{7}",
]


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4), st.sampled_from(["+", "-", "\\cdot "]))
def test_floating_point_agrees(parts: list[str], sign: str) -> None:
    value = read(sign.join(parts))
    exact, near = evaluate(value), approximate(value)
    assert exact is not None
    assert near is not None
    assert cmath.isclose(float(exact), near, rel_tol=1e-12, abs_tol=1e-12)  # four operations on values below 10^4
