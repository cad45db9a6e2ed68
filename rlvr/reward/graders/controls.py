"""Controls: answers made from the task alone, graded to find out whether a failure is the grader's or the answer's.

Controls are the item's reference, as it stands and in the usual forms (`#### 7`, `\\boxed{7}`, tags, JSON). The forms
that the item's prompt names, or its reference uses, come first. An item may state its own, `control_answer`: a right
answer as the task asks for it, then the only control. For an item without a reference a plain sentence takes its place,
in the same forms. They never depend on an answer.

An answer that a grader cannot grade is to blame if the grader can grade a control, unless the answer is itself the
reference in one of these forms: a right answer is not wrong because a grader reads another form only. But if the item
asks for the form that was graded, an answer in another form did not do what it was asked to do.
`python -m pytest tests/test_graders_controls.py` exercises it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlvr.reward.judge.judge_requests import PLAIN

REFERENCE_FIELDS = ("answer", "reference", "reference_answer", "ground_truth", "expected", "target", "gold", "solution")
MAX_ITEMS = 10_000  # whose controls' result is kept
_MARK = "####"  # before the final answer of a worked one, as in GSM8K
_NAMED = {
    _MARK: re.compile(_MARK),
    "boxed": re.compile(r"\\boxed\b"),
    "tags": re.compile(r"<answer>"),
    "json": re.compile(r"\bJSON\b", re.IGNORECASE),
}

Attempt = Callable[[str], Awaitable[tuple[str, bool]]]
"""Grades a control: (why that failed, "" if it did not; whether it would fail again)."""


class Control(NamedTuple):
    text: str
    is_asked: bool = False  # whether the item asks for answers in this form


def find_reference(item: Mapping[str, Any]) -> Any:
    """The item's reference answer, None where it has none; `reward_model.ground_truth` is verl's."""
    nested = item.get("reward_model")
    found = [item.get(name) for name in REFERENCE_FIELDS]
    found += [nested.get("ground_truth")] if isinstance(nested, Mapping) else []
    return next((one for one in found if one not in (None, [], {}) and str(one).strip()), None)


def _find_stated(item: Mapping[str, Any]) -> str:
    stated = item.get("control_answer")
    return stated if isinstance(stated, str) and stated.strip() else ""


def make_controls(item: Mapping[str, Any]) -> list[Control]:
    """The control answers of an item, those that it asks for first."""
    if stated := _find_stated(item):
        return [Control(stated, True)]
    reference = PLAIN if (found := find_reference(item)) is None else found
    text = reference if isinstance(reference, str) else json.dumps(reference, default=str)
    final = text.rpartition(_MARK)[2].strip() or text
    fields = json.dumps({"answer": reference if final == text else final}, default=str)
    forms = {
        "": text,
        _MARK: f"{_MARK} {final}",
        "boxed": f"\\boxed{{{final}}}",
        "tags": f"<answer>{final}</answer>",
        "said": f"The answer is {final}.",
        "json": fields,
        "final": final,
    }
    asked = f"{item.get('prompt', '')}\n{text}"
    controls = [Control(text, form in _NAMED and bool(_NAMED[form].search(asked))) for form, text in forms.items()]
    return sorted(dict.fromkeys(controls), key=lambda control: not control.is_asked)


@dataclass
class Blame:
    """Finds who is to blame for a failure of one grader; remembers by item which control it could grade."""

    _known: dict[str, Control | str] = field(default_factory=dict[str, "Control | str"])

    async def find(self, item: Mapping[str, Any], sample: Mapping[str, Any], attempt: Attempt) -> str:
        """Why the grader is to blame for not grading this sample; "" if the answer is."""
        controls = make_controls(item)
        key = json.dumps(item, sort_keys=True, default=str)
        if (graded := self._known.get(key)) is None:
            graded, is_final = await _try_in_turn(controls, attempt)
            if is_final:
                if len(self._known) >= MAX_ITEMS:
                    self._known.clear()
                self._known[key] = graded
        if isinstance(graded, str):
            return (
                f"no control made from the item was graded either: {graded}. If the grader is right, give the item a "
                "field 'control_answer' with an answer that it can grade: then answers that it cannot get 0"
            )
        if find_reference(item) is None and not _find_stated(item):
            return ""  # the controls are no right answers
        answer = _bare(sample.get("output_text"))
        same = [control for control in controls if _bare(control.text) == answer]
        if not same or (graded.is_asked and not any(control.is_asked for control in same)):
            return ""
        return (
            f"the answer is the item's own reference, and the grader can read it only in another form, such as "
            f"{graded.text[:80]!r}. Make it read this form too; or, if answers must have the other one, name that form "
            "in the prompt or give the item a field 'control_answer' with a right answer in that form"
        )


async def _try_in_turn(controls: list[Control], attempt: Attempt) -> tuple[Control | str, bool]:
    """(the first control that was graded, else why none was; whether that would be found again)."""
    first, is_final = "", True
    for control in controls:
        why, would_fail_again = await attempt(control.text)
        if not why:
            return control, is_final
        first = first or why
        is_final &= would_fail_again
    return first, is_final


def _bare(text: Any) -> str:
    """The text without white space, which says nothing about who is right."""
    return "".join(text.split()) if isinstance(text, str) else ""
