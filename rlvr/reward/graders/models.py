"""Graders that ask a model: `score_model` (a number) and `label_model` (one of some labels).

Only models that the settings name are asked; a configuration cannot bring an address or a key. The texts of the item
and the sample never become part of the prompt: a template shows where they are meant (`[[sample.output_text]]`), and
they travel as strings of one JSON document, asked for and judged as by the reward `judge` (`rlvr.reward.verdicts`).
Left out on purpose: images and audio. `python -m pytest tests/test_graders_models.py` exercises it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rlvr.http_line import Cost, Endpoint, NoReply
from rlvr.registry import nearest
from rlvr.reward.graders.desk import Desk
from rlvr.reward.graders.fields import blamed, choice, graded, number, of_answer, path, taken, threshold
from rlvr.reward.graders.templates import Missing, Place, Template, Values, as_text
from rlvr.reward.options import is_list, is_number
from rlvr.reward.verdicts import DATA, Inquiry, Unjudgeable, clean, code
from rlvr.types import Outcome, Score

V = TypeVar("V")

ROOM = 20_000  # characters of an answer that are sent
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
    """A number in `range` (0 to 1 where it is not given), as the model says it."""

    asked: Asked
    low: float
    high: float
    passed_at: float

    @classmethod
    def of(cls, config: Any, where: str, models: Mapping[str, Endpoint]) -> ScoreModel:
        given = taken(config, where, ("input", "model"), ("name", "range", "sampling_params", "pass_threshold"))
        bounds, here = given.get("range", (0.0, 1.0)), path(where, "range")
        if not is_list(bounds) or len(bounds) != 2 or not all(is_number(b) and abs(b) <= 1e6 for b in bounds):
            raise ValueError(f"{here}={bounds!r:.80}, expected two numbers, such as [0, 1]")
        low, high = map(float, bounds)
        if not low < high:
            raise ValueError(f"{here}={bounds!r:.80}, expected the smaller number first")
        return cls(Asked.of(given, where, models), low, high, threshold(given, where, low, high))

    async def grade(self, values: Values, desk: Desk) -> Score:
        form = f'"score": <number from {self.low:g} (worst) to {self.high:g} (best)>'
        said = await self.asked.verdict(values, desk, "score", form, self._read, self.low)
        return said if isinstance(said, Score) else graded(said.value, self.passed_at, "low_score", said.cost, said.why)

    def _read(self, score: Any) -> float:
        if not is_number(score) or not math.isfinite(score) or not self.low <= score <= self.high:
            raise ValueError(f"the score is not a number from {self.low:g} to {self.high:g}")
        return float(score)


@dataclass(frozen=True)
class LabelModel:
    """1 where the model's label is one of `passing_labels`, else 0."""

    asked: Asked
    labels: tuple[str, ...]
    passing: frozenset[str]

    @classmethod
    def of(cls, config: Any, where: str, models: Mapping[str, Endpoint]) -> LabelModel:
        given = taken(config, where, ("input", "model", "labels", "passing_labels"), ("name", "sampling_params"))
        for key in ("labels", "passing_labels"):
            words = given[key]
            if not is_list(words) or len(words) > MAX_LABELS or not all(isinstance(w, str) and w for w in words):
                raise ValueError(f"{path(where, key)}={words!r:.80}, expected a list of words, at most {MAX_LABELS}")
        for label in given["passing_labels"]:
            choice(label, path(where, "passing_labels"), given["labels"])
        return cls(Asked.of(given, where, models), tuple(given["labels"]), frozenset(given["passing_labels"]))

    async def grade(self, values: Values, desk: Desk) -> Score:
        form = f'"label": <one of {json.dumps(self.labels, ensure_ascii=False)}>'
        said = await self.asked.verdict(values, desk, "label", form, self._read, 0.0)
        if isinstance(said, Score):
            return said
        return graded(float(said.value in self.passing), 1.0, "wrong_label", said.cost, f"{said.value}: {said.why}")

    def _read(self, label: Any) -> str:
        if label not in self.labels:
            raise ValueError(f"the label is not one of {', '.join(self.labels)}")
        return label


@dataclass(frozen=True)
class Said(Generic[V]):
    """A verdict, why, and what it took."""

    value: V
    why: str
    cost: dict[str, float]


@dataclass(frozen=True)
class Asked:
    """The messages of a model grader and the endpoint that gets them."""

    messages: tuple[tuple[str, Template], ...]
    endpoint: Endpoint

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str, models: Mapping[str, Endpoint]) -> Asked:
        model = given["model"]
        if not isinstance(model, str) or model not in models:
            known = f"{nearest(str(model), sorted(models))}; the settings offer: {', '.join(sorted(models)) or 'none'}"
            raise ValueError(f"{path(where, 'model')}={model!r:.80}{known}")
        body = {"temperature": 0.0, "max_tokens": 1024, **models[model].body}
        body |= _sampling(given.get("sampling_params"), path(where, "sampling_params"))
        messages = _messages(given["input"], path(where, "input"))
        if not any(place.of_answer for _, template in messages for place in template.places):
            raise ValueError(f"{path(where, 'input')} shows nothing of the sample; write {{{{ sample.output_text }}}}")
        return cls(messages, replace(models[model], body=body))

    async def verdict(
        self, values: Values, desk: Desk, key: str, form: str, read: Any, worst: float
    ) -> Said[Any] | Score:
        """What the model says, read; or the score where it says nothing of use."""
        places = dict.fromkeys(place for _, template in self.messages for place in template.places)
        try:
            texts = {str(place): as_text(place.find(values)) for place in places}
        except Missing as missing:
            return blamed(of_answer(missing, values), "missing_field", str(missing), worst)
        answers = {str(place): texts[str(place)] for place in places if place.of_answer}
        if not any(answer.strip() for answer in answers.values()):
            return Score(worst, Outcome.FAILED, "no_answer")
        task = {name: clean(text) for name, text in texts.items() if name not in answers}
        inquiry: Inquiry[tuple[Any, str]] = Inquiry(
            frozenset({key}),
            lambda document, word: self._request(values, document, _FORM % (word, form)),
            lambda given: (read(given[key]), str(given["reason"])[:1000]),
            ROOM,
        )
        cost, line = Cost(), await desk.line(self.endpoint)
        said = await inquiry.vote(line, task, answers, cost)
        if isinstance(said, NoReply):
            said = await inquiry.settle(line, task, answers, cost, [said])
        if isinstance(said, Unjudgeable):
            return Score(worst, Outcome.FAILED, said.reason, {**vars(cost)}, str(said))
        if isinstance(said, NoReply):
            return Score(None, Outcome.ERROR, code(said), {**vars(cost)}, str(said))
        return Said(*said, {**vars(cost)})

    def _request(self, values: Values, document: str, form: str) -> list[dict[str, str]]:
        """One system message, then the others; neighbours of one role are one message: many chat templates ask that."""
        said = [(role, template.fill(values, _label)) for role, template in self.messages]
        system = [text for role, text in said if role in ("system", "developer")]
        request = [{"role": "system", "content": "\n\n".join([*system, form.strip()])}]
        rest = [(role, text) for role, text in said if role not in ("system", "developer")]
        for role, text in [*rest, ("user", f"The document:\n{document}")]:
            if request[-1]["role"] == role:
                request[-1]["content"] += f"\n\n{text}"
            else:
                request.append({"role": role, "content": text})
        return request


def _label(place: Place) -> str:
    return f"[[{place}]]"


def _messages(given: Any, where: str) -> tuple[tuple[str, Template], ...]:
    if not is_list(given) or len(given) > MAX_MESSAGES:
        raise ValueError(f"{where}={given!r:.80}, expected a list of messages, at most {MAX_MESSAGES}")
    found: list[tuple[str, Template]] = []
    for index, message in enumerate(given):
        here = f"{where}[{index}]"
        taken(message, here, ("role", "content"), ("type",))
        if message.get("type", "message") != "message":
            raise ValueError(f"{here}.type={message['type']!r:.80}, expected 'message'")
        role = choice(message["role"], f"{here}.role", ROLES)
        content = message["content"]
        for part in content if isinstance(content, list) else [content]:
            found.append((role, Template.of(_text(part, f"{here}.content"), f"{here}.content")))
    return tuple(found)


def _text(part: Any, where: str) -> Any:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") not in _TEXTS:
        raise ValueError(
            f"{where}.type={part.get('type')!r:.80}, expected one of {', '.join(_TEXTS)}; no images or audio"
        )
    return taken(part, where, ("text",), ())["text"]


def _sampling(given: Any, where: str) -> dict[str, Any]:
    if given is None:
        return {}
    taken(given, where, (), ("temperature", "top_p", "seed", "max_completions_tokens", "reasoning_effort"))
    body: dict[str, Any] = {}
    for name, low, high in (("temperature", 0, 2), ("top_p", 0, 1), ("seed", -(2**53), 2**53)):
        if given.get(name) is not None:
            number(given[name], f"{where}.{name}", low, high)
            body[name] = given[name]
    if given.get("max_completions_tokens") is not None:
        body["max_tokens"] = int(number(given["max_completions_tokens"], f"{where}.max_completions_tokens", 16, 1e6))
    if given.get("reasoning_effort") is not None:
        known = ("none", "minimal", "low", "medium", "high", "xhigh")
        body["reasoning_effort"] = choice(given["reasoning_effort"], f"{where}.reasoning_effort", known)
    return body
