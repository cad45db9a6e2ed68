"""Graders that compare two texts: `string_check` and `text_similarity`. `tests/test_graders.py` exercises them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from rlvr.reward.graders.desk import Desk
from rlvr.reward.graders.fields import blamed, choice, filled, graded, path, taken, threshold
from rlvr.reward.graders.similarity import ABSENT, MAX_CHARS, METRICS, similarity
from rlvr.reward.graders.templates import Template, Values
from rlvr.types import Outcome, Score

OPERATIONS = ("eq", "ne", "like", "ilike")


@dataclass(frozen=True)
class StringCheck:
    """1 or 0: `eq` and `ne` compare whole texts; `like` looks for the reference in the input, `ilike` in any case."""

    input: Template
    reference: Template
    operation: str

    @classmethod
    def of(cls, config: Any, where: str) -> StringCheck:
        given = taken(config, where, ("input", "reference", "operation"))
        return cls(
            Template.of(given["input"], path(where, "input")),
            Template.of(given["reference"], path(where, "reference")),
            choice(given["operation"], path(where, "operation"), OPERATIONS),
        )

    async def grade(self, values: Values, desk: Desk) -> Score:
        text, reference = filled(self.input, values), filled(self.reference, values)
        for side in (reference, text):  # a broken task is no answer's failure
            if isinstance(side, Score):
                return side
        assert isinstance(text, str) and isinstance(reference, str)
        if self.operation == "ilike":
            text, reference = text.casefold(), reference.casefold()
        if self.operation in ("like", "ilike"):
            if not reference:  # stands in every text
                return blamed(self.reference.of_answer, "empty_reference", "the reference is empty: any text has it")
            return graded(float(reference in text), 1.0, "not_found")
        if self.operation == "ne":
            return graded(float(text != reference), 1.0, "equal")
        return graded(float(text == reference), 1.0, "not_equal")


@dataclass(frozen=True)
class TextSimilarity:
    """How alike the texts are, from 0 to 1; at least `pass_threshold` has passed."""

    input: Template
    reference: Template
    metric: str
    passed_at: float

    @classmethod
    def of(cls, config: Any, where: str) -> TextSimilarity:
        given = taken(config, where, ("input", "reference", "evaluation_metric"), ("name", "pass_threshold"))
        return cls(
            Template.of(given["input"], path(where, "input")),
            Template.of(given["reference"], path(where, "reference")),
            choice(given["evaluation_metric"], path(where, "evaluation_metric"), METRICS, ABSENT),
            threshold(given, where),
        )

    async def grade(self, values: Values, desk: Desk) -> Score:
        text, reference = filled(self.input, values, MAX_CHARS), filled(self.reference, values, MAX_CHARS)
        for side in (reference, text):
            if isinstance(side, Score):
                return side
        assert isinstance(text, str) and isinstance(reference, str)
        if not reference.strip() and not self.reference.of_answer:
            return Score(None, Outcome.INVALID, "empty_reference", detail="the reference is empty: nothing to be like")
        return graded(await asyncio.to_thread(similarity, self.metric, text, reference), self.passed_at)
