"""What follows from interim evaluations: the best, and a plateau. Everything by hand from the pass rates."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rlvr.core.task_statistics import Interval, wilson_interval
from rlvr.training.interim import InterimResult, describe_plateau, find_best, read_interim_results


def row(step: int, rate: Any, low: Any = 0.0, high: Any = 1.0, phase: str = "rl") -> dict[str, Any]:
    name = "test/env/all/correct"
    return {"phase": phase, "step": step, name: rate, f"{name}/low": low, f"{name}/high": high}


def results(*rates: float, width: float = 0.196) -> list[InterimResult]:
    """One after every 10 steps; with this width the standard error is 0.05."""
    return [InterimResult(10 * i, Interval(r, r - width / 2, r + width / 2)) for i, r in enumerate(rates, 1)]


def test_rows_of_reinforcement_learning_with_an_interval_are_read() -> None:
    """Step 9 is the tenth. Fine-tuning, other steps, rows of older versions and damaged ones are left out."""
    found = read_interim_results(
        [
            row(4, 0.1, phase="sft"),
            {"phase": "rl", "step": 8, "reward": 1.0},
            row(9, 0.5, 0.4, 0.6),
            {"phase": "rl", "step": 10, "test/env/all/correct": 0.9},
            *(row(11, odd) for odd in (math.nan, 7, "high", None, 10**400, -0.1)),
            row(12, 0.5, 0.6, 0.7),
        ]
    )
    assert found == [InterimResult(10, Interval(0.5, 0.4, 0.6))]


def test_the_best_is_the_highest_of_equal_ones_by_reward_and_then_the_earliest() -> None:
    assert find_best(results(0.2, 0.4, 0.3, 0.4, 0.1)) == results(0.2, 0.4)[1]
    nothing_passes = [
        InterimResult(step, Interval(0, 0, 0.1), reward) for step, reward in ((1, 0.2), (2, 0.6), (3, 0.5))
    ]
    assert find_best(nothing_passes) == nothing_passes[1]
    rows = [row(1, 0.5, 0.4, 0.6) | {"test/env/all/reward/total": 0.7}]
    assert read_interim_results(rows)[0].reward == 0.7
    assert find_best([]) is None


def test_noise_is_one_standard_error() -> None:
    """200 tasks at a pass rate of 0.5: sqrt(0.25 / 200) = 0.035; Wilson's interval is a little narrower."""
    assert results(0.5)[0].noise_bound == pytest.approx(0.55, abs=1e-4)
    half = wilson_interval(0.5, 200)
    assert InterimResult(1, half).noise_bound == pytest.approx(0.5 + math.sqrt(0.25 / 200), abs=5e-4)


@pytest.mark.parametrize(
    ("rates", "patience", "ends"),
    [
        ((0.3, 0.3, 0.34), 2, True),
        ((0.3, 0.3, 0.34), 3, False),
        ((0.3, 0.3, 0.36), 2, False),  # 0.36 is beyond 0.35
        ((0.3, 0.33, 0.36, 0.39), 2, False),  # small gains add up: 0.36 is a new best
        ((0.3, 0.36, 0.4, 0.4), 2, True),  # from 0.36 it takes 0.41
        ((0.6, 0.2, 0.3, 0.5), 3, True),  # a fall is no best
        ((0.3, 0.3, 0.3, 0.3), 0, False),
        ((), 1, False),
        ((0.3,), 1, False),
    ],
)
def test_a_plateau_is_so_many_evaluations_without_a_best_beyond_noise(
    rates: tuple[float, ...], patience: int, ends: bool
) -> None:
    assert bool(describe_plateau(results(*rates), patience)) is ends


def test_the_reason_names_both_pass_rates_and_the_setting() -> None:
    reason = describe_plateau(results(0.3, 0.31, 0.32), 2)
    assert reason.startswith("plateau: 2 interim evaluations in a row")
    assert "above 35.0%" in reason and "30.0% after step 10" in reason and "training.patience" in reason
