"""Where a row of data holds its reference answer, and the faults of one that are seen without any answer.

A row whose reference is blank, or the prompt itself, is `invalid`, whatever the answer is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# The first of these that a row has, and that is not blank, is its reference; then verl's `reward_model.ground_truth`.
REFERENCE_FIELDS = ("answer", "reference", "reference_answer", "ground_truth", "expected", "target", "gold", "solution")


class ReferenceFault(NamedTuple):
    reason: str  # `empty_reference` or `reference_is_prompt`
    detail: str


def find_reference(row: Mapping[str, Any]) -> Any:
    """The row's reference answer, None where it has none or only blank ones."""
    return next((one for one in _list_references(row) if one not in ([], {}) and str(one).strip()), None)


def find_reference_text(row: Mapping[str, Any]) -> str | None:
    """The row's reference as text (JSON of what is no text); a blank one where it has only those, None without any."""
    given, found = _list_references(row), find_reference(row)
    if found is None:
        found = given[0] if given else None
    return found if found is None or isinstance(found, str) else json.dumps(found, default=str)


def _list_references(row: Mapping[str, Any]) -> list[Any]:
    nested = row.get("reward_model")
    given = [row.get(name) for name in REFERENCE_FIELDS]
    given += [nested.get("ground_truth")] if isinstance(nested, Mapping) else []
    return [one for one in given if one is not None]


def find_reference_fault(reference: str, prompt: Any, field: str) -> ReferenceFault | None:
    """What is wrong with the reference that comes from this field; the prompt is text or chat messages."""
    text = reference.strip()
    if not text:
        detail = f"{field} is blank ({reference[:20]!r}), expected a reference answer; fill it or leave the row out"
        return ReferenceFault("empty_reference", detail)
    if text in _questions(prompt):
        detail = (
            f"{field} is the prompt itself ({text[:80]!r}), so an answer that repeats the prompt would pass; expected "
            "the right answer; correct the field or leave the row out"
        )
        return ReferenceFault("reference_is_prompt", detail)
    return None


def _questions(prompt: Any) -> list[str]:
    """The prompt as a text, and its last message where it is a chat or the text of one."""
    if isinstance(prompt, Sequence) and not isinstance(prompt, str):
        last = prompt[-1] if prompt else None
        prompt = last.get("content") if isinstance(last, Mapping) else None
    return [prompt.strip(), prompt.rpartition("user: ")[2].strip()] if isinstance(prompt, str) else []
