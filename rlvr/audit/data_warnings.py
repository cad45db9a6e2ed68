"""Warn of labelled rows that cannot measure a verifier: references that say nothing, rows that contradict each other.

For example:

    list_data_warnings(rows)       # ["3 rows: the reference is the prompt itself (first: row 7)"]
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.reward.references import find_reference_fault, find_reference_text

COMMON = 0.5  # the share of tasks with one reference from which a constant answer is worth a warning
MIN_TASKS = 10  # from which that share says something
CHOICES = ("choices", "options")


def list_data_warnings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each kind of doubtful row, with how many there are and the first."""
    found: dict[str, list[int]] = {}
    labels: dict[str, bool] = {}
    references: dict[str, tuple[str, int]] = {}
    for number, row in enumerate(rows, 1):
        reference, prompt = find_reference_text(row), row.get("prompt")
        fault = None if reference is None else find_reference_fault(reference, prompt, "the reference")
        if fault:
            what = "is blank" if fault.reason == "empty_reference" else "is the prompt itself"
            found.setdefault(f"the reference {what}", []).append(number)
        for name in CHOICES:
            if _has_twins(row.get(name)):
                found.setdefault(f"a choice stands twice among the {name}: two letters are right", []).append(number)
        task = {key: value for key, value in row.items() if key not in ("label", "category", "note", "id")}
        key = json.dumps(task, sort_keys=True, default=str)
        if labels.setdefault(key, row["label"]) != row["label"]:
            found.setdefault("an equal row has the other label", []).append(number)
        if prompt and reference is not None and fault is None:
            known, _ = references.setdefault(json.dumps(prompt, default=str), (reference, number))
            if known != reference:
                found.setdefault("an earlier row has this prompt and another reference", []).append(number)
    shown = [
        f"{len(numbers)} row{'s' * (len(numbers) != 1)}: {what} (first: row {numbers[0]})"
        for what, numbers in found.items()
    ]
    return [*shown, *_constant_answers([reference for reference, _ in references.values()])]


def _constant_answers(references: Sequence[str]) -> list[str]:
    if len(references) < MIN_TASKS:
        return []
    ((reference, count),) = Counter(references).most_common(1)
    if count < COMMON * len(references):
        return []
    return [
        f"{count} of {len(references)} tasks have the reference {reference[:40]!r}: a constant answer passes as often, "
        "and false accepts among them cannot be seen"
    ]


def _has_twins(choices: Any) -> bool:
    values = list(choices.values()) if isinstance(choices, Mapping) else choices
    if not isinstance(values, list):
        return False
    texts = [str(value).strip() for value in values]
    return len(set(texts)) < len(texts)
