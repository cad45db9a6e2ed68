"""The learner's benchmark: both sides learn the same from the same rows, and count the same work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.learner import GROUP, GROWTH, MIXED, cases, memory_turn, ours, plain, rows
from benchmarks.measure import BenchSettings
from tests.kit.rounding import BACKWARD, FORWARD, tolerance

SMALL = {**GROWTH.model, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "head_dim": 16}


@pytest.mark.parametrize("shape", [GROUP, MIXED], ids=lambda shape: shape.name)
def test_ours_and_the_plain_step_have_the_same_gradients(shape, tmp_path: Path) -> None:
    """And the step moves them alike: their norm changes by the same, to a hundredth.

    Not to rounding: from the second call on, each side has the weights that its own step made.
    """
    shape = replace(shape, groups=2, prompt=(30, 30), answer=(4, 16), model=SMALL)
    setting = BenchSettings(scratch=tmp_path)
    us, them = ours(setting, shape), plain(setting, shape)
    results = [(us(), them()) for _ in range(2)]
    assert all(mine.units == theirs.units and mine.cost < theirs.cost for mine, theirs in results)
    (mine, theirs), (after, after_theirs) = ([result.facts["gradient norm"] for result in pair] for pair in results)
    assert mine == pytest.approx(theirs, rel=tolerance(2 * (FORWARD + BACKWARD)))  # hidden states of twice the width
    assert abs(after_theirs - theirs) > 0.01 * theirs
    assert after - mine == pytest.approx(after_theirs - theirs, rel=0.01)


def test_the_required_work_counts_each_prompt_once(tmp_path: Path) -> None:
    """Two groups of 8 answers to 30 tokens: the last token of a row is never read."""
    shape = replace(GROUP, prompt=(30, 30), answer=(4, 4), model=SMALL)
    done = ours(BenchSettings(scratch=tmp_path), shape)()
    assert done.units == 16 * 33 and done.cost == 3 * (2 * 30 + 16 * 3)


def test_rows_are_reproducible() -> None:
    first, again = rows(MIXED, 100), rows(MIXED, 100)
    assert [d.model_input.tokens for d in first] == [d.model_input.tokens for d in again]
    assert len({d.model_input.length for d in first}) > len(first) // 2


def test_the_memory_of_a_large_step_is_found_once(tmp_path: Path) -> None:
    turn = memory_turn(BenchSettings(scratch=tmp_path), replace(GROUP, prompt=(30, 30), answer=(4, 4), model=SMALL))
    done = turn()
    assert done.units == 16 * 33 and done.seconds and turn() is done
    assert {"peak over weights, gradients and moments", "GB beyond the libraries"} <= done.facts.keys()


def test_a_users_own_model_is_measured_within_its_context_length(tmp_path: Path) -> None:
    """The memory_turn model and the growth_case rows have sizes of their own."""
    names = [case.name for case in cases(BenchSettings(model=tmp_path))]
    assert names == [GROUP.name, MIXED.name]
    assert "memory" not in [case.name for case in cases(BenchSettings(quick=True))]
    assert "memory" in [case.name for case in cases(BenchSettings())]
