"""Rewards on the form of a text: keywords, length, format, and their weighted mean. Each docstring is the formula.

Linear-time checks only; expressions that a user supplies do not run here. Keywords, lengths and formats are easy to
satisfy without being right: they shape, they do not verify.
`python -m pytest tests/test_reward_text.py` exercises it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.registry import nearest
from rlvr.reward.registry import Reward, register_reward, resolve_reward
from rlvr.reward.signatures import Case
from rlvr.types import Outcome, Score, Trajectory

MAX_CHARS = 100_000  # a longer text complies with no format
Meta = dict[str, Any] | None


def _one_of(what: str, given: Any, known: Sequence[str]) -> None:
    if given not in known:
        raise ValueError(f"{what}={given!r}{nearest(str(given), known)}; known: {', '.join(known)}")


def _keywords(keywords: Sequence[str], mode: str = "any") -> dict[str, Any]:
    _one_of("reward 'keyword_contains': mode", mode, ("any", "all"))
    if isinstance(keywords, str) or not keywords or not all(isinstance(k, str) and k for k in keywords):
        raise ValueError(f"reward 'keyword_contains': keywords={keywords!r}, expected a non-empty list of words")
    return {"keywords": [k.lower() for k in keywords], "mode": mode}


@register_reward("keyword_contains", prepare=_keywords)
def keyword_contains(
    prompt: str, response: str, meta: Meta = None, *, keywords: Sequence[str], mode: str = "any"
) -> float:
    """1.0 if the response contains any (`mode="any"`) or all (`mode="all"`) of the keywords, else -0.5.

    A keyword is found anywhere in the text, inside longer words too; upper and lower case are the same.
    """
    text = response.lower()
    return 1.0 if (any if mode == "any" else all)(k in text for k in keywords) else -0.5


def _length(target_length: int = 50, penalty_per_token: float = 0.01) -> dict[str, Any]:
    if isinstance(target_length, bool) or not isinstance(target_length, int) or target_length < 0:
        raise ValueError(f"reward 'length_penalty': target_length={target_length!r}, expected an integer, at least 0")
    if not isinstance(penalty_per_token, (int, float)) or not 0 <= penalty_per_token < math.inf:
        raise ValueError(f"reward 'length_penalty': penalty_per_token={penalty_per_token!r}, expected at least 0")
    return {"target_length": target_length, "penalty_per_token": penalty_per_token}


@register_reward("length_penalty", passed_at=0.0, prepare=_length)
def length_penalty(
    prompt: str, response: str, meta: Meta = None, *, target_length: int = 50, penalty_per_token: float = 0.01
) -> float:
    """max(-1, 1 - penalty_per_token * |n - target_length|) with n the response's words, split at white space.

    1.0 at the target, 0.01 less per token on either side, never below -1.0. Passed where it is not negative.
    """
    return max(-1.0, 1.0 - penalty_per_token * abs(len(response.split()) - target_length))


def _format(required_format: str) -> dict[str, Any]:
    _one_of("reward 'format_compliance': required_format", required_format, sorted(_FORMATS))
    return {"required_format": required_format}


@register_reward("format_compliance", prepare=_format)
def format_compliance(prompt: str, response: str, meta: Meta = None, *, required_format: str) -> Score:
    """1.0 if the whole response has the format, else 0.0; over 100,000 characters nothing has.

    `json`: one JSON object or array and nothing else but white space (no code fence, no NaN).
    `numbered_list`: at least half of the lines that are not blank are items `1. text` or `1) text`, and the items are
    numbered 1, 2, 3, ... in order.
    """
    fits = len(response) <= MAX_CHARS and _FORMATS[required_format](response)
    return Score(1.0, Outcome.PASSED) if fits else Score(0.0, Outcome.FAILED, "wrong_format")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _is_json(text: str) -> bool:
    try:  # Numbers stay text: no digit string, however long, becomes an integer.
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, (dict, list))


_ITEM = re.compile(r"\s*([0-9]{1,6})[.)]\s+\S")


def _is_numbered_list(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    items = [int(found[1]) for found in map(_ITEM.match, lines) if found]
    return bool(items) and 2 * len(items) >= len(lines) and items == list(range(1, len(items) + 1))


_FORMATS = {"json": _is_json, "numbered_list": _is_numbered_list}


def _parts(rewards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Resolve the parts of a composite: [(label, weight, reward)]."""
    if isinstance(rewards, (str, Mapping)) or not rewards:
        raise ValueError(f"reward 'composite': rewards={rewards!r}, expected a list of {{name, weight, kwargs}}")
    resolved: list[tuple[str, float, Reward]] = []
    for i, part in enumerate(rewards, 1):
        where = f"reward 'composite', part {i}"
        if not isinstance(part, Mapping) or "name" not in part:
            raise ValueError(f"{where}: {part!r}, expected a dictionary {{name, weight, kwargs}}")
        for key in part:
            _one_of(f"{where}: key", key, ("name", "weight", "kwargs"))
        weight = part.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise ValueError(f"{where} ({part['name']}): weight={weight!r}, expected a finite number, at least 0")
        kwargs = part.get("kwargs") or {}
        if not isinstance(kwargs, Mapping):
            raise ValueError(f"{where} ({part['name']}): kwargs={kwargs!r}, expected a dictionary")
        try:
            reward = resolve_reward(part["name"], **kwargs)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        twins = sum(label.partition("#")[0] == reward.name for label, _, _ in resolved)
        resolved.append((f"{reward.name}#{twins + 1}" if twins else reward.name, float(weight), reward))
    if not 0 < math.fsum(weight for _, weight, _ in resolved) < math.inf:
        raise ValueError("reward 'composite': the weights sum to 0, or to no finite number; one at least must count")
    return {"rewards": resolved}


@register_reward("composite", prepare=_parts)
def composite(
    prompt: str, response: str, meta: Meta = None, trajectory: Trajectory | None = None, *, rewards: Sequence[Any]
) -> Score:
    """sum(weight_i * value_i) / sum(weight_i) over `rewards`, a list of {name, weight = 1, kwargs = {}}.

    Passed where every part of a weight above 0 passed; else the outcome and reason are those of the first that did
    not. A part that is an error or invalid makes the whole so, whatever its weight: none is left out of the mean.
    Parts: the value of each by name (`name#2` for the second of a name).
    """
    case = Case(prompt, response, meta, trajectory)
    scores = [(label, weight, reward.judge(case)) for label, weight, reward in rewards]
    counted = [(label, weight, score) for label, weight, score in scores if weight > 0]
    parts = {label: score.value for label, _, score in scores if score.value is not None}
    for label, _, score in scores:
        if score.value is None:
            return Score(None, score.outcome, score.reason, parts, f"part {label}: {score.detail}")
    value = math.fsum(weight * (score.value or 0.0) for _, weight, score in counted)
    value /= math.fsum(weight for _, weight, _ in counted)
    missed = next(((label, score) for label, _, score in counted if score.outcome is not Outcome.PASSED), None)
    if missed is None:
        return Score(value, Outcome.PASSED, parts=parts)
    return Score(value, missed[1].outcome, missed[1].reason or missed[0], parts)
