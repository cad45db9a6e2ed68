"""Graders that compare two texts: `string_check` and `text_similarity`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.core.types import Outcome, Score
from rlvr.reward.graders.grader_options import (
    MAX_TEXT,
    blame_answer_or_task,
    check_fields,
    check_word,
    field_path,
    fill_template,
    pass_threshold,
    score_of,
)
from rlvr.reward.graders.grader_templates import Template, Values
from rlvr.reward.graders.grading_context import GradingContext
from rlvr.reward.graders.similarity import (
    MAX_CHARS,
    METRICS,
    UNSUPPORTED_METRICS,
    count_needed_words,
    count_words,
    similarity,
)
from rlvr.reward.references import find_reference_fault

OPERATIONS = ("eq", "ne", "like", "ilike")


@dataclass(frozen=True)
class TwoTexts:
    """The fields `input` and `reference` of a grader that compares texts."""

    input: Template
    reference: Template

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> TwoTexts:
        if config["input"] == config["reference"] and "sample" in str(config["input"]):
            raise ValueError(
                f"{field_path(where, 'reference')}={config['reference']!r:.80} is the input itself: every answer would "
                "get the same value; expected another text, such as '{{ item.answer }}'"
            )
        texts = cls(*(Template.of(config[name], field_path(where, name)) for name in ("input", "reference")))
        if (
            not texts.reference.placeholders
            and not str(config["reference"]).strip()
            and config.get("operation") != "ne"
        ):
            raise ValueError(
                f"{field_path(where, 'reference')}={config['reference']!r} is blank: there is nothing to compare with; "
                "expected a text, such as '{{ item.answer }}'"
            )
        return texts

    def fill(self, values: Values, limit: int = MAX_TEXT) -> tuple[str, str] | Score:
        """(input, reference); a score where one cannot be filled, first the task's own text."""
        reference, text = (fill_template(one, values, limit) for one in (self.reference, self.input))
        if isinstance(reference, Score):
            return reference
        if (places := self.reference.placeholders) and not self.reference.is_from_answer:
            names_prompt = any(place.steps[0] == "prompt" for place in places)  # then it is meant to be compared with
            prompt = None if names_prompt else values["item"].get("prompt")
            if fault := find_reference_fault(reference, prompt, f"reference {self.reference}"):
                return Score(None, Outcome.INVALID, fault.reason, detail=fault.detail)
        return text if isinstance(text, Score) else (text, reference)


@dataclass(frozen=True)
class StringCheck:
    """1 or 0: `eq` and `ne` compare whole texts; `like` looks for the reference in the input, `ilike` in any case."""

    texts: TwoTexts
    operation: str

    @classmethod
    def of(cls, config: Any, where: str) -> StringCheck:
        check_fields(config, where, ("input", "reference", "operation"))
        operation = check_word(config["operation"], field_path(where, "operation"), OPERATIONS)
        return cls(TwoTexts.of(config, where), operation)

    async def grade(self, values: Values, context: GradingContext) -> Score:
        texts = self.texts.fill(values)
        if isinstance(texts, Score):
            return texts
        text, reference = (one.casefold() for one in texts) if self.operation == "ilike" else texts
        if self.operation in ("like", "ilike"):
            if not reference:  # stands in every text
                return Score(0.0, Outcome.FAILED, "empty_reference", detail="the reference is empty: any text has it")
            return score_of(float(reference in text), 1.0, "not_found")
        if self.operation == "ne":
            return score_of(float(text != reference), 1.0, "equal")
        return score_of(float(text == reference), 1.0, "not_equal")


@dataclass(frozen=True)
class TextSimilarity:
    """A grader of the similarity of two texts, from 0 to 1; passed from `pass_threshold` on."""

    texts: TwoTexts
    metric: str
    passed_at: float

    @classmethod
    def of(cls, config: Any, where: str) -> TextSimilarity:
        check_fields(config, where, ("input", "reference", "evaluation_metric"), ("name", "pass_threshold"))
        metric = check_word(
            config["evaluation_metric"], field_path(where, "evaluation_metric"), METRICS, UNSUPPORTED_METRICS
        )
        grader = cls(TwoTexts.of(config, where), metric, pass_threshold(config, where))
        if not grader.texts.reference.placeholders and (fault := grader.find_fault(config["reference"])):
            raise ValueError(f"{field_path(where, 'reference')}={config['reference']!r:.80}: {fault}")
        return grader

    def find_fault(self, reference: str) -> str:
        """Why the metric is not defined for the reference, or an empty text."""
        needed = count_needed_words(self.metric)
        count = count_words(reference)
        few = f"the reference has {count} words: {self.metric} needs at least {needed}; use another metric"
        return few if count < needed else ""

    async def grade(self, values: Values, context: GradingContext) -> Score:
        texts = self.texts.fill(values, MAX_CHARS)
        if isinstance(texts, Score):
            return texts
        if fault := self.find_fault(texts[1]):
            return blame_answer_or_task(self.texts.reference.is_from_answer, "short_reference", fault)
        return score_of(await asyncio.to_thread(similarity, self.metric, *texts), self.passed_at)
