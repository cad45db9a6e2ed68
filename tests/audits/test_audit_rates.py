"""Pass rates with intervals: Wilson's for rows that stand alone, wider ones where rows are answers to one task."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import scipy

from rlvr.audits.pass_rate import PassRate


def rate_of(rows: Sequence[tuple[bool, str | None]]) -> PassRate:
    rate = PassRate()
    for passed, task in rows:
        rate.add(passed, task)
    return rate


def test_rows_of_their_own_tasks_have_wilsons_interval() -> None:
    """With and without names, and where all or none passed."""
    for passed in (0, 17, 40):
        theirs = scipy.stats.binomtest(passed, 40).proportion_ci(method="wilson")
        for named in (True, False):
            ours = rate_of([(i < passed, f"t{i}" if named else None) for i in range(40)]).interval()
            assert ours.value == passed / 40
            assert abs(ours.low - theirs.low) < 1e-12 and abs(ours.high - theirs.high) < 1e-12


def test_answers_that_are_all_alike_count_as_their_tasks() -> None:
    """Ten copies of each answer: 40 tasks are worth 40 rows, never 400."""
    copies = rate_of([(i < 17, f"t{i}") for i in range(40) for _ in range(10)]).interval()
    theirs = scipy.stats.binomtest(17, 40).proportion_ci(method="wilson")
    assert (copies.low, copies.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_one_task_says_no_more_than_one_row_and_neither_do_equal_ones() -> None:
    single = scipy.stats.binomtest(1, 1).proportion_ci(method="wilson")
    assert abs(rate_of([(True, "t")] * 50).interval().low - single.low) < 1e-12
    two = rate_of([(True, "a")] * 9 + [(True, "b")] * 9).interval()
    assert abs(two.low - scipy.stats.binomtest(2, 2).proportion_ci(method="wilson").low) < 1e-12


def test_the_interval_holds_the_truth_as_often_as_it_says_where_tasks_differ_in_difficulty_and_size() -> None:
    """Nominal 95 %: 300 files of 60 tasks with 2 to 12 answers each. An interval over rows would hold it in 67 %."""
    random.seed(3)
    held = naive = 0
    for _ in range(300):
        rows: Sequence[tuple[bool, str | None]] = []
        for task in range(60):
            chance = random.betavariate(0.6, 0.6)
            rows += [(random.random() < chance, str(task)) for _ in range(random.randint(2, 12))]
        ours = rate_of(rows).interval()
        held += ours.low <= 0.5 <= ours.high
        plain = rate_of([(passed, None) for passed, _ in rows]).interval()
        naive += plain.low <= 0.5 <= plain.high
    assert held / 300 > 0.91 and naive / 300 < 0.8
