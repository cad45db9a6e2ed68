"""Which groups an algorithm can learn from: one function, and what the metrics, the trainer and the diagnosis say."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.penalties import penalize_length
from rlvr.core.types import Trajectory, group_by
from rlvr.training.schedules.sync import Synchronous
from tests.kit.advantage_batch import trajectory
from tests.kit.table_trainer import make_trainer


def group(*answers: tuple[str, float | None]) -> list[Trajectory]:
    """Completions of one letter each, with their rewards; a critic's value is 1/4 everywhere."""
    made = [trajectory("g", f"g{i}", reward, 1) for i, (_, reward) in enumerate(answers)]
    for t, (letter, _) in zip(made, answers, strict=True):
        t.response_tokens = [ord(letter)]
    return made


MIXED, PASSED, FAILED = [("a", 1.0), ("b", 0.0)], [("a", 1.0), ("a", 1.0)], [("b", 0.0), ("b", 0.0)]
SAME_TOKENS, BOTH_REFUSED = [("a", 1.0), ("a", 0.0)], [("a", 0.4), ("b", 0.0)]
ONE_UNKNOWN, UNKNOWN = [("a", 1.0), ("b", None)], [("a", None), ("b", None)]
GROUPS = (MIXED, PASSED, FAILED, SAME_TOKENS, BOTH_REFUSED, ONE_UNKNOWN, UNKNOWN)


@pytest.mark.parametrize(
    ("algorithm", "cells", "expected"),
    [
        ("grpo", {}, [True, False, False, True, True, False, False]),
        ("rloo", {}, [True, False, False, True, True, False, False]),
        ("grpo", {"teacher_coef": 0.1, "drop_equal_groups": True}, [True, False, False, True, True, False, False]),
        ("reinforce", {"advantage": "raw"}, [True, True, False, True, True, True, False]),
        ("reinforce", {}, [True, False, False, True, True, False, False]),  # the batch is this group alone
        ("ppo_critic", {}, [True, True, True, True, True, True, False]),
        ("raft", {}, [True, True, False, True, False, True, False]),
        ("dpo", {}, [True, False, False, False, False, False, False]),
        ("ipo", {"accept_above": 0.2}, [True, False, False, False, True, False, False]),
        ("kto", {}, [True, True, True, True, True, True, False]),
    ],
)
def test_what_a_group_needs_depends_on_the_algorithm(
    algorithm: str, cells: dict[str, Any], expected: list[bool]
) -> None:
    spec = resolve_algorithm(algorithm, **cells)
    for answers, has_signal in zip(GROUPS, expected, strict=True):
        items = group(*answers)
        spec.select(items)
        assert spec.has_signal(items) == has_signal, answers


def test_a_teacher_gives_every_group_signal_and_a_penalty_can_refuse() -> None:
    items = group(*FAILED)
    for t in items:
        t.token_advantages = [0.5]
    assert resolve_algorithm("distillation").has_signal(items)
    assert resolve_algorithm("grpo", teacher_coef=0.1).has_signal(items)
    pair = group(*MIXED)
    assert resolve_algorithm("dpo").has_signal(pair), "asked before the advantages, as dynamic sampling does"
    pair[0].penalty = 0.75
    assert not resolve_algorithm("dpo").has_signal(pair)


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({"algorithm": "reinforce", "cells": {"advantage": "raw"}, "group_size": 1}, "correct"),
        ({"algorithm": "raft", "group_size": 1}, "correct"),
        ({"algorithm": "grpo"}, "mixed"),
        ({"algorithm": "grpo", "dynamic_sampling": 2}, "mixed"),
    ],
)
def test_the_metric_counts_groups_with_signal(options: dict[str, Any], share: str) -> None:
    """With groups of one, `raw` and `raft` learn from those that pass; a group's baseline from those that differ."""
    row, _ = Synchronous(make_trainer(prompts_per_step=24, **options)).learn(0)
    expected = {"correct": row["env/all/correct"], "mixed": row["env/all/by_group/frac_mixed"]}[share]
    assert row["frac_groups_with_signal"] == pytest.approx(expected) and 0 < expected < 1
    assert share == "mixed" or row["frac_reward_zero_std"] == 1.0


@pytest.mark.parametrize(("name", "has_signal"), [("grpo", True), ("grpo_original", True), ("dapo", False)])
def test_an_overlong_penalty_counts_before_the_update(name: str, has_signal: bool) -> None:
    """Two right completions, one of them half overlong (3 of 4 tokens, buffer 2): returns 1 and 1/2; DAPO asks
    rewards."""
    items = [trajectory("g", "g0", 1.0, 2), trajectory("g", "g1", 1.0, 3)]
    spec = resolve_algorithm(name, overlong_buffer=2)
    penalize_length(items, spec, 4)
    assert [t.penalty for t in items] == [0.0, 0.5]
    assert spec.has_signal(items) is has_signal
    assert spec.select(items) == (items if has_signal else [])
    assert resolve_algorithm("dapo", overlong_buffer=2, equal_by="return").has_signal(items)


@pytest.mark.parametrize(("equal_by", "waves"), [("return", 1), ("reward", 3)])
def test_dynamic_sampling_asks_for_returns(equal_by: str, waves: int) -> None:
    """Every reward is 1; completions of one letter and of more differ by what they cost, so no group is replaced."""
    cells = {"overlong_buffer": 4, "equal_by": equal_by}
    options = {"dynamic_sampling": 2, "control": "equal_rewards", "prompts_per_step": 2, "group_size": 8}
    trainer = make_trainer(algorithm="grpo", cells=cells, sampling={"max_tokens": 4}, **options)
    collected = Synchronous(trainer).collect(0)
    assert {t.reward for t in collected.all} == {1.0} and collected.waves == waves
    groups = group_by(collected.batch, lambda t: t.group_id).values()
    assert all(len({t.penalty for t in group}) > 1 for group in groups)
