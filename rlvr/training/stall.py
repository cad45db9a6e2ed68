"""Decides from metric rows whether a run has levelled off, and whether that is a stall.

A run that levels off at its ceiling is no stall: few steps, noise, a rising held-out pass rate, or hardly a failing
completion must raise no alarm. The thresholds are our judgement. A reward that rises by less than 1 % of its range in
`TREND` / 2 steps counts as flat, so a run that learns more slowly than that raises an alarm.
"""

from __future__ import annotations

import math

from rlvr.core.types import mean, std
from rlvr.training.metric_values import (
    STALL_STEPS,
    Rows,
    get_mean,
    get_pass_rate,
    get_reward_range,
    get_value,
    get_values,
    has_no_update,
    select_rl_rows,
)

TREND = 60  # steps over which a reward that does not rise has levelled off; two halves are compared
BEGUN, PATIENCE = 0.02, 50  # a run may take so many steps to its first pass rate: until then most groups are equal
CEILING = 0.9  # pass rate from which levelling off is expected


def is_stalled(rows: Rows) -> bool:
    """Whether the run has levelled off far from the best."""
    rows = select_rl_rows(rows)
    return has_levelled_off(rows) and not is_near_best(rows)


def has_levelled_off(rows: Rows) -> bool:
    """Whether there is hardly any update lately, or no rise over `TREND` steps; `rows` are those of one phase."""
    if len(rows) < (STALL_STEPS if has_begun(rows) else PATIENCE):
        return False
    return has_no_signal(rows) or is_flat(rows)


def has_begun(rows: Rows) -> bool:
    """Whether any step had a pass rate from which a policy can learn, as far as the rows tell."""
    passed = get_values(rows, "env/all/correct")
    return not passed or max(passed) >= BEGUN


def has_no_signal(rows: Rows) -> bool:
    """Whether nearly all recent steps had no update, or no group with signal (an entropy bonus still updates)."""
    recent = rows[-STALL_STEPS:]
    still = [has_no_update(row) or get_value(row, "frac_groups_with_signal") == 0 for row in recent]
    return sum(still) >= 0.9 * len(recent)


def is_flat(rows: Rows) -> bool:
    """Whether neither the reward nor the held-out pass rate rose over `TREND` steps, and noise is too small to hide it.

    It runs every step: what looks at the whole run comes last.
    """
    reward = get_values(rows[-TREND:], "reward")
    if len(reward) < TREND:
        return False
    before, after = reward[: TREND // 2], reward[TREND // 2 :]
    rise = mean(after) - mean(before)
    noise = math.hypot(std(before), std(after)) / math.sqrt(TREND // 2)
    heldout = get_values(rows[-TREND:], "test/env/all/correct")
    if (rise > 0 and rise >= noise) or (len(heldout) > 1 and max(heldout[1:]) > heldout[0] + 0.01):
        return False
    low, high = get_reward_range(rows)
    measured = noise <= 0.03 * (high - low)  # with few completions a step, noise hides a rise
    return measured and rise < 0.01 * (high - low)


def is_near_best(rows: Rows) -> bool:
    """Whether nearly all completions pass, or rewards are within 5 % of the best of any completion so far."""
    low, high = get_reward_range(rows)
    return get_pass_rate(rows) >= CEILING or (
        high > low and get_mean(rows[-STALL_STEPS:], "reward") >= high - 0.05 * (high - low)
    )
