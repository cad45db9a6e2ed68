"""The `python` grader: `grade(sample, item)` of a program that somebody sent, run in the sandbox as an answer would be.

The program gets copies of the sample and the item as JSON and returns a number; nothing else of it comes back. Programs
have this Python's standard library, no network and no files; `image_tag` is accepted and says nothing here.

A program that fails is an `error`, never a zero. An answer must not gain by making it fail: then a plain answer is
graded for the same item, and if that works, the answer is to blame and gets 0 (`ungradeable`, or `timeout`).
`python -m pytest tests/test_graders_python.py` exercises it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.reward.graders.desk import Desk
from rlvr.reward.graders.fields import blamed, graded, path, taken, threshold
from rlvr.reward.graders.templates import Values
from rlvr.reward.signatures import LARGEST
from rlvr.reward.verdicts import PLAIN
from rlvr.sandbox import Sandbox, Verdict
from rlvr.types import Outcome, Score

MAX_SOURCE = 256_000  # bytes of a program, as in the API
MAX_DATA = 600_000  # bytes of the sample and the item as JSON
_NAMED = re.compile(r"\bgrade\b")
# What calls the program, put behind it. Test text of ours asks for the number; nothing of the program decides there.
_CALL = """

def _graded():
    import json
    return grade(json.loads({sample}), json.loads({item}))
"""
_TEST = """value = _graded()
kind = type(value)
assert kind is int or kind is float or kind is bool, "type " + repr(kind)
assert False, "value " + repr(float(value))
"""


class _Failed(Exception):
    """The program gave no number; `timeout` where it was late."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True)
class Program:
    source: str
    passed_at: float

    @classmethod
    def of(cls, config: Any, where: str) -> Program:
        given = taken(config, where, ("source",), ("name", "image_tag", "pass_threshold"))
        source, tag = given["source"], given.get("image_tag")
        if not isinstance(source, str) or not _NAMED.search(source):
            raise ValueError(f"{path(where, 'source')} defines no grade(sample, item)")
        if len(source.encode("utf-8", "replace")) > MAX_SOURCE:
            raise ValueError(f"{path(where, 'source')} is larger than {MAX_SOURCE:,} bytes")
        if tag is not None and not isinstance(tag, str):
            raise ValueError(f"{path(where, 'image_tag')}={tag!r:.80}, expected text")
        return cls(source, threshold(given, where))

    async def grade(self, values: Values, desk: Desk) -> Score:
        sample, item = _json(values["sample"]), _json(values["item"])
        sizes = len(sample.encode()), len(item.encode())
        if sum(sizes) > MAX_DATA:
            said = f"{sizes[0]:,} bytes of sample and {sizes[1]:,} of item, at most {MAX_DATA:,} are handed over"
            return blamed(sizes[1] <= MAX_DATA // 2, "too_large", said)
        try:
            sandbox = await desk.sandbox()
            return graded(await self._run(sandbox, sample, item, desk.timeout_s), self.passed_at)
        except _Broken as broken:
            return Score(None, Outcome.ERROR, "sandbox", detail=str(broken))
        except (OSError, RuntimeError, ValueError) as refusal:
            return Score(None, Outcome.ERROR, "no_tier", detail=f"{type(refusal).__name__}: {refusal}")
        except _Failed as failed:
            return await self._blame(failed, sandbox, item, desk.timeout_s)

    async def _blame(self, failed: _Failed, sandbox: Sandbox, item: str, seconds: float) -> Score:
        try:
            await self._run(sandbox, _json({"output_text": PLAIN}), item, seconds)
        except (_Failed, _Broken) as again:
            detail = f"{failed}; a plain answer was not graded either: {again}"
            return Score(None, Outcome.ERROR, "grader_failed", detail=detail[:2000])
        said = f"the grader can grade a plain answer to this item, and this one it cannot: {failed}"
        if failed.reason == "timeout":
            return Score(0.0, Outcome.TIMEOUT, "timeout", detail=said)
        return Score(0.0, Outcome.FAILED, "ungradeable", detail=said)

    async def _run(self, sandbox: Sandbox, sample: str, item: str, seconds: float) -> float:
        solution = self.source + _CALL.format(sample=repr(sample), item=repr(item))
        return _read(await sandbox.averify(solution, [_TEST], seconds))


class _Broken(Exception):
    """The sandbox broke: nobody's failure."""


def _read(verdict: Verdict) -> float:
    if verdict.outcome in (Outcome.ERROR, Outcome.INVALID):
        raise _Broken(f"{verdict.reason}: {verdict.detail}")
    kind, _, rest = verdict.detail.partition(" ")
    if verdict.reason != "assertion" or kind != "value":
        raise _Failed("wrong_type" if verdict.reason == "assertion" else verdict.reason, verdict.detail)
    value = float(rest)
    if not math.isfinite(value) or abs(value) > LARGEST:
        raise _Failed("not_finite", f"grade returned {value}, expected a number up to {LARGEST:g}, plus or minus")
    return value


_LONE = re.compile(r"[\ud800-\udfff]")


def _json(values: Mapping[str, Any]) -> str:
    return _LONE.sub("\ufffd", json.dumps(values, ensure_ascii=False, default=str))
