"""What every kind of grader shares: reading its configuration, filling its texts, turning its value into a `Score`.

Errors name the path of the field (`graders.style.reference`). A text that is missing or too long is the fault of its
author: if that is the answer, it has failed; if it is the task, the task is invalid.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from rlvr.core.registry import did_you_mean
from rlvr.core.types import Outcome, Score
from rlvr.reward.graders.grader_templates import MissingField, Template, TemplateTooLong, Values
from rlvr.reward.reward_options import is_number
from rlvr.reward.signatures import LARGEST
from rlvr.reward.text.json_schema import MAX_DEPTH, json_depth, refuse_constant

MAX_TEXT = 1_000_000  # characters of a filled text


def check_fields(
    config: Any, where: str, required: Collection[str], optional: Collection[str] = ("name",)
) -> Mapping[str, Any]:
    """The configuration, which has every required field and no unknown one; ValueError with the field."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{where or 'grader'}={config!r:.80}, expected an object of the OpenAI graders' schema")
    known = ["type", *required, *optional]
    for key in config:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise ValueError(f"{field_path(where, key)} is not known{hint}; known: {', '.join(known)}")
    for key in required:
        if key not in config:
            needs = f"a {config.get('type')} grader needs {', '.join(required)}"
            raise ValueError(f"{field_path(where, key)} is missing; {needs}")
    if not isinstance(config.get("name", ""), str):
        raise ValueError(f"{field_path(where, 'name')}={config['name']!r:.80}, expected text")
    return config


def field_path(where: str, field: object) -> str:
    return f"{where}.{field!s:.80}" if where else f"{field!s:.80}"


def check_word(given: Any, where: str, known: Collection[str], unsupported: Mapping[str, str] | None = None) -> str:
    """One of the known words; `unsupported` says why certain others are not among them."""
    if isinstance(given, str) and given in (unsupported or {}):
        raise ValueError(f"{where}={given!r} is not supported: {(unsupported or {})[given]}")
    if not isinstance(given, str) or given not in known:
        hint = did_you_mean(str(given), sorted(known))
        raise ValueError(f"{where}={given!r:.80}{hint}; expected one of {', '.join(known)}")
    return given


def check_range(given: Any, where: str, low: float, high: float) -> float:
    if not is_number(given) or not low <= given <= high:
        raise ValueError(f"{where}={given!r:.80}, expected a number from {low:g} to {high:g}")
    return float(given)


def pass_threshold(config: Mapping[str, Any], where: str, low: float = 0.0, high: float = 1.0) -> float:
    """The value from which an answer passes: by default the middle of the range."""
    given = config.get("pass_threshold")
    bounds = (low, high) if math.isfinite(high - low) else (-LARGEST, LARGEST)
    return (low + high) / 2 if given is None else check_range(given, field_path(where, "pass_threshold"), *bounds)


def fill_template(template: Template, values: Values, limit: int = MAX_TEXT) -> str | Score:
    """The filled text, or the score to give if it is missing or has more than `limit` characters."""
    try:
        return template.fill(values, limit=limit)
    except MissingField as missing:
        return blame_answer_or_task(is_fault_of_answer(missing, values), "missing_field", str(missing))
    except TemplateTooLong as long:
        detail = f"{long.size:,} characters, at most {limit:,} are compared"
        return blame_answer_or_task(template.is_from_answer, "too_large", detail)


def is_fault_of_answer(missing: MissingField, values: Values) -> bool:
    """Whether the answer could have had the missing field. What the caller left out is not its fault."""
    first = missing.place.steps[0]
    return missing.place.is_from_answer and (first == "output_json" or first in values["sample"])


def blame_answer_or_task(is_fault_of_answer: bool, reason: str, detail: str, worst: float = 0.0) -> Score:
    if is_fault_of_answer:
        return Score(worst, Outcome.FAILED, reason, detail=detail)
    return Score(None, Outcome.INVALID, reason, detail=detail)


def score_of(
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
    """The sample, with `output_json` where its text is JSON at most `MAX_DEPTH` deep, unless that is given."""
    text = sample.get("output_text")
    if "output_json" in sample or not isinstance(text, str) or len(text) > MAX_TEXT:
        return sample
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return sample
    return {**sample, "output_json": value} if json_depth(value) <= MAX_DEPTH else sample
