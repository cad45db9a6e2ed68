"""Intervals and tests over seeds: numbers worked out by hand, and scipy's own tests as a second opinion."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import scipy

from benchmarks.algorithm_report import adjust_holm, t_test_p_value
from rlvr.studies.seed_statistics import compare_pairs, sign_flip_p_value, spread


def test_the_interval_is_student_s_by_hand() -> None:
    """0.4, 0.5, 0.6: mean 0.5, sd 0.1, t of 2 degrees of freedom 4.3027, half 4.3027 * 0.1 / sqrt(3) = 0.24842."""
    result = spread([0.4, 0.6, 0.5])
    assert result is not None and (result["n"], result["least"], result["most"]) == (3, 0.4, 0.6)
    assert result["mean"] == pytest.approx(0.5) and result["sd"] == pytest.approx(0.1)
    assert result["low"] == pytest.approx(0.25159, abs=1e-5) and result["high"] == pytest.approx(0.74841, abs=1e-5)


def test_the_interval_is_scipy_s() -> None:
    draw = random.Random(1)
    values = [draw.gauss(0.9, 0.03) for _ in range(20)]
    expected = scipy.stats.t.interval(0.95, 19, loc=np.mean(values), scale=scipy.stats.sem(values))
    result = spread(values)
    assert result is not None and (result["low"], result["high"]) == pytest.approx(expected)


def test_an_interval_of_rates_stays_within_its_bounds() -> None:
    """0.9 and 1.0: mean 0.95, sd 0.0707, half 12.706 * 0.05 = 0.635."""
    wide, cut = spread([0.9, 1.0]), spread([0.9, 1.0], (0.0, 1.0))
    assert wide is not None and wide["high"] == pytest.approx(1.5853, abs=1e-4)
    assert cut is not None and (cut["low"], cut["high"]) == (pytest.approx(0.3147, abs=1e-4), 1.0)


def test_the_paired_t_test_is_scipy_s_and_right_by_hand() -> None:
    """-.1 -.2 -.3: t = 3.4641 with 2 degrees of freedom, p = 1 - t / sqrt(t^2 + 2) = 0.07418."""
    assert t_test_p_value([-0.1, -0.2, -0.3]) == pytest.approx(0.0741799, abs=1e-6)
    draw = random.Random(2)
    values = [draw.gauss(0.02, 0.03) for _ in range(9)]
    expected = scipy.stats.ttest_1samp(values, 0.0)
    assert t_test_p_value(values) == pytest.approx(expected.pvalue)  # pyright: ignore[reportAttributeAccessIssue]


def test_differences_without_a_spread_are_judged_by_their_signs() -> None:
    """.5 - .6, .6 - .7 and .8 - .9 differ in their last bits, which is no spread: 2 of 8 signs."""
    assert t_test_p_value([0.5 - 0.6, 0.6 - 0.7, 0.8 - 0.9]) == 0.25
    assert t_test_p_value([0.0, 0.0]) == t_test_p_value([0.3]) == 1.0


def test_holm_s_correction_by_hand() -> None:
    """0.01 x 3, 0.03 x 2, and 0.04 x 1, which is not let below the one before; never above 1."""
    assert adjust_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjust_holm([0.7, 0.6]) == [1.0, 1.0]
    assert adjust_holm([]) == []


def test_one_seed_has_no_interval_and_none_has_nothing() -> None:
    one = spread([0.7])
    assert one == {"n": 1, "mean": 0.7, "low": None, "high": None, "sd": None, "least": 0.7, "most": 0.7}
    assert spread([]) is None


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([1.0, 2.0, 3.0], 2 / 8),  # only +++ and --- reach 6
        ([1.0, 2.0, -3.0], 1.0),  # the sum is 0
        ([0.1, 0.2, 0.3, -0.1], 6 / 16),  # 0.5: +++-, -+++ and ++++ with their opposites; equal sums differ by rounding
        ([0.0, 0.0], 1.0),
        ([0.01] * 5, 2 / 32),
    ],
)
def test_the_p_value_counts_sign_flips(differences: list[float], expected: float) -> None:
    assert sign_flip_p_value(differences) == expected


def test_the_p_value_is_scipy_s_exact_one() -> None:
    draw = random.Random(2)
    differences = np.array([draw.gauss(0.5, 1.0) for _ in range(9)])
    result = scipy.stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=math.inf)
    assert sign_flip_p_value(list(differences)) == pytest.approx(result.pvalue)


def test_many_pairs_are_flipped_at_random() -> None:
    """25 equal differences have p = 2 / 2^25; as many of either sign have a large one."""
    assert sign_flip_p_value([0.01] * 25) < 1e-4
    assert sign_flip_p_value([0.01, -0.01] * 12 + [0.02]) > 0.5


def test_random_flips_are_near_the_exact_p_value_and_never_say_0() -> None:
    """24 pairs: all 2^24 signs, by the sums of two halves; 4 standard errors of 99,999 flips."""
    draw = random.Random(3)
    differences = [draw.gauss(0.3, 1.0) for _ in range(24)]
    halves = [np.array([0.0])] * 2
    for half in (0, 1):
        for one in differences[half::2]:
            halves[half] = np.concatenate([halves[half] + one, halves[half] - one])
    exact = np.mean(np.abs(halves[0][:, None] + halves[1]) >= abs(sum(differences)) - 1e-12)
    assert sign_flip_p_value(differences) == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 99_999))
    assert sign_flip_p_value([1.0] * 60) == 1e-5


def test_pairs_are_those_seeds_that_both_variants_have() -> None:
    """Differences 0.1, 0.2, 0.3 of seeds 2, 3, 4: mean 0.2, sd 0.1, half 0.24842: the interval contains 0."""
    first = {1: 0.9, 2: 0.5, 3: 0.5, 4: 0.5}
    result = compare_pairs(first, {2: 0.6, 3: 0.7, 4: 0.8, 5: 0.1})
    assert result["n"] == 3 and result["mean"] == pytest.approx(0.2) and result["sd"] == pytest.approx(0.1)
    assert result["low"] == pytest.approx(-0.04841, abs=1e-5)
    assert result["p_value"] == 0.25 == result["least_p"]


def test_without_two_pairs_there_is_no_test() -> None:
    assert compare_pairs({1: 0.5}, {2: 0.5}) == {"n": 0}
    one = compare_pairs({1: 0.5}, {1: 0.75})
    assert one["mean"] == 0.25 and one["low"] is None and "p_value" not in one


def test_no_fewer_seeds_are_named_than_a_p_value_below_5_percent_takes() -> None:
    assert compare_pairs({1: 0.0, 2: 0.0}, {1: 9.9, 2: 10.1})["seeds_needed"] == 6 and 2.0 ** (1 - 6) < 0.05


@pytest.mark.parametrize("effect", [0.3, 0.5, 1.0, 1.5])
def test_as_many_seeds_as_are_named_show_the_difference(effect: float) -> None:
    """Power of the paired t test by the noncentral t distribution: 80 % with that many seeds, less with one fewer."""
    pair = [effect - 1 / math.sqrt(2), effect + 1 / math.sqrt(2)]  # sd 1
    needed = compare_pairs({1: 0.0, 2: 0.0}, dict(enumerate(pair, 1)))["seeds_needed"]

    def power(n: int) -> float:
        return scipy.stats.nct.sf(scipy.stats.t.ppf(0.975, n - 1), n - 1, effect * math.sqrt(n))

    assert power(needed) > 0.79 and power(needed - 1) < 0.81


def test_no_number_of_seeds_is_named_for_a_difference_near_nothing() -> None:
    assert compare_pairs({1: 0.0, 2: 0.0}, {1: 0.1, 2: -0.1})["seeds_needed"] is None
    assert compare_pairs({1: 0.0, 2: 0.0}, {1: 0.101, 2: -0.1})["seeds_needed"] is None


def test_the_detectable_difference_is_that_of_the_number_of_pairs() -> None:
    """10 pairs of sd 1 show a difference of about 1: the textbook's sample size for d = 1 is 10."""
    values = [math.sqrt(0.9) * sign for sign in (1, -1)] * 5
    result = compare_pairs(dict.fromkeys(range(10), 0.0), dict(enumerate(values)))
    assert result["sd"] == pytest.approx(1.0) and result["detectable"] == pytest.approx(1.0, abs=0.01)
