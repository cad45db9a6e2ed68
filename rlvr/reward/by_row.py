"""Reward `by_row`: each row of the data names the reward that judges its answers.

Two rows, of which the second names two rules that must both hold:

    {"prompt": "...", "answer": "42", "reward": {"name": "math"}}
    {"prompt": "...", "reward": [{"name": "length", "kwargs": {"at_most": 20}}, "own_words"]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from rlvr.core.registry import did_you_mean
from rlvr.core.types import Outcome, Score
from rlvr.reward.composite import judge_part
from rlvr.reward.registry import Reward, WaitsFor, known_rewards, register_reward, resolve_reward, reward_spec
from rlvr.reward.reward_options import is_list
from rlvr.reward.signatures import Case

# Rows are data: they may not name code to load, a model to ask, or rewards that contain others.
NOT_IN_ROWS = ("by_row", "classifier", "composite", "draft", "environment", "grader", "judge")
MOST_KEPT = 4_096  # resolved rewards, one for each name with its options
MOST_RULES = 20  # of a row


@dataclass(frozen=True)
class ByRowOptions:
    """The options of the reward `by_row`. `allowed`: the names that rows may give; None: every registered reward that
    is checked by code alone.

    Name `code` in it to have programs judged while other completions are sampled (`waits_for`).
    """

    allowed: Sequence[str] | None = None
    allowed_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        possible = tuple(name for name in known_rewards() if name not in NOT_IN_ROWS)
        if self.allowed is not None and (not is_list(self.allowed) or not self.allowed):
            raise ValueError(f"allowed={self.allowed!r:.200}, expected a list of rewards: {', '.join(possible)}")
        for name in self.allowed or ():
            if name not in possible:
                raise ValueError(
                    f"allowed: {name!r:.80} cannot be named by a row{did_you_mean(str(name), possible)}; "
                    f"these can: {', '.join(possible)}"
                )
        object.__setattr__(self, "allowed_names", possible if self.allowed is None else tuple(self.allowed))


def _waits_for(options: ByRowOptions) -> WaitsFor:
    return "processes" if any(reward_spec(name).waits_for for name in options.allowed or ()) else ""


@register_reward("by_row", batched=True, options=ByRowOptions, gold="reward", verifiable=True, waits_for=_waits_for)
def by_row(cases: Sequence[Case], options: ByRowOptions) -> list[Score]:
    """The reward that `meta["reward"]` names: {name, kwargs = {}}, a name alone, or a list of them.

    A row can name the registered rewards that code checks (`allowed` limits them): no path, no model, no judge and no
    composite. A row without a reward, or with a wrong one, is `invalid` (`bad_reward`). The verdict, its reason and its
    parts are those of the row's reward; of a list those of the lowest value, with the parts of all.
    """
    scores: dict[int, list[Score]] = {}
    groups: dict[str, tuple[Reward, list[tuple[int, int]]]] = {}
    for place, case in enumerate(cases):
        try:
            rules = resolve_row(case.meta or {}, options.allowed_names)
        except ValueError as error:
            scores[place] = [Score(None, Outcome.INVALID, "bad_reward", detail=str(error))]
            continue
        scores[place] = [Score(0.0, Outcome.FAILED)] * len(rules)
        for number, (key, reward) in enumerate(rules):
            groups.setdefault(key, (reward, []))[1].append((place, number))
    threads = bool(_waits_for(options))
    for reward, places in groups.values():
        judged = judge_part(reward, [cases[place] for place, _ in places], threads)
        for (place, number), score in zip(places, judged, strict=True):
            scores[place][number] = score
    return [_choose_lowest(scores[place]) for place in range(len(cases))]


def _choose_lowest(scores: Sequence[Score]) -> Score:
    """The score of a row: the first without a value, else the first of the lowest value; with the parts of all."""
    lowest = min(scores, key=lambda score: -math.inf if score.value is None else score.value)
    if len(scores) == 1:
        return lowest
    return replace(lowest, parts={name: part for score in scores for name, part in score.parts.items()})


def resolve_row(meta: Mapping[str, Any], allowed: Sequence[str]) -> list[tuple[str, Reward]]:
    """The rewards that a row names, each with a text that is the same for equal ones; ValueError for a wrong entry."""
    given = meta.get("reward")
    entries: list[Any] = given if isinstance(given, list) else [given]
    if not 1 <= len(entries) <= MOST_RULES:
        raise ValueError(f"meta['reward'] is a list of {len(entries)}, expected from 1 to {MOST_RULES} rewards")
    return [_resolve_entry(entry, allowed) for entry in entries]


def _resolve_entry(given: Any, allowed: Sequence[str]) -> tuple[str, Reward]:
    entry = {"name": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or not set(entry) <= {"name", "kwargs"} or not isinstance(entry.get("name"), str):
        raise ValueError(f"meta['reward'] is {given!r:.200}, expected a name or {{name, kwargs}}, or a list of these")
    name, kwargs = entry["name"], entry.get("kwargs") or {}
    if name not in allowed:
        raise ValueError(
            f"meta['reward'] names {name!r:.80}{did_you_mean(name, allowed)}; expected one of {', '.join(allowed)}"
        )
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"meta['reward']: kwargs={kwargs!r:.200}, expected a mapping")
    try:
        key = json.dumps([name, dict(kwargs)], sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta['reward']: kwargs={kwargs!r:.200} is not JSON: {error}") from None
    return key, _resolve(key)


@lru_cache(maxsize=MOST_KEPT)
def _resolve(key: str) -> Reward:
    name, kwargs = json.loads(key)
    return resolve_reward(name, **kwargs)
