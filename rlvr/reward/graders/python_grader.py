"""The `python` grader: a user's program with a function `grade(sample, item)`, run in the sandbox like an answer.

The program gets copies of the sample and the item as JSON; only the number that it returns comes back. Programs have
this Python's standard library, no network and no files; `image_tag` is accepted and ignored.

A program that fails is an `error`, never a zero. An answer must not gain by making it fail: then controls made from the
item alone are graded, which show whether the answer is to blame and gets 0 (`ungradeable`, or `timeout`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlvr.core.types import Outcome, Score
from rlvr.reward.graders.controls import ALWAYS, HELD, Blame
from rlvr.reward.graders.grader_options import (
    blame_answer_or_task,
    check_fields,
    field_path,
    pass_threshold,
    score_of,
    with_json,
)
from rlvr.reward.graders.grader_templates import Values
from rlvr.reward.graders.grading_context import GradingContext
from rlvr.reward.signatures import LARGEST
from rlvr.sandbox import Sandbox, Verdict

MAX_SOURCE = 256_000  # bytes of a program, as in the API
MAX_DATA = 600_000  # bytes of the sample and the item as JSON
_NAMED = re.compile(r"\bgrade\b")
# Appended to the program to call it. The number is read by a test of ours, which the program cannot influence.
_CALL = """

def _graded():
    import json
    return grade(json.loads({sample}), json.loads({item}))
"""
_TEST = """value = _graded()
assert isinstance(value, (int, float)), "type " + repr(type(value))
assert False, "value " + repr(float(value))
"""


class _SandboxFailure(Exception):
    """The sandbox broke: the fault of neither the program nor the answer."""


class _ProgramFailure(Exception):
    """The program returned no number. `reason` says why: `timeout`, `wrong_type`, ..."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class PythonGrader:
    source: str
    passed_at: float
    _blame: Blame = field(default_factory=Blame, repr=False, compare=False)

    @classmethod
    def of(cls, config: Any, where: str) -> PythonGrader:
        check_fields(config, where, ("source",), ("name", "image_tag", "pass_threshold"))
        source, tag = config["source"], config.get("image_tag")
        if not isinstance(source, str) or not _NAMED.search(source):
            raise ValueError(f"{field_path(where, 'source')} defines no grade(sample, item)")
        if len(source.encode("utf-8", "replace")) > MAX_SOURCE:
            raise ValueError(f"{field_path(where, 'source')} is larger than {MAX_SOURCE:,} bytes")
        if tag is not None and not isinstance(tag, str):
            raise ValueError(f"{field_path(where, 'image_tag')}={tag!r:.80}, expected text")
        return cls(source, pass_threshold(config, where))

    async def grade(self, values: Values, context: GradingContext) -> Score:
        sample, item = _json(values["sample"]), _json(values["item"])
        sizes = len(sample.encode()), len(item.encode())
        if sum(sizes) > MAX_DATA:
            detail = f"{sizes[0]:,} bytes of sample and {sizes[1]:,} of item, at most {MAX_DATA:,} are handed over"
            return blame_answer_or_task(sizes[1] <= MAX_DATA // 2, "too_large", detail)
        try:
            sandbox = await context.sandbox()
            return score_of(await self._run(sandbox, sample, item, context.timeout_s), self.passed_at)
        except _SandboxFailure as broken:
            return Score(None, Outcome.ERROR, "sandbox", detail=str(broken))
        except (OSError, RuntimeError, ValueError) as refusal:
            return Score(None, Outcome.ERROR, "no_tier", detail=f"{type(refusal).__name__}: {refusal}")
        except _ProgramFailure as failed:
            return await self._score_failure(failed, sandbox, values, context.timeout_s)

    async def _score_failure(self, failed: _ProgramFailure, sandbox: Sandbox, values: Values, seconds: float) -> Score:
        """0 if the answer is to blame for the failure, else an error without a score."""

        async def attempt(control: str) -> tuple[str, float]:
            try:
                await self._run(sandbox, _json(with_json({"output_text": control})), _json(values["item"]), seconds)
            except _ProgramFailure as again:
                return str(again), HELD * seconds if again.reason == "timeout" else ALWAYS
            except _SandboxFailure as broken:
                return str(broken), 0.0
            return "", ALWAYS

        if why := await self._blame.find(values["item"], values["sample"], attempt):
            return Score(None, Outcome.ERROR, "grader_failed", detail=f"{failed}; {why}"[:2000])
        detail = f"the grader can grade a control made from this item, but not this answer: {failed}"
        if failed.reason == "timeout":
            return Score(0.0, Outcome.TIMEOUT, "timeout", detail=detail)
        return Score(0.0, Outcome.FAILED, "ungradeable", detail=detail)

    async def _run(self, sandbox: Sandbox, sample: str, item: str, seconds: float) -> float:
        solution = self.source + _CALL.format(sample=repr(sample), item=repr(item))
        return _read(await sandbox.averify(solution, [_TEST], seconds))


def _read(verdict: Verdict) -> float:
    """The number that `_TEST` reported in its assertion message; raises if it reported none."""
    if verdict.outcome in (Outcome.ERROR, Outcome.INVALID):
        raise _SandboxFailure(f"{verdict.reason}: {verdict.detail}")
    kind, _, rest = verdict.detail.partition(" ")
    if verdict.reason != "assertion":
        raise _ProgramFailure(verdict.reason, verdict.detail)
    if kind != "value":
        raise _ProgramFailure("wrong_type", verdict.detail)
    value = float(rest)
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise _ProgramFailure(
            "not_finite", f"grade returned {value}, expected a number up to {LARGEST:g}, plus or minus"
        )
    return value


_LONE = re.compile(r"[\ud800-\udfff]")


def _json(values: Mapping[str, Any]) -> str:
    return _LONE.sub("\ufffd", json.dumps(values, ensure_ascii=False, default=str))
