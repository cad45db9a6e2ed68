"""Intervals and the signed-rank test over tasks, against enumeration, scipy and figures worked out by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.core import task_statistics
from rlvr.core.task_statistics import (
    approximate_rank_p_value,
    exact_rank_p_value,
    mean_interval,
    share_interval,
    signed_rank_p_value,
    t_quantile,
    wilson_interval,
)


def pratt_by_enumeration(changes: Sequence[int]) -> Fraction:
    """Every sign of every changed task, one by one; ranks by counting, zeros among them."""
    size = [abs(change) for change in changes]
    ranks = [Fraction(2 * sum(other < one for other in size) + size.count(one) + 1, 2) for one in size]
    moved = [(rank, change) for rank, change in zip(ranks, changes, strict=True) if change]
    seen = abs(sum(rank if change > 0 else -rank for rank, change in moved))
    sums = [
        abs(sum(sign * rank for sign, (rank, _) in zip(signs, moved, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(moved))
    ]
    return Fraction(sum(one >= seen for one in sums), len(sums))


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=10))
@settings(max_examples=150, deadline=None)
def test_the_signed_rank_test_is_pratt_s_exactly(changes: list[int]) -> None:
    assert signed_rank_p_value(changes) == pytest.approx(float(pratt_by_enumeration(changes)), rel=1e-12)


def test_zeros_take_part_in_the_ranking_by_hand() -> None:
    """0, 0, 1, 1, -2 have the ranks 1.5, 1.5, 3.5, 3.5, 5: the sum of the signed ones is 2, and 6 of 8 are that far
    from 0 or farther (12, 5, 5, 5, 5 and 2, 2 and their like). Without zeros 1.5 + 1.5 - 3 = 0 would give 1."""
    sums = sorted(abs(a + b + c) for a in (3.5, -3.5) for b in (3.5, -3.5) for c in (5, -5))
    assert sums == [2, 2, 5, 5, 5, 5, 12, 12]
    assert signed_rank_p_value([0, 0, 1, 1, -2]) == 1.0
    assert signed_rank_p_value([0, 0, 1, 1, 2]) == 0.25
    assert signed_rank_p_value([0, 0, 0]) == signed_rank_p_value([]) == signed_rank_p_value([0.5, 0]) == 1.0


@pytest.mark.parametrize("share", [0.975, 0.995, 0.8, 0.025])
def test_the_quantile_of_student_s_t_is_scipy_s(share: float) -> None:
    degrees = np.array([1, 2, 3, 4, 5, 9, 19, 63, 99, 1_199, 100_000])
    assert t_quantile(share, degrees) == pytest.approx(scipy.stats.t.ppf(share, degrees), rel=1e-10)
    assert (
        float(t_quantile(0.975, 2)) == pytest.approx(0.95 / math.sqrt(2 * 0.975 * 0.025), rel=1e-14)
        and t_quantile(0.5, 3) == 0
    )


@pytest.mark.parametrize(("gains", "expected"), [(18, 0.0458934307), (19, 0.0312117934)])
def test_nothing_jumps_as_the_26th_task_changes(gains: int, expected: float) -> None:
    """75 tasks stay, some gain 1/8, 7 lose 2/8. Without the zeros' ranks the first p would be 0.81.

    Two tied sizes make two binomial numbers of losses, so the tail is a double sum by hand.
    """
    small, large = 75 + Fraction(gains + 1, 2), 75 + gains + 4
    seen = gains * small - 7 * large
    tail = sum(
        math.comb(gains, i) * math.comb(7, j)
        for i in range(gains + 1)
        for j in range(8)
        if abs((gains - 2 * i) * small + (7 - 2 * j) * large) >= seen
    )
    found = signed_rank_p_value([0.125] * gains + [-0.25] * 7 + [0.0] * 75)
    assert found == pytest.approx(tail / 2 ** (gains + 7), rel=1e-12) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("changed", [30, 100, 400])
def test_many_changes_are_near_scipy_s_normal_approximation(changed: int) -> None:
    """Whose error falls with the number of tasks: it is 2.4e-3 at 30, 4e-4 at 400."""
    generator = np.random.default_rng(changed)
    changes = np.concatenate([generator.normal(0.1, 1, changed), np.zeros(20)])
    theirs = scipy.stats.wilcoxon(changes, zero_method="pratt", correction=True, method="asymptotic")
    assert signed_rank_p_value(changes.tolist()) == pytest.approx(float(theirs.pvalue), abs=0.015 / changed**0.5)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tasks", "changed"), [(400, 400), (4000, 120)])
def test_exact_and_approximate_p_values_meet_where_one_takes_over(tasks: int, changed: int, tied: bool) -> None:
    """With many zeros the ranks are nearly equal, and a plain normal sum would be off by 0.04. Few sizes leave gaps."""
    generator = np.random.default_rng(tasks + tied)
    sizes = generator.choice([1, 2, 3], changed, p=[0.8, 0.15, 0.05]) if tied else np.arange(1, changed + 1)
    ranks = np.rint(2 * scipy.stats.rankdata(np.concatenate([np.zeros(tasks - changed), sizes])))[tasks - changed :]
    ranks = ranks.astype(np.int64) // np.gcd.reduce(ranks.astype(np.int64))
    for shift in (0.0, 0.1, 0.2):
        signs = np.where(generator.random(changed) < 0.5 + shift / 2, 1, -1)
        distance = abs(int(ranks @ signs))
        exact, approximate = exact_rank_p_value(ranks, distance), approximate_rank_p_value(ranks, distance)
        assert abs(exact - approximate) < (5e-3 if tied else 1e-4)


def test_the_approximation_takes_over_beyond_the_stated_size(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [i if i % 3 else -i for i in range(1, 33)]
    exact = signed_rank_p_value(changes)
    monkeypatch.setattr(task_statistics, "MOST_ADDITIONS", 32 * sum(range(1, 33)) - 1)
    assert signed_rank_p_value(changes) != exact
    assert signed_rank_p_value(changes) == pytest.approx(exact, abs=1e-3)
    monkeypatch.setattr(task_statistics, "MOST_ADDITIONS", 32 * sum(range(1, 33)))
    assert signed_rank_p_value(changes) == exact


def test_one_completion_a_task_has_wilsons_interval() -> None:
    for passed in (0, 3, 90, 100):
        ours = share_interval([1.0] * passed + [0.0] * (100 - passed))
        theirs = scipy.stats.binomtest(passed, 100).proportion_ci(method="wilson")
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
        assert (ours.value, ours.n) == (passed / 100, 100)


def test_an_interval_of_a_share_never_leaves_the_unit_interval_nor_shrinks_to_a_point() -> None:
    everything, nothing = share_interval([1.0] * 50, [8] * 50), share_interval([0.0] * 50, [8] * 50)
    assert everything.value == everything.high == 1.0 and 0.9 < everything.low < 1.0
    assert nothing.value == nothing.low == 0.0 and 0.0 < nothing.high < 0.1
    assert everything.low == wilson_interval(1.0, 50).low  # the completions of a task may all be alike
    assert math.isnan(share_interval([]).value) and share_interval([]).n == 0


def test_rates_that_agree_by_chance_are_no_surer_than_coins() -> None:
    """20 tasks with 3 or 4 of 8 passed: their spread alone says 0.4375 +- 0.014, 160 coins say +- 0.076."""
    found = share_interval([3 / 8, 4 / 8] * 10, [8] * 20)
    assert (found.low, found.high) == pytest.approx((0.362991, 0.514940), abs=1e-6)
    assert (found.low, found.high) == (wilson_interval(0.4375, 160).low, wilson_interval(0.4375, 160).high)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_no_interval_is_narrower_than_the_binomial_nor_wider_than_that_of_tasks(passed: list[int]) -> None:
    rate, tasks = sum(passed) / 6 / len(passed), len(passed)
    found = share_interval([one / 6 for one in passed], [6] * tasks)
    narrow, wide = wilson_interval(rate, 6 * tasks), wilson_interval(rate, tasks)
    assert wide.low - 1e-12 <= found.low <= narrow.low + 1e-12
    assert narrow.high - 1e-12 <= found.high <= wide.high + 1e-12


def test_tasks_of_different_numbers_count_as_the_variance_of_their_mean() -> None:
    """Rates of 2 and of 8 completions: (p q / 2 + p q / 8) / 4 = p q / 6.4, so at most 6.4 coins, not 10."""
    found = share_interval([0.5, 0.5], [2, 8])
    assert (found.low, found.high) == pytest.approx((wilson_interval(0.5, 6.4).low, wilson_interval(0.5, 6.4).high))


@pytest.mark.parametrize(
    ("tasks", "samples", "skills", "expected"),
    [
        (5, 4, (0.2, 0.9), 0.9463009),
        (6, 3, (0.2, 0.9), 0.9669874),
        (4, 8, (0.3, 0.6), 0.9580687),
        (8, 4, (0.1, 0.5, 0.9), 0.9682280),
        (8, 4, (0.5,), 0.9777237),
        (20, 1, (0.3,), 0.9752179),
    ],
)
def test_the_interval_of_few_tasks_holds_the_truth_in_95_percent(
    tasks: int, samples: int, skills: tuple[float, ...], expected: float
) -> None:
    """Every outcome with its chance: each task has one of the `skills` with equal chance."""
    chance = [
        sum(math.comb(samples, c) * skill**c * (1 - skill) ** (samples - c) for skill in skills) / len(skills)
        for c in range(samples + 1)
    ]
    truth, coverage = sum(skills) / len(skills), 0.0
    for outcome in itertools.combinations_with_replacement(range(samples + 1), tasks):
        counts = [outcome.count(c) for c in range(samples + 1)]
        found = share_interval([c / samples for c in outcome], [samples] * tasks)
        if found.low <= truth <= found.high:
            ways = math.factorial(tasks) / math.prod(map(math.factorial, counts))
            coverage += ways * math.prod(p**k for p, k in zip(chance, counts, strict=True))
    assert coverage == pytest.approx(expected, abs=1e-6) and coverage > 0.94


def test_the_interval_of_a_mean_is_student_s_by_hand() -> None:
    """1, 2, 3: mean 2, deviation 1, t(2) = 4.302653, so 2 +- 4.302653 / sqrt(3)."""
    found = mean_interval([1.0, 2.0, 3.0])
    assert (found.value, found.n) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-6)
    values = np.random.default_rng(0).normal(size=7)
    theirs = scipy.stats.t.interval(0.95, 6, loc=values.mean(), scale=scipy.stats.sem(values))
    assert (mean_interval(values.tolist()).low, mean_interval(values.tolist()).high) == pytest.approx(theirs)


def test_one_value_has_a_mean_and_no_interval_and_none_has_nothing() -> None:
    assert mean_interval([0.25]).to_json() == {"value": 0.25, "low": None, "high": None, "n": 1}
    assert mean_interval([]).to_json() == {"value": None, "low": None, "high": None, "n": 0}


def test_the_interval_of_the_mean_of_four_values_holds_the_truth_in_95_percent() -> None:
    """4,000 samples of a normal distribution, fixed by their seed; mean +- 1.96 se would hold it in 85 %."""
    samples = np.random.default_rng(4).normal(size=(4000, 4))
    held = sum(found.low <= 0 <= found.high for found in map(mean_interval, samples.tolist()))
    normal = np.abs(samples.mean(1)) <= 1.96 * samples.std(1, ddof=1) / 2
    assert 0.943 < held / 4000 < 0.957 and normal.mean() < 0.87
