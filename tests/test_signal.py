"""The signal report names what keeps a policy from learning, each with its numbers, and is silent where one learns."""

from __future__ import annotations

import math
import random
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from rlvr.config.schema import Config
from rlvr.training import signal
from rlvr.training.signal import StallWatch, findings, stalled, told

HEALTHY = {
    "reward/min": 0.0,
    "reward/max": 1.0,
    "frac_reward_zero_std": 0.2,
    "completions/clipped_ratio": 0.01,
    "completions/mean_length": 10.0,
    "verifier/no_answer_rate": 0.02,
    "verifier/error_rate": 0.0,
    "verifier/invalid_rate": 0.0,
    "entropy": 0.4,
    "updates": 1.0,
    "rollout/groups": 8.0,
    "rollout/tokens": 640.0,
    "optim/approx_kl": 1e-5,
    "clip_ratio/region_mean": 0.01,
    "sampling/sampling_logp_difference/mean": 1e-7,
}


def rows(steps: int = 40, start: float = 0.3, rise: float = 0.01, noise: float = 0.0, **changed: Any) -> list[Any]:
    """A run whose reward and pass rate rise by `rise` a step; `changed` replaces metrics (`__` for `/`)."""
    draw = random.Random(1)
    other = {name.replace("__", "/"): value for name, value in changed.items()}
    made = []
    for step in range(steps):
        reward = min(1.0, start + rise * step + draw.gauss(0, noise))
        known = {"reward": reward, "env/all/correct": reward, **HEALTHY, **other}
        made.append({"phase": "rl", "step": step, **{k: v for k, v in known.items() if v is not None}})
    return made


def codes(found: Any) -> dict[str, str]:
    return {finding.code: finding.severity for finding in found}


# --- findings ----------------------------------------------------------------------------------------------------


def test_a_run_that_learns_draws_no_finding_at_any_step():
    run = rows(68, noise=0.02)
    for step in range(1, len(run) + 1):
        assert findings(run[:step]) == [] and not stalled(run[:step])
    assert told([]) == "  nothing stands out"


@pytest.mark.parametrize(
    ("changed", "code", "severity", "says", "remedy"),
    [
        ({"completions__clipped_ratio": 0.6}, "truncated", "problem", "60% of answers ran out", "rollout.max_tokens"),
        ({"completions__clipped_ratio": 0.12}, "truncated", "hint", "12%", "rollout.max_tokens"),
        ({"verifier__no_answer_rate": 0.7}, "no_answer", "problem", "70% of judged answers", "sft.steps"),
        ({"verifier__error_rate": 0.004}, "errors", "hint", "0.4%", "reward.type"),
        ({"verifier__error_rate": 0.03}, "errors", "problem", "3.0%", "reward.type"),
        ({"verifier__invalid_rate": 0.2}, "invalid_tasks", "problem", "20%", "env.kwargs"),
        ({"env__all__correct": 0.02, "frac_reward_zero_std": 0.9}, "equal_groups", "problem", "too hard", "sft.steps"),
        ({"env__all__correct": 0.5, "frac_reward_zero_std": 0.6}, "equal_groups", "hint", "60%", "entropy_coef"),
        ({"env__all__correct": 0.9, "frac_reward_zero_std": 0.9}, "equal_groups", "hint", "too easy", "pass_rate"),
        ({"env__all__correct": 0.99, "frac_reward_zero_std": 0.9}, "solved", "note", "99%", "training.until"),
        ({"reward__max": 0.0, "env__all__correct": 0.0}, "one_reward", "problem", "the same reward, 0 ", "sft.steps"),
        ({"env__all__correct": 0.0}, "nothing_passes", "hint", "no answer ever passed", "passed_at"),
        ({"updates": 0.0}, "no_update", "problem", "20 of the last 20 steps", "training.refill"),
        ({"optim__approx_kl": 0.3}, "large_update", "hint", "0.3", "training.target_kl"),
        ({"optim__approx_kl": 3.0}, "large_update", "problem", "3", "training.optimizer.learning_rate"),
        ({"clip_ratio__region_mean": 0.4}, "clipped", "hint", "40%", "training.ppo_epochs"),
        ({"sampling__sampling_logp_difference__mean": 0.05}, "gap", "hint", "0.05", "model.dtype"),
    ],
)
def test_each_trouble_is_found_with_its_numbers_and_a_remedy(
    changed: dict[str, float], code: str, severity: str, says: str, remedy: str
):
    found = findings(rows(**changed))
    assert codes(found) == {code: severity}
    assert says in told(found) and remedy in found[0].remedy


def test_entropy_that_fell_to_nothing_and_entropy_that_rose_are_found():
    gone, up = rows(), rows()
    for row in gone[10:]:
        row["entropy"] = 0.01
    for row in up[10:]:
        row["entropy"] = 2.0
    assert codes(findings(gone)) == {"entropy_gone": "problem"} and "0.400 to 0.010" in told(findings(gone))
    assert codes(findings(up)) == {"entropy_up": "problem"}
    for row in gone:
        row["env/all/correct"] = 0.94
    assert findings(gone) == [], "a policy that solves its tasks may be sure of itself"


def test_a_reward_that_rises_without_held_out_tasks_is_a_hint():
    run = rows()
    for row in run[::10]:
        row["test/env/all/correct"] = 0.3
    assert codes(findings(run)) == {"reward_only": "hint"}
    run[30]["test/env/all/correct"] = 0.4
    assert findings(run) == []


def test_groups_of_one_are_no_equal_groups():
    assert findings(rows(frac_reward_zero_std=1.0, rollout__groups=64.0)) == []


def test_groups_that_are_equal_level_by_level_name_the_levels():
    run = rows(env__all__correct=0.5, frac_reward_zero_std=0.6, env__level_1__correct=0.99, env__level_2__correct=0.04)
    [found] = findings(run)
    assert "1: 99%, 2: 4.0%" in found.remedy and "curriculum.by=pass_rate" in found.remedy


def test_only_recent_steps_count_and_problems_come_first():
    run = rows(40, completions__clipped_ratio=0.9)
    for row in run[20:]:
        row["completions/clipped_ratio"] = 0.0
    assert findings(run) == []
    found = findings(rows(completions__clipped_ratio=0.2, verifier__no_answer_rate=0.9))
    assert [f.severity for f in found] == ["problem", "hint"]


def test_no_steps_other_phases_and_missing_or_odd_values_are_borne():
    assert codes(findings([])) == codes(findings([{"phase": "sft", "step": 0, "loss": 1.0}])) == {"no_steps": "note"}
    assert findings([{"phase": "rl", "step": 0}]) == []
    odd = rows(80, reward=math.nan, entropy=None, updates=None, frac_reward_zero_std="many")
    assert findings(odd) == [] and not stalled(odd)


@pytest.mark.parametrize("value", [1e308, -1e308, 10**400, math.inf], ids=["large", "low", "huge", "inf"])
def test_numbers_at_the_end_of_what_a_float_holds_are_borne(value: Any):
    """Seventy such rows, alone and among others: the sum of a few is beyond a float, and the mean is not."""
    for changed in (value, -value):
        run = rows(70, reward=value, reward__max=value)
        for row in run[1::2]:
            row.update({"reward": changed, "reward/min": changed})
        for step in range(1, len(run) + 1):
            assert isinstance(stalled(run[:step]), bool) and told(findings(run[:step]))
        assert isinstance(stalled([{**row, **dict.fromkeys(row, value), "phase": "rl"} for row in run]), bool)
        assert told(findings([{**row, **dict.fromkeys(row, value), "phase": "rl"} for row in run]))


# --- stalls ------------------------------------------------------------------------------------------------------


def test_ten_steps_without_an_update_are_a_stall_and_nine_are_not():
    assert not stalled(rows(9, start=0.0, rise=0.0, updates=0.0))
    assert stalled(rows(10, start=0.0, rise=0.0, updates=0.0))
    assert not stalled(rows(10, start=0.97, rise=0.0, updates=0.0)), "nothing left to learn is no stall"
    assert not stalled(rows(10, start=0.98, rise=0.0, updates=0.0, env__all__correct=None)), "rewards near their top"


def test_sixty_steps_without_a_rise_are_a_stall():
    flat = rows(60, start=0.5, rise=0.0, noise=0.02)
    assert stalled(flat) and not stalled(flat[:59])
    assert codes(findings(flat)) == {"flat": "hint"}
    assert stalled(rows(60, start=0.5, rise=-0.002, noise=0.02))


@pytest.mark.parametrize("rise", [0.001, 0.002, 0.004])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
def test_a_slow_rise_is_no_stall(rise: float, noise: float):
    run = rows(150, start=0.2, rise=rise, noise=noise)
    assert not any(stalled(run[:step]) for step in range(1, len(run) + 1))


def test_where_noise_hides_a_rise_nothing_is_said():
    run = rows(200, start=0.3, rise=0.0, noise=0.15)
    assert not any(stalled(run[:step]) for step in range(1, len(run) + 1))


def test_a_curriculum_that_takes_harder_tasks_while_held_out_ones_pass_more_is_no_stall():
    run = rows(60, start=0.5, rise=0.0)
    for i, row in enumerate(run[::10]):
        row["test/env/all/correct"] = 0.3 + 0.02 * i
    assert not stalled(run)


def test_the_watch_speaks_once_and_a_resumed_run_repeats_it():
    run = rows(30, start=0.0, rise=0.0, updates=0.0, reward__max=0.0)
    watch = StallWatch()
    assert [i for i, row in enumerate(run) if watch.add(row)] == [9]
    assert [i for i, row in enumerate(run[5:]) if StallWatch(run[: 5 + i]).add(row)] == [4]
    resumed = StallWatch(run[:7])
    assert [i for i, row in enumerate(run[7:], 7) if resumed.add(row)] == [9]
    silent = StallWatch(run[:20])
    assert not any(silent.add(row) for row in run[20:])
    assert StallWatch().add({"phase": "sft", "step": 0, "loss": 1.0}) == []


# --- remedies ----------------------------------------------------------------------------------------------------


def test_every_setting_that_a_remedy_names_exists():
    """A remedy that cannot be typed is none."""
    source = Path(signal.__file__).read_text(encoding="utf-8")
    sections = "|".join(field.name for field in fields(Config))
    named = set(re.findall(rf"\b((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)", source)) - {"rlvr.training"}
    assert len(named) > 15
    assert [key for key in sorted(named) if not exists(Config, key.split("."))] == []


def exists(kind: Any, parts: list[str]) -> bool:
    if not parts:
        return True
    if not is_dataclass(kind):
        return False
    hints = get_type_hints(kind)
    if parts[0] not in hints:
        return False
    inner = hints[parts[0]]
    return exists(next((a for a in get_args(inner) if is_dataclass(a)), inner), parts[1:])
