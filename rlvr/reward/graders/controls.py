"""Controls: answers made from the task alone, graded to find out whether a failure is the grader's or the answer's.

Controls are the item's reference, as it stands and in the usual forms (`#### 7`, `\\boxed{7}`, tags, JSON). The forms
that the item's prompt names, or its reference uses, come first. An item may state its own, `control_answer`: a right
answer as the task asks for it, then the only control. For an item without a reference a plain sentence takes its place,
in the same forms. They never depend on an answer.

An answer that a grader cannot grade is to blame if the grader can grade a control, unless the answer is itself the
reference in one of these forms: a right answer is not wrong because a grader reads another form only. But if the item
asks for the form that was graded, an answer in another form did not do what it was asked to do.

A grader that runs out of time on the controls costs its time limit for each. That is paid once for an item, and tried
again after HELD times the limit, since a busy machine may have been the cause; after SLOW_ITEMS such items in a row
only the first control of further items is tried.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from rlvr.reward.judge.judge_requests import PLAIN
from rlvr.reward.references import find_reference

MAX_ITEMS = 10_000  # whose controls' result is kept
HELD = 1000.0  # times a control's time limit: how long it is not tried again after it ran out of time
SLOW_ITEMS = 3  # in a row whose controls all ran out of time, from which one control is tried of others
ALWAYS = float("inf")
_MARK = "####"  # before the final answer of a worked one, as in GSM8K
_NAMED = {
    _MARK: re.compile(_MARK),
    "boxed": re.compile(r"\\boxed\b"),
    "tags": re.compile(r"<answer>"),
    "json": re.compile(r"\bJSON\b", re.IGNORECASE),
}

Attempt = Callable[[str], Awaitable[tuple[str, float]]]
"""Grades a control: (why that failed, "" if it did not; for how many seconds that holds, 0 to ask again each time)."""


class Control(NamedTuple):
    text: str
    is_asked: bool = False  # whether the item asks for answers in this form


def _find_stated(item: Mapping[str, Any]) -> str:
    """The item's `control_answer`: a text as it stands, anything else as JSON; "" if there is none."""
    stated = item.get("control_answer")
    text = stated if isinstance(stated, str) or stated is None else json.dumps(stated, default=str)
    return text if text and text.strip() else ""


def make_controls(item: Mapping[str, Any]) -> list[Control]:
    """The control answers of an item; the ones that the item itself asks for come first."""
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


class _Finding(NamedTuple):
    """The first control that was graded, else why none was, and until when (by the monotonic clock) that holds."""

    graded: Control | str
    until: float


@dataclass
class Blame:
    """Finds who is to blame for a failure of one grader; remembers by item which control it could grade."""

    clock: Callable[[], float] = time.monotonic
    _known: dict[str, _Finding] = field(default_factory=dict[str, _Finding])
    _locks: WeakValueDictionary[tuple[int, str], asyncio.Lock] = field(
        default_factory=WeakValueDictionary[tuple[int, str], asyncio.Lock]
    )
    _slow_items: int = 0  # in a row whose controls all failed for a time only

    async def find(self, item: Mapping[str, Any], sample: Mapping[str, Any], attempt: Attempt) -> str:
        """Why the grader is to blame for not grading this sample; "" if the answer is."""
        controls = make_controls(item)
        graded = await self._find_graded(controls, json.dumps(item, sort_keys=True, default=str), attempt)
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

    async def _find_graded(self, controls: list[Control], key: str, attempt: Attempt) -> Control | str:
        """The first control that is graded, else why none is. Answers to one item that wait at once pay once."""
        place = (id(asyncio.get_running_loop()), key)
        lock = self._locks.setdefault(place, asyncio.Lock())
        async with lock:
            known = self._known.get(key)
            if known is not None and self.clock() < known.until:
                if isinstance(known.graded, str) and known.until != ALWAYS:
                    again = known.until - self.clock()
                    return f"{known.graded} (found earlier; its controls are tried again in {again:,.0f} s)"
                return known.graded
            skipped = controls[1:] if self._slow_items >= SLOW_ITEMS else []
            finding, seconds = await _try_in_turn(controls[: len(controls) - len(skipped)], attempt)
            if skipped and isinstance(finding, str):
                finding += f" (one control of {len(controls)} tried: on the last items all ran out of time)"
            if seconds > 0:
                if len(self._known) >= MAX_ITEMS:
                    self._known.clear()
                self._known[key] = _Finding(finding, self.clock() + seconds)
            failed_for_now = isinstance(finding, str) and 0 < seconds < ALWAYS
            self._slow_items = self._slow_items + 1 if failed_for_now else 0
            return finding


async def _try_in_turn(controls: list[Control], attempt: Attempt) -> tuple[Control | str, float]:
    """(the first control that was graded, else why none was; the seconds for which that holds)."""
    first, held = "", ALWAYS
    for control in controls:
        why, seconds = await attempt(control.text)
        held = min(held, seconds)
        if not why:
            return control, held
        first = first or why
    return first, held


def _bare(text: Any) -> str:
    """The text without white space, which says nothing about who is right."""
    return "".join(text.split()) if isinstance(text, str) else ""
