"""Which groups an algorithm can learn from: one function, and what the metrics, the trainer and the diagnosis say."""

from __future__ import annotations

from typing import Any

import pytest
from advantage_batch import trajectory
from table_trainer import make_trainer

from rlvr.algorithms import resolve_algorithm
from rlvr.core.types import Trajectory
from rlvr.training.schedules.sync import Synchronous


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
