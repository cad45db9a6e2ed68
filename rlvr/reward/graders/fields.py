"""What every kind of grader needs: its configuration read field by field, its texts filled in, its value as a `Score`.

Errors name the path of the field (`graders.style.reference`). Whoever made a text missing or too long bears it: where
it is the answer, it has failed; where it is the task, the task is invalid and nobody is judged.
`python -m pytest tests/test_graders.py` exercises it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from rlvr.registry import nearest
from rlvr.reward.graders.templates import Missing, Template, TooLong, Values
from rlvr.reward.options import is_number
from rlvr.reward.signatures import LARGEST
from rlvr.types import Outcome, Score

MAX_TEXT = 1_000_000  # characters of a filled text
MAX_DEPTH = 100  # of an answer that is JSON


def taken(
    config: Any, where: str, required: Collection[str], optional: Collection[str] = ("name",)
) -> Mapping[str, Any]:
    """The configuration, which has every required field and none that is unknown; ValueError naming the field."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{where or 'grader'}={config!r:.80}, expected an object of the OpenAI graders' schema")
    known = ["type", *required, *optional]
    for key in config:
        if key not in known:
            raise ValueError(f"{path(where, key)} is not known{nearest(str(key), known)}; known: {', '.join(known)}")
    for key in required:
        if key not in config:
            raise ValueError(
                f"{path(where, key)} is missing; a {config.get('type')} grader needs {', '.join(required)}"
            )
    name = config.get("name", "")
    if not isinstance(name, str):
        raise ValueError(f"{path(where, 'name')}={name!r:.80}, expected text")
    return config


def path(where: str, field: object) -> str:
    return f"{where}.{field!s:.80}" if where else f"{field!s:.80}"


def choice(given: Any, where: str, known: Collection[str], absent: Mapping[str, str] | None = None) -> str:
    """One of the known words; `absent` says why another is not here."""
    if isinstance(given, str) and given in (absent or {}):
        raise ValueError(f"{where}={given!r} is not to be had here: {(absent or {})[given]}")
    if not isinstance(given, str) or given not in known:
        raise ValueError(
            f"{where}={given!r:.80}{nearest(str(given), sorted(known))}; expected one of {', '.join(known)}"
        )
    return given


def number(given: Any, where: str, low: float, high: float) -> float:
    if not is_number(given) or not low <= given <= high:
        raise ValueError(f"{where}={given!r:.80}, expected a number from {low:g} to {high:g}")
    return float(given)


def threshold(config: Mapping[str, Any], where: str, low: float = 0.0, high: float = 1.0) -> float:
    """From which value on an answer has passed: the middle of the range where nothing is said."""
    given = config.get("pass_threshold")
    bounds = (low, high) if math.isfinite(high - low) else (-LARGEST, LARGEST)
    return (low + high) / 2 if given is None else number(given, path(where, "pass_threshold"), *bounds)


def filled(template: Template, values: Values, room: int = MAX_TEXT) -> str | Score:
    """The text; or, where it is missing or has more than `room` characters, the score of whoever made it so."""
    try:
        return template.fill(values, room=room)
    except Missing as missing:
        return blamed(of_answer(missing, values), "missing_field", str(missing))
    except TooLong as long:
        said = f"{long.size:,} characters, at most {room:,} are compared"
        return blamed(template.of_answer, "too_large", said)


def of_answer(missing: Missing, values: Values) -> bool:
    """Whether the answer might have had what is missing. What the caller left out of the sample is the caller's."""
    first = missing.place.steps[0]
    return missing.place.of_answer and (first == "output_json" or first in values["sample"])


def blamed(answer: bool, reason: str, detail: str, worst: float = 0.0) -> Score:
    if answer:
        return Score(worst, Outcome.FAILED, reason, detail=detail)
    return Score(None, Outcome.INVALID, reason, detail=detail)


def graded(
    value: float,
    passed_at: float,
    reason: str = "low_score",
    parts: Mapping[str, float] | None = None,
    detail: str = "",
) -> Score:
    passed = value >= passed_at
    outcome = Outcome.PASSED if passed else Outcome.FAILED
    return Score(value, outcome, "" if passed else reason, dict(parts or {}), detail)


def with_json(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """The sample; where its text is JSON, with `output_json`, unless the caller has said what that is."""
    text = sample.get("output_text")
    if "output_json" in sample or not isinstance(text, str) or len(text) > MAX_TEXT:
        return sample
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return sample
    return {**sample, "output_json": value} if _shallow(value) else sample


def _shallow(value: Any) -> bool:
    """Whether arrays and objects stand at most `MAX_DEPTH` deep in each other: deeper ones cannot be written again."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [node for node in level if isinstance(node, (dict, list))]
        level = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
    return not any(isinstance(node, (dict, list)) for node in level)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
