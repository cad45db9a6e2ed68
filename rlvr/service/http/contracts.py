"""The bodies that the service takes, as pydantic models with examples: what /openapi.json shows, and what is refused.

Every text, list and number has a limit, and a field that nobody knows is an error that names it. What the service
answers is in `rlvr.service.http.replies`. Exercised by tests/test_service_mistakes.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from rlvr.registry import nearest
from rlvr.service.options import Request

TASK_ID = r"^[A-Za-z0-9_][A-Za-z0-9._:/@+\-]*$"
NAME = r"^[A-Za-z0-9._\-]+$"
PATTERNS = {
    TASK_ID: "letters, digits and . _ : / @ + - without blanks, the first one a letter, a digit or _",
    NAME: "letters, digits and . _ -",
}
DEEPEST = 32  # lists in lists of a body
LARGEST = 1 << 20  # characters of one text, whatever it is for
MOST = 50_000  # values of a body: to look at each takes time in which nobody else is answered
FIELDS = 100  # of a body itself

TaskId = Annotated[str, StringConstraints(pattern=TASK_ID, min_length=1, max_length=128)]
Name = Annotated[str, StringConstraints(pattern=NAME, min_length=1, max_length=128)]
Text = Annotated[str, StringConstraints(max_length=LARGEST)]
Worded = Annotated[str, StringConstraints(min_length=1, max_length=LARGEST), AfterValidator(lambda text: worded(text))]
Id = Annotated[int, Field(ge=1, le=2**53)]

FIBONACCI = {
    "task_id": "code_fibonacci",
    "prompt": "Write a function to calculate the nth Fibonacci number",
    "context": "Python programming, should be efficient and handle edge cases",
    "max_iterations": 8,
    "min_confidence": 0.85,
}


class Body(BaseModel):
    """What every body holds to: no unknown field, and nothing that a database or a model cannot be given."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > FIELDS:
            raise ValueError(f"{len(value):,} fields; expected at most {FIELDS}")
        _check(value, "", 0, count())
        return value


class Verifier(Body):
    """A verifier by its registered name; its weight is relative to the others'. A weight of 0 only watches."""

    name: Name
    weight: float = Field(default=1.0, ge=0, le=1_000)
    options: dict[str, Any] = Field(default_factory=dict, max_length=32)


Named = Annotated[
    Verifier,  # a name alone is a verifier with a weight of 1
    BeforeValidator(lambda one: {"name": one} if isinstance(one, str) else one, json_schema_input_type=Name | Verifier),
]
Verifiers = Annotated[list[Named], Field(max_length=16)]


def _asserts(one: str | dict[str, str]) -> str | dict[str, str]:
    if isinstance(one, str) and "assert" not in one:
        raise ValueError(
            f"{one[:60]!r} asserts nothing, so it would pass whatever the answer computes; expected an assert such as "
            "'assert double(2) == 4', or {input, output}"
        )
    return one


Tests = Annotated[
    list[Annotated[Text | dict[str, Text], AfterValidator(_asserts)]],
    Field(max_length=200),
]


class Checked(Body):
    """A task and what is known of its right answer: `tests` make code of it, `answer` mathematics."""

    task_id: TaskId
    prompt: Worded
    context: Text = ""
    answer: Worded | None = None
    tests: Tests = Field(default_factory=list)
    setup: Text = ""
    entry_point: Annotated[str, StringConstraints(max_length=200)] = ""
    verifiers: Verifiers = Field(default_factory=list)


class TrainBody(Checked):
    """The body of /train and /evaluate. What is not given is the service's setting. `samples` are episodes that run at
    once: by default 4 of an engine, whose answers are compared with each other, and one of an endpoint."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                FIBONACCI,
                {
                    "task_id": "code_double",
                    "prompt": "Write a Python function double(x) that returns twice x.",
                    "tests": ["assert double(2) == 4", "assert double(-1) == -2"],
                },
                {"task_id": "math_problem", "prompt": "What is 12 * 12?", "answer": "144"},
            ]
        }
    )

    max_iterations: int | None = Field(default=None, ge=1, le=1_000)
    min_confidence: float | None = Field(default=None, ge=0, le=1)
    samples: int | None = Field(default=None, ge=1, le=1_000)
    seed: int | None = Field(default=None, ge=0, le=2**53)

    def request(self, learn: bool = True) -> Request:
        return Request(
            task_id=self.task_id,
            prompt=self.prompt,
            context=self.context,
            max_iterations=self.max_iterations,
            min_confidence=self.min_confidence,
            answer=self.answer,
            tests=tuple(self.tests),
            setup=self.setup,
            entry_point=self.entry_point,
            verifiers=tuple((one.name, one.weight, one.options) for one in self.verifiers),
            samples=self.samples,
            seed=self.seed,
            learn=learn,
        )


class FeedbackBody(Body):
    """A person's rating of one answer, by the experience's id, or by its session and iteration."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"experience_id": 1, "rating": 0.9, "comment": "Correct, and easy to read."},
                {"session_id": "5f0c3a52", "iteration": 2, "rating": 0.0},
            ]
        }
    )

    experience_id: Id | None = None
    session_id: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = None
    iteration: int | None = Field(default=None, ge=1, le=1_000_000)
    sample: int = Field(default=0, ge=0, le=1_000_000)
    rating: float = Field(ge=0, le=1)
    comment: Annotated[str, StringConstraints(max_length=4_000)] = ""

    @model_validator(mode="after")
    def _one_way(self) -> FeedbackBody:
        by_session = self.session_id is not None and self.iteration is not None
        if (self.experience_id is not None) == (self.session_id is not None or self.iteration is not None):
            raise ValueError("give experience_id, or session_id with iteration: one of the two")
        if self.experience_id is None and not by_session:
            raise ValueError("session_id and iteration belong together")
        return self


class GradeItem(Body):
    """One row for a grader: what is known of the task (`item`), and what a model made of it (`sample`)."""

    item: dict[str, Any] = Field(default_factory=dict, max_length=200)
    sample: dict[str, Any] = Field(max_length=50)


class GradeBody(Body):
    """Answers to score: with a `grader` in the OpenAI graders' schema and `items`, or with `verifiers` and `answers`.

    Without `verifiers`, those that `tests` or `answer` suggest.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "What is 12 * 12?", "answer": "144", "answers": ["\\boxed{144}", "\\boxed{146}"]},
                {
                    "grader": {
                        "type": "string_check",
                        "name": "exact",
                        "operation": "eq",
                        "input": "{{ sample.output_text }}",
                        "reference": "{{ item.reference_answer }}",
                    },
                    "items": [{"item": {"reference_answer": "fuzzy"}, "sample": {"output_text": "fuzzy"}}],
                },
            ]
        }
    )

    grader: dict[str, Any] | None = None
    items: list[GradeItem] = Field(default_factory=list, max_length=256)
    prompt: Text = ""
    answers: list[Text] = Field(default_factory=list, max_length=256)
    answer: Worded | None = None
    tests: Tests = Field(default_factory=list)
    setup: Text = ""
    entry_point: Annotated[str, StringConstraints(max_length=200)] = ""
    verifiers: Verifiers = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_way(self) -> GradeBody:
        if self.grader is not None:
            if not self.items:
                raise ValueError("a grader needs items: a list of {item, sample}")
            if self.answers or self.verifiers or self.tests or self.answer is not None:
                raise ValueError("answers, answer, tests and verifiers have no effect beside a grader; give items")
        elif not self.answers:
            raise ValueError("give answers to score, or a grader with items")
        elif self.items:
            raise ValueError("items are for a grader; without one give answers")
        return self

    def request(self) -> Request:
        return Request(
            task_id="grade",
            prompt=self.prompt,
            answer=self.answer,
            tests=tuple(self.tests),
            setup=self.setup,
            entry_point=self.entry_point,
            verifiers=tuple((one.name, one.weight, one.options) for one in self.verifiers),
            learn=False,
        )


def worded(text: str) -> str:
    if not text.strip():
        raise ValueError("only white space; expected words")
    return text


def told(error: Any, body: type[BaseModel] | None, content_type: str) -> str:
    """One of pydantic's errors, with what to do about it; never the value: it may be a secret in the wrong place."""
    kind, place = error["type"], error["loc"][1:]
    if kind == "extra_forbidden" and body is not None and place:
        inner = {"verifiers": Verifier, "items": GradeItem}.get(str(place[0]), body) if len(place) > 1 else body
        return f"no field of this request{nearest(str(place[-1])[:100], inner.model_fields)}"
    if kind == "string_pattern_mismatch" and error["ctx"]["pattern"] in PATTERNS:
        return f"expected {PATTERNS[error['ctx']['pattern']]}"
    if kind == "json_invalid":
        return f"no JSON, at character {place[0] if place else 0}: {error['ctx']['error']}"
    if not place and kind in ("missing", "model_attributes_type"):
        sent = f"; this one came as {content_type[:100]}" if content_type else ""
        header = "" if content_type.startswith("application/json") else " with Content-Type: application/json" + sent
        return f"expected a JSON object{header}"
    return error["msg"].removeprefix("Value error, ")


def _check(value: Any, where: str, depth: int, seen: Iterator[int]) -> None:
    """Raises for what cannot be stored or sent on: null characters, halves of surrogate pairs, infinities."""
    if next(seen) >= MOST:
        raise ValueError(f"the body has more than {MOST:,} values")
    if depth > DEEPEST:
        raise ValueError(f"{where or 'the body'} is nested deeper than {DEEPEST} levels")
    if isinstance(value, str):
        if "\x00" in value:
            raise ValueError(f"{where or 'the body'} holds a null character")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{where or 'the body'} holds half of a surrogate pair, which is no character")
        if len(value) > LARGEST:
            raise ValueError(f"{where or 'the body'} is longer than {LARGEST:,} characters")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where or 'the body'} is {value}, expected a finite number")
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**63:
        raise ValueError(f"{where or 'the body'} is a number beyond 64 bits")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check(key, f"a key of {where or 'the body'}", depth + 1, seen)
            _check(inner, f"{where}.{str(key)[:50]}".lstrip("."), depth + 1, seen)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            _check(inner, f"{where}[{place}]", depth + 1, seen)
