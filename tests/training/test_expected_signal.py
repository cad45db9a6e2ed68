"""The expected share of groups with signal: closed cases, simulated tasks, and the edges."""

from __future__ import annotations

import numpy as np
import pytest

from rlvr.training.expected_signal import CONCENTRATIONS, expect_signal


def test_tasks_that_are_all_alike_give_the_binomial_share():
    """1 - p^G - (1-p)^G at p = 1/2: 1/2 for two completions, 1 - 2/256 for eight."""
    even = [(50, 100)] * 60
    assert expect_signal(even, 2) == pytest.approx(0.5, abs=0.002)
    assert expect_signal(even, 8) == pytest.approx(1 - 2 / 256, abs=0.002)
    assert expect_signal(even, 1) == pytest.approx(0.0, abs=1e-11), "log-gammas of 6,000 round at 1e-12"


def test_tasks_that_pass_always_or_never_give_no_signal():
    """Pass rates of 1/2 on average say nothing: what counts is how they differ from task to task."""
    split = [(4, 4), (0, 4)] * 50
    assert expect_signal(split, 8) < 0.05
    assert expect_signal([(0, 4)] * 50, 8) < 0.02 and expect_signal([(4, 4)] * 50, 8) < 0.02


@pytest.mark.parametrize("shape", [(0.3, 2.0), (1.0, 1.0), (0.2, 6.0), (3.0, 1.0)])
def test_the_truth_of_simulated_tasks_is_met_on_average(shape: tuple[float, float]):
    """Four completions a task estimate groups of eight. The truth is the mean of 1 - p^8 - (1-p)^8 over a million p.

    Of one evaluation of 200 tasks the estimate is off by its own noise; the mean over 30 of them shows the bias.
    """
    draws = np.random.default_rng(1)
    p = draws.beta(*shape, size=1_000_000)
    truth = float(np.mean(1 - p**8 - (1 - p) ** 8))
    guesses = []
    for _ in range(30):
        passed = draws.binomial(4, draws.beta(*shape, size=200))
        guesses.append(expect_signal([(int(c), 4) for c in passed], 8))
    error = np.std(guesses) / np.sqrt(len(guesses))
    assert abs(np.mean(guesses) - truth) < 4 * error + 0.02, "the grid of concentrations has steps of a factor 1.4"


def test_the_beta_binomial_likelihood_is_that_of_scipy():
    """An independent fit: scipy's beta-binomial picks the same concentration, and its moments give the same share."""
    from scipy import stats

    counts = [(0, 4)] * 30 + [(1, 4)] * 9 + [(2, 3)] * 4 + [(4, 4)] * 2
    mean = (sum(c for c, _ in counts) + 0.5) / (sum(n for _, n in counts) + 1)
    a, b = max(
        ((mean * s, (1 - mean) * s) for s in CONCENTRATIONS),
        key=lambda ab: sum(stats.betabinom.logpmf(c, n, *ab) for c, n in counts),
    )
    share = 1 - stats.betabinom.pmf(0, 6, a, b) - stats.betabinom.pmf(6, 6, a, b)
    assert expect_signal(counts, 6) == pytest.approx(share, rel=1e-9)


def test_nothing_judged_is_an_error():
    with pytest.raises(ValueError, match="0 judged"):
        expect_signal([], 8)
    with pytest.raises(ValueError, match="group_size=0"):
        expect_signal([(1, 2)], 0)
