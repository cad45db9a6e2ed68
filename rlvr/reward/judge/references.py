"""Faults of a reference answer that are seen without any answer: it is blank, or it is the prompt itself.

Such a row is `invalid`, whatever the answer is. `python -m pytest tests/test_graders_references.py` exercises it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ReferenceFault(NamedTuple):
    reason: str  # `empty_reference` or `reference_is_prompt`
    detail: str


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
