"""Reads numbers from metric rows that may lack them or hold odd values; unknown is nan.

Names are in docs/run/metrics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.core.types import mean

WINDOW = 20  # steps that count as recent
STALL_STEPS = 10  # steps that are enough to see that nothing moves

Rows = Sequence[Mapping[str, Any]]


def select_rl_rows(rows: Rows) -> list[Mapping[str, Any]]:
    return [row for row in rows if row.get("phase", "rl") == "rl"]


def get_value(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # hundreds of digits
        return math.nan


def get_values(rows: Rows, name: str) -> list[float]:
    return [value for row in rows if math.isfinite(value := get_value(row, name))]


def get_mean(rows: Rows, name: str) -> float:
    values = get_values(rows, name)
    return mean(values) if values else math.nan


def has_no_update(row: Mapping[str, Any]) -> bool:
    """Whether nothing was learned in a step: neither the policy nor a critic that learns alone was updated."""
    return get_value(row, "updates") == 0 and "critic/loss" not in row


def is_given(rows: Rows) -> bool:
    """Whether the completions come with the data (`training.completions=given`): then they have no verdicts."""
    return any("frac_groups_with_signal" in row and "reward" not in row for row in rows)


def get_reward_range(rows: Rows) -> tuple[float, float]:
    """The smallest and the largest reward of any completion."""
    return (
        min(get_values(rows, "reward/min"), default=math.nan),
        max(get_values(rows, "reward/max"), default=math.nan),
    )


def get_pass_rate(rows: Rows) -> float:
    """The pass rate now: of the last interim evaluation if that is higher, since a curriculum draws harder tasks."""
    recent = get_values(rows[-STALL_STEPS:], "env/all/correct")
    heldout = get_values(rows[-WINDOW:], "test/env/all/correct")[-1:]
    return max(([mean(recent)] if recent else []) + heldout, default=math.nan)
