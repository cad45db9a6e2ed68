"""The request bodies as pydantic models with examples: what /openapi.json shows and what is refused.

Every text, list and number has a limit, and an unknown field is an error that names it. The responses are in
`rlvr.service.http.responses`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from rlvr.core.registry import did_you_mean
from rlvr.service.service_options import SessionRequest

# A part between slashes is not empty, "." or "..": clients and proxies resolve these in a path, and another task's
# answers would be read.
TASK_ID = r"^[A-Za-z0-9_][A-Za-z0-9._:@+\-]*(?:/(?:\.?[A-Za-z0-9_:@+\-][A-Za-z0-9._:@+\-]*|\.\.[A-Za-z0-9._:@+\-]+))*$"
NAME = r"^[A-Za-z0-9._\-]+$"
FUNCTION = r"^(?:[A-Za-z_][A-Za-z0-9_]*)?$"
IDENTIFIER = r"^[A-Za-z_][A-Za-z0-9_]*$"
PATTERNS = {
    TASK_ID: "letters, digits and . _ : / @ + - without blanks, the first one a letter, a digit or _, and no part "
    "between slashes that is empty, . or ..",
    NAME: "letters, digits and . _ -",
    FUNCTION: "the name of a function: letters, digits and _",
    IDENTIFIER: "a name of Python: letters, digits and _, the first one no digit",
}
DEEPEST = 32  # levels of nesting
LARGEST = 1 << 20  # characters of any text
MOST = 50_000  # values of a body: checking them blocks the event loop
FIELDS = 100  # at the top of a body


def to_integer(value: Any) -> Any:
    """A whole float as an integer (8 for 8.0), which JSON Schema accepts as one; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(to_integer)
TaskId = Annotated[str, StringConstraints(pattern=TASK_ID, min_length=1, max_length=128)]
Name = Annotated[str, StringConstraints(pattern=NAME, min_length=1, max_length=128)]
FunctionName = Annotated[str, StringConstraints(pattern=FUNCTION, max_length=200)]
AnswerNames = Annotated[
    list[Annotated[str, StringConstraints(pattern=IDENTIFIER, max_length=200)]], Field(max_length=200)
]
Text = Annotated[str, StringConstraints(max_length=LARGEST)]
NonBlank = Annotated[
    str, StringConstraints(min_length=1, max_length=LARGEST), AfterValidator(lambda text: require_words(text))
]
Id = Annotated[int, Field(ge=1, le=2**53), WHOLE]

FIBONACCI = {
    "task_id": "code_fibonacci",
    "prompt": "Write a function to calculate the nth Fibonacci number",
    "context": "Python programming, should be efficient and handle edge cases",
    "max_iterations": 8,
    "min_confidence": 0.85,
}


class ServiceBody(BaseModel):
    """The rules of every body: no unknown field, and only values that a database and a model can take."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > FIELDS:
            raise ValueError(f"{len(value):,} fields; expected at most {FIELDS}")
        _check_value(value, "", 0, count())
        return value


class Verifier(ServiceBody):
    """A verifier by its registered name; its weight is relative to the others'. With weight 0 it only watches,
    but one that knows the right answer limits the confidence at any weight."""

    name: Name
    weight: float = Field(default=1.0, ge=0, le=1_000)
    options: Annotated[
        dict[str, Any], AfterValidator(lambda given: {name: to_integer(v) for name, v in given.items()})
    ] = Field(default_factory=dict, max_length=32)


NamedVerifier = Annotated[
    Verifier,  # a bare name is a verifier of weight 1
    BeforeValidator(lambda v: {"name": v} if isinstance(v, str) else v, json_schema_input_type=Name | Verifier),
]
Verifiers = Annotated[list[NamedVerifier], Field(max_length=16)]


def _check_test(test: str | dict[str, str]) -> str | dict[str, str]:
    if isinstance(test, dict) and set(test) != {"input", "output"}:
        raise ValueError("expected an object with input and output, and nothing else")
    if isinstance(test, str) and "assert" not in test:
        raise ValueError(
            f"{test[:60]!r} asserts nothing, so every answer would pass it; expected an assert such as "
            "'assert double(2) == 4', or {input, output}"
        )
    return test


Tests = Annotated[list[Annotated[Text | dict[str, Text], AfterValidator(_check_test)]], Field(max_length=200)]


class TaskBody(ServiceBody):
    """A task and its reference: `tests` for code, `answer` for mathematics; or a `grader` and the `item` that its
    templates read. `answer_names` are the names that answers define: beside them, any other undefined name in a test is
    refused."""

    task_id: TaskId
    prompt: NonBlank
    context: Text = ""
    answer: NonBlank | None = None
    tests: Tests = Field(default_factory=list)
    setup: Text = ""
    entry_point: FunctionName = ""
    answer_names: AnswerNames = Field(default_factory=list)
    verifiers: Verifiers = Field(default_factory=list)
    grader: dict[str, Any] | None = None
    item: dict[str, Any] = Field(default_factory=dict, max_length=200)

    @model_validator(mode="after")
    def _check_form(self) -> TaskBody:
        if self.grader is not None:
            _refuse_beside_grader(self, "item")
        elif self.item:
            raise ValueError("item needs a grader; give one, or leave item out")
        else:
            _require_tests(self)
        return self


class TrainBody(TaskBody):
    """The body of /train and /evaluate. The service's settings are the defaults. `samples` is the number of episodes
    that run at once: 4 by default with an engine, which compares their answers, and one with an endpoint."""

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

    max_iterations: Annotated[int, Field(ge=1), WHOLE] | None = None
    min_confidence: float | None = Field(default=None, ge=0, le=1)
    samples: Annotated[int, Field(ge=1), WHOLE] | None = None
    seed: Annotated[int, Field(ge=0, le=2**53), WHOLE] | None = None

    def request(self, learn: bool = True) -> SessionRequest:
        return _build_request(self, learn=learn)


class FeedbackBody(ServiceBody):
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
    iteration: Annotated[int, Field(ge=1, le=1_000_000), WHOLE] | None = None
    sample: Annotated[int, Field(ge=0, le=1_000_000), WHOLE] = 0
    rating: float = Field(ge=0, le=1)
    comment: Annotated[str, StringConstraints(max_length=4_000)] = ""

    @model_validator(mode="after")
    def _check_reference(self) -> FeedbackBody:
        by_session = self.session_id is not None and self.iteration is not None
        if (self.experience_id is not None) == (self.session_id is not None or self.iteration is not None):
            raise ValueError("give either experience_id, or session_id and iteration")
        if self.experience_id is None and not by_session:
            raise ValueError("give session_id and iteration together")
        return self


class GradeItem(ServiceBody):
    """One row for a grader: the task (`item`) and a model's output (`sample`)."""

    item: dict[str, Any] = Field(default_factory=dict, max_length=200)
    sample: dict[str, Any] = Field(max_length=50)


class GradeBody(ServiceBody):
    """Answers to score: a `grader` in the OpenAI graders' schema with `items`, or `answers` with `verifiers`. The
    default verifiers follow from `tests` and `answer`. `answer_names`: as in /train."""

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
    answer: NonBlank | None = None
    tests: Tests = Field(default_factory=list)
    setup: Text = ""
    entry_point: FunctionName = ""
    answer_names: AnswerNames = Field(default_factory=list)
    verifiers: Verifiers = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_form(self) -> GradeBody:
        if self.grader is not None:
            if not self.items:
                raise ValueError("a grader needs items: a list of {item, sample}")
            _refuse_beside_grader(self, "items")
        elif not self.answers:
            raise ValueError("give answers to score, or a grader with items")
        elif self.items:
            raise ValueError("items need a grader; give answers without one")
        else:
            _require_tests(self)
        return self

    def request(self) -> SessionRequest:
        return _build_request(self, exclude={"grader", "items", "answers"}, task_id="grade", learn=False)


def _require_tests(body: TaskBody | GradeBody) -> None:
    for field in ("setup", "entry_point", "answer_names"):
        if getattr(body, field) and not body.tests:
            raise ValueError(f"{field} has no effect without tests; give tests, or leave it out")


def _refuse_beside_grader(body: ServiceBody, instead: str) -> None:
    for field in ("prompt", "answers", "answer", "tests", "setup", "entry_point", "answer_names", "verifiers"):
        if getattr(body, field, None) and not (field == "prompt" and instead == "item"):
            raise ValueError(f"{field} has no effect with a grader; give {instead}")


def _build_request(body: ServiceBody, exclude: set[str] | None = None, **more: Any) -> SessionRequest:
    fields: dict[str, Any] = body.model_dump(exclude=exclude) | more
    verifiers = tuple((given["name"], given["weight"], given["options"]) for given in fields.pop("verifiers"))
    fields |= {name: tuple(fields[name]) for name in ("tests", "answer_names")}
    fields["verifiers"] = verifiers
    return SessionRequest(**fields)


def require_words(text: str) -> str:
    if not text.strip():
        raise ValueError("only white space; expected words")
    return text


# What each of pydantic's types of error expects.
_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_ENTRIES = {  # of the lists, which pydantic describes by each form on its own
    "tests": "an assert statement as text, or an object with input and output",
    "verifiers": "a verifier's name, or an object with name, weight and options",
    "answers": "text",
    "answer_names": "a name that answers define",
    "items": "an object with item and sample",
}


def find_field(error: Any) -> str:
    """The dotted path of an error's field: `verifiers.0.weight` for pydantic's ('body', 'verifiers', 0, 'weight')."""
    if error["type"] == "json_invalid":
        return ""
    # The path of a union has the name of its member too, which has other characters than a field.
    return ".".join(str(part) for part in error["loc"][1:] if str(part).replace("_", "").isalnum())[:300]


def describe_error(error: Any, body: type[BaseModel] | None, content_type: str) -> str:
    """Describe one of pydantic's errors and its remedy. Text of a body is not repeated: it may be a secret."""
    kind, place = error["type"], error["loc"][1:]
    if kind == "extra_forbidden" and body is not None and place:
        inner = {"verifiers": Verifier, "items": GradeItem}.get(str(place[0]), body) if len(place) > 1 else body
        return f"unknown field of this request{did_you_mean(str(place[-1])[:100], inner.model_fields)}"
    if kind == "string_pattern_mismatch" and error["ctx"]["pattern"] in PATTERNS:
        return f"expected {PATTERNS[error['ctx']['pattern']]}"
    if kind == "json_invalid":
        return f"invalid JSON at character {place[0] if place else 0}: {error['ctx']['error']}"
    if not place and kind in ("missing", "model_attributes_type"):
        given = f", not {content_type[:100]}" if content_type else ""
        header = "" if content_type.startswith("application/json") else " with Content-Type: application/json" + given
        return f"expected a JSON object{header}"
    message = error["msg"].removeprefix("Value error, ")
    expected = _EXPECTED.get(kind) or message.removeprefix("Input should be ")
    if expected == message or not place:
        return message
    field = find_field(error).split(".")
    if field[0] in _ENTRIES and kind in _EXPECTED and len(field) < 3:
        entry = _ENTRIES[field[0]]
        expected = entry if len(field) == 2 else f"a list, each entry {entry}"
    return f"{_describe_given(error['input'], error['loc'][0] == 'query')} given, expected {expected}"


def _describe_given(value: Any, is_query: bool) -> str:
    """A value in words; a text only if it comes from the address."""
    if isinstance(value, str):
        return repr(value[:80]) if is_query else "text"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value)


def _check_value(value: Any, path: str, depth: int, counter: Iterator[int]) -> None:
    """ValueError for a value that cannot be stored or forwarded: null characters, lone surrogates, infinities."""
    where = path or "the body"
    if next(counter) >= MOST:
        raise ValueError(f"the body has more than {MOST:,} values")
    if depth > DEEPEST:
        raise ValueError(f"{where} is nested deeper than {DEEPEST} levels")
    if isinstance(value, str):
        if "\x00" in value:
            raise ValueError(f"{where} holds a null character")
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{where} holds a lone surrogate, which UTF-8 cannot encode; remove it")
        if len(value) > LARGEST:
            raise ValueError(f"{where} is longer than {LARGEST:,} characters")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} is {value}, expected a finite number")
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**63:
        raise ValueError(f"{where} is a number beyond 64 bits")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_value(key, f"a key of {where}", depth + 1, counter)
            _check_value(inner, f"{path}.{str(key)[:50]}".lstrip("."), depth + 1, counter)
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            _check_value(inner, f"{path}[{place}]", depth + 1, counter)
