"""Reward `composite`: the weighted mean of several rewards.

For example:

    resolve_reward("composite", rewards=[{"name": "math", "weight": 0.9}, {"name": "length_penalty", "weight": 0.1}])
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from rlvr.core.registry import GIVEN
from rlvr.core.types import Outcome, Score
from rlvr.reward.registry import Reward, WaitsFor, number_name, register_reward, resolve_reward
from rlvr.reward.reward_options import check_choice, is_list, is_number
from rlvr.reward.signatures import Case


@dataclass(frozen=True)
class WeightedReward:
    """A reward and its weight. `label` is its name in parts and messages: `name#2` for the second of a name, `name_2`
    of functions that a program gave."""

    label: str
    weight: float
    reward: Reward


def resolve_weighted(what: str, rewards: Any) -> list[WeightedReward]:
    """Resolve a list of {name, weight = 1, kwargs = {}}; ValueError, beginning with `what`, for a wrong entry."""
    if not is_list(rewards):
        raise ValueError(f"{what}={rewards!r}, expected a list of {{name, weight, kwargs}}")
    resolved: list[WeightedReward] = []
    for i, part in enumerate(rewards, 1):
        where = f"{what}, part {i}"
        if not isinstance(part, Mapping) or "name" not in part:
            raise ValueError(
                f"{where}: {part!r}, expected a dictionary {{name, weight, kwargs}}, at least {{'name': 'boxed'}}"
            )
        for key in part:
            check_choice(f"{where}: key", key, ("name", "weight", "kwargs"))
        weight = part.get("weight", 1.0)
        if not is_number(weight) or not 0 <= weight < math.inf:
            raise ValueError(
                f"{where} ({part['name']}): weight={weight!r}, expected a finite number, at least 0, without quotes"
            )
        kwargs = part.get("kwargs") or {}
        if not isinstance(kwargs, Mapping):
            raise ValueError(f"{where} ({part['name']}): kwargs={kwargs!r}, expected a dictionary")
        try:
            reward = resolve_reward(part["name"], **kwargs)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        twins = sum(one.reward.name == reward.name for one in resolved)
        label = f"{reward.name}#{twins + 1}" if twins else reward.name
        if not isinstance(part["name"], str) or part["name"].startswith(f"{GIVEN}:"):
            label = number_name(reward.name, [one.label for one in resolved])
        resolved.append(WeightedReward(label, float(weight), reward))
    if not 0 < math.fsum(one.weight for one in resolved) < math.inf:
        raise ValueError(f"{what}: the weights sum to 0, or to no finite number; at least one must count")
    return resolved


def _parts(rewards: Any) -> list[WeightedReward]:
    return resolve_weighted("rewards", rewards)


def _start_parts(parts: Sequence[WeightedReward]) -> None:
    for part in parts:
        part.reward.start()


def _waits_for(parts: Sequence[WeightedReward]) -> WaitsFor:
    waits = {part.reward.waits_for for part in parts}
    return "processes" if "processes" in waits else "network" if "network" in waits else ""


def _weights(parts: Sequence[WeightedReward]) -> dict[str, float]:
    total = math.fsum(part.weight for part in parts)
    return {part.label: part.weight / total for part in parts if part.weight > 0}


# A composite that waits is called by several threads; its parts that do not wait may be called by one at a time only.
_one_thread = threading.Lock()


@register_reward("composite", batched=True, options=_parts, start=_start_parts, waits_for=_waits_for, weights=_weights)
def composite(cases: Sequence[Case], parts: Sequence[WeightedReward]) -> list[Score]:
    """sum(weight_i * value_i) / sum(weight_i) over `rewards`, a list of {name, weight = 1, kwargs = {}}.

    A name is a registered one, a path `package.module:function` or a function; weights are numbers from 0 and need not
    sum to 1. Each part gets all answers at once, where it can judge lists.

    Passed where every part of a weight above 0 passed; else the outcome and reason are those of the first that did
    not. A part that is an error or invalid makes the whole so, whatever its weight: none is left out of the mean.
    Parts: the value of each by name (`name#2` for the second of a name). What parts say of single turns and branches is
    weighted alike: a part that scores no turns adds 0 to each, one that scores no branches its value.
    """
    columns: list[list[Score]] = []
    threads = bool(_waits_for(parts))
    for part in parts:
        columns.append(judge_part(part.reward, cases, threads))
    return [_weighted_mean(parts, row) for row in zip(*columns, strict=True)]


def judge_part(reward: Reward, cases: Sequence[Case], threads: bool) -> list[Score]:
    """What a reward that is a part of another says; `threads`: several threads call the other at once."""
    with _one_thread if threads and not reward.waits_for else nullcontext():
        # One answer alone is judged so that what a part raises reaches the caller, as in any direct call.
        return [reward.judge(case) for case in cases] if len(cases) == 1 else reward.judge_all(cases)


def _weighted_mean(parts: Sequence[WeightedReward], scores: Sequence[Score]) -> Score:
    rows = list(zip(parts, scores, strict=True))
    values = {part.label: score.value for part, score in rows if score.value is not None}
    for part, score in rows:
        if score.value is None:
            return Score(None, score.outcome, score.reason, values, f"part {part.label}: {score.detail}")
    counted = [(part, score) for part, score in rows if part.weight > 0]
    total = math.fsum(part.weight for part, _ in counted)

    def mean(values: Sequence[float]) -> float:
        return math.fsum(part.weight * value for (part, _), value in zip(counted, values, strict=True)) / total

    value = mean([score.value or 0.0 for _, score in counted])
    lengths = max(len(score.turns) for _, score in counted), max(len(score.branches) for _, score in counted)
    turns = [score.turns or (0.0,) * lengths[0] for _, score in counted]
    branches = [score.branches or (score.value or 0.0,) * lengths[1] for _, score in counted]
    for what, given in (("turns", turns), ("branches", branches)):
        if len(counts := sorted({len(one) for one in given})) > 1:
            detail = f"its parts score {' and '.join(map(str, counts))} {what} of one answer"
            return Score(None, Outcome.ERROR, f"{what}_differ", values, detail)
    failed = next(((part, score) for part, score in counted if score.outcome is not Outcome.PASSED), None)
    outcome, reason = (failed[1].outcome, failed[1].reason or failed[0].label) if failed else (Outcome.PASSED, "")
    each = [tuple(map(mean, zip(*given, strict=True))) for given in (turns, branches)]
    return Score(value, outcome, reason, values, turns=each[0], branches=each[1])
