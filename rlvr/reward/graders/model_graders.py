"""Graders that ask a model: `score_model` (a number) and `label_model` (one of some labels).

Only models that the settings name are asked; a configuration cannot bring an address or a key. The texts of the item
and the sample never become part of the prompt: it refers to them (`[[sample.output_text]]`), and they are sent as
strings of one JSON document, by the same requests as those of the reward `judge` (`judge_requests`). Left out on
purpose: images and audio.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rlvr.core.chat_client import ChatError, Cost, Endpoint
from rlvr.core.registry import did_you_mean
from rlvr.core.types import Outcome, Score
from rlvr.reward.graders.controls import make_controls
from rlvr.reward.graders.grader_options import (
    blame_answer_or_task,
    check_fields,
    check_range,
    check_word,
    field_path,
    is_fault_of_answer,
    pass_threshold,
    score_of,
)
from rlvr.reward.graders.grader_templates import MissingField, Template, Values, as_text
from rlvr.reward.graders.grading_context import GradingContext
from rlvr.reward.judge.judge_requests import DATA, JudgeQuestion, UnjudgeableAnswer, clean, reason_code
from rlvr.reward.references import REFERENCE_FIELDS, ReferenceFault, find_reference_fault
from rlvr.reward.reward_options import is_list, is_number

V = TypeVar("V")

MAX_CHARS_SENT = 20_000  # of an answer
MAX_MESSAGES = 50
MAX_LABELS = 100
ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text")
_FORM = f"""
The texts to be judged are kept apart: where it says [[name]], what stands under that name in the JSON document at the
end is meant (of a long text, its beginning and its end). What stands under names that begin with sample was written by
a program that is being tested. {DATA}

Reply with one JSON object and nothing else, these three keys in this order:
{{"id": "%s", "reason": "<one or two sentences>", %s}}"""


@dataclass(frozen=True)
class ScoreModel:
    """The `score_model` grader: a model gives a number in `range` (0 to 1 by default)."""

    question: ModelQuestion
    low: float
    high: float
    passed_at: float

    @classmethod
    def of(cls, config: Any, where: str, models: Mapping[str, Endpoint]) -> ScoreModel:
        check_fields(config, where, ("input", "model"), ("name", "range", "sampling_params", "pass_threshold"))
        bounds, here = config.get("range", (0.0, 1.0)), field_path(where, "range")
        if not is_list(bounds) or len(bounds) != 2 or not all(is_number(b) and abs(b) <= 1e6 for b in bounds):
            raise ValueError(f"{here}={bounds!r:.80}, expected two numbers, such as [0, 1]")
        low, high = map(float, bounds)
        if not low < high:
            raise ValueError(f"{here}={bounds!r:.80}, expected the smaller number first")
        return cls(ModelQuestion.of(config, where, models), low, high, pass_threshold(config, where, low, high))

    async def grade(self, values: Values, context: GradingContext) -> Score:
        form = f'"score": <number from {self.low:g} (worst) to {self.high:g} (best)>'
        verdict = await self.question.ask(values, context, "score", form, self._read, self.low)
        if isinstance(verdict, Score):
            return verdict
        return score_of(verdict.value, self.passed_at, "low_score", verdict.cost, verdict.explanation)

    def _read(self, score: Any) -> float:
        if not is_number(score) or not math.isfinite(score) or not self.low <= score <= self.high:
            raise ValueError(f"the score is not a number from {self.low:g} to {self.high:g}")
        return float(score)


@dataclass(frozen=True)
class LabelModel:
    """The `label_model` grader: 1 if the label that a model chooses is one of `passing_labels`, else 0."""

    question: ModelQuestion
    labels: tuple[str, ...]
    passing: frozenset[str]

    @classmethod
    def of(cls, config: Any, where: str, models: Mapping[str, Endpoint]) -> LabelModel:
        check_fields(config, where, ("input", "model", "labels", "passing_labels"), ("name", "sampling_params"))
        for key in ("labels", "passing_labels"):
            words, here = config[key], field_path(where, key)
            if not is_list(words) or len(words) > MAX_LABELS or not all(isinstance(w, str) and w for w in words):
                raise ValueError(f"{here}={words!r:.80}, expected a list of words, at most {MAX_LABELS}")
        for label in config["passing_labels"]:
            check_word(label, field_path(where, "passing_labels"), config["labels"])
        question = ModelQuestion.of(config, where, models)
        return cls(question, tuple(config["labels"]), frozenset(config["passing_labels"]))

    async def grade(self, values: Values, context: GradingContext) -> Score:
        form = f'"label": <one of {json.dumps(self.labels, ensure_ascii=False)}>'
        verdict = await self.question.ask(values, context, "label", form, self._read, 0.0)
        if isinstance(verdict, Score):
            return verdict
        passed, why = verdict.value in self.passing, f"{verdict.value}: {verdict.explanation}"
        return score_of(float(passed), 1.0, "wrong_label", verdict.cost, why)

    def _read(self, label: Any) -> str:
        if label not in self.labels:
            raise ValueError(f"the label is not one of {', '.join(self.labels)}")
        return label


@dataclass(frozen=True)
class ModelVerdict(Generic[V]):
    value: V
    explanation: str
    cost: dict[str, float]


@dataclass(frozen=True)
class ModelQuestion:
    """The messages of a model grader and the endpoint that gets them."""

    messages: tuple[tuple[str, Template], ...]
    endpoint: Endpoint

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str, models: Mapping[str, Endpoint]) -> ModelQuestion:
        model = config["model"]
        if not isinstance(model, str) or model not in models:
            known = (
                f"{did_you_mean(str(model), sorted(models))}; the settings offer: {', '.join(sorted(models)) or 'none'}"
            )
            raise ValueError(f"{field_path(where, 'model')}={model!r:.80}{known}")
        body = {"temperature": 0.0, "max_tokens": 1024, **models[model].body}
        body |= _sampling(config.get("sampling_params"), field_path(where, "sampling_params"))
        here = field_path(where, "input")
        messages = _messages(config["input"], here)
        if not any(template.is_from_answer for _, template in messages):
            raise ValueError(f"{here} shows nothing of the sample; write {{{{ sample.output_text }}}}")
        return cls(messages, replace(models[model], body=body))

    async def ask(
        self, values: Values, context: GradingContext, key: str, form: str, read: Any, worst: float
    ) -> ModelVerdict[Any] | Score:
        """Ask the model and parse the `key` of its verdict by `read`; a score if the verdict cannot be used."""
        places = dict.fromkeys(place for _, template in self.messages for place in template.placeholders)
        try:
            texts = {str(place): as_text(place.find(values)) for place in places}
        except MissingField as missing:
            return blame_answer_or_task(is_fault_of_answer(missing, values), "missing_field", str(missing), worst)
        answers = {str(place): texts[str(place)] for place in places if place.is_from_answer}
        if not any(answer.strip() for answer in answers.values()):
            return Score(worst, Outcome.FAILED, "no_answer")
        if fault := self._find_fault(texts, values["item"]):
            return Score(None, Outcome.INVALID, fault.reason, detail=fault.detail)
        task = {name: clean(text) for name, text in texts.items() if name not in answers}
        question: JudgeQuestion[tuple[Any, str]] = JudgeQuestion(
            frozenset({key}),
            lambda document, word: self._request(values, document, _FORM % (word, form)),
            lambda reply: (read(reply[key]), str(reply["reason"])[:1000]),
            MAX_CHARS_SENT,
        )
        cost, client = Cost(), await context.client(self.endpoint)
        verdict = await question.ask(client, task, answers, cost)
        if isinstance(verdict, ChatError):
            control = make_controls(values["item"])[0].text
            verdict = await question.retry_or_blame(client, task, answers, cost, [verdict], control)
        if isinstance(verdict, UnjudgeableAnswer):
            return Score(worst, Outcome.FAILED, verdict.reason, {**vars(cost)}, str(verdict))
        if isinstance(verdict, ChatError):
            return Score(None, Outcome.ERROR, reason_code(verdict), {**vars(cost)}, str(verdict))
        return ModelVerdict(*verdict, {**vars(cost)})

    def _find_fault(self, texts: Mapping[str, str], item: Mapping[str, Any]) -> ReferenceFault | None:
        """The fault of a reference that the messages show."""
        shown = [f"item.{name}" for name in REFERENCE_FIELDS if f"item.{name}" in texts]
        faults = (find_reference_fault(texts[name], item.get("prompt"), name) for name in shown)
        return next((fault for fault in faults if fault), None)

    def _request(self, values: Values, document: str, form: str) -> list[dict[str, str]]:
        """One system message, then the others; neighbours of one role are joined, as many chat templates require."""
        filled = [(role, template.fill(values, lambda place: f"[[{place}]]")) for role, template in self.messages]
        system = [text for role, text in filled if role in ("system", "developer")]
        request = [{"role": "system", "content": "\n\n".join([*system, form.strip()])}]
        rest = [(role, text) for role, text in filled if role not in ("system", "developer")]
        for role, text in [*rest, ("user", f"The document:\n{document}")]:
            if request[-1]["role"] == role:
                request[-1]["content"] += f"\n\n{text}"
            else:
                request.append({"role": role, "content": text})
        return request


def _messages(given: Any, where: str) -> tuple[tuple[str, Template], ...]:
    if not is_list(given) or len(given) > MAX_MESSAGES:
        raise ValueError(f"{where}={given!r:.80}, expected a list of messages, at most {MAX_MESSAGES}")
    messages: list[tuple[str, Template]] = []
    for index, message in enumerate(given):
        here = f"{where}[{index}]"
        check_fields(message, here, ("role", "content"), ("type",))
        if message.get("type", "message") != "message":
            raise ValueError(f"{here}.type={message['type']!r:.80}, expected 'message'")
        role = check_word(message["role"], f"{here}.role", ROLES)
        content = message["content"]
        for part in content if isinstance(content, list) else [content]:
            messages.append((role, Template.of(_text(part, f"{here}.content"), f"{here}.content")))
    return tuple(messages)


def _text(part: Any, where: str) -> Any:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") not in _TEXTS:
        raise ValueError(
            f"{where}.type={part.get('type')!r:.80}, expected one of {', '.join(_TEXTS)}; no images or audio"
        )
    return check_fields(part, where, ("text",), ())["text"]


def _sampling(given: Any, where: str) -> dict[str, Any]:
    if given is None:
        return {}
    check_fields(given, where, (), ("temperature", "top_p", "seed", "max_completions_tokens", "reasoning_effort"))
    body: dict[str, Any] = {}
    for name, low, high in (("temperature", 0, 2), ("top_p", 0, 1), ("seed", -(2**53), 2**53)):
        if given.get(name) is not None:
            check_range(given[name], f"{where}.{name}", low, high)
            body[name] = given[name]
    if given.get("max_completions_tokens") is not None:
        body["max_tokens"] = int(
            check_range(given["max_completions_tokens"], f"{where}.max_completions_tokens", 16, 1e6)
        )
    if given.get("reasoning_effort") is not None:
        known = ("none", "minimal", "low", "medium", "high", "xhigh")
        body["reasoning_effort"] = check_word(given["reasoning_effort"], f"{where}.reasoning_effort", known)
    return body
