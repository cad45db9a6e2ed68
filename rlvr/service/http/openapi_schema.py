"""/openapi.json as the running service keeps it: its limits, its verifiers and models, and which fields go together.

    app.openapi = lambda: build_openapi(app, service)

pydantic's schemas know neither the settings nor rules over several fields. Here each body becomes the list of its
forms: a task with or without tests and with or without an answer, since verifiers compare with these, or with a grader;
a rating by an experience or by a session's iteration.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from rlvr.reward.graders.formula import FUNCTIONS
from rlvr.reward.graders.grader import MAX_GRADERS
from rlvr.reward.graders.grader_templates import MAX_TEMPLATE
from rlvr.reward.graders.model_graders import MAX_LABELS
from rlvr.reward.graders.python_grader import MAX_SOURCE
from rlvr.reward.graders.similarity import METRICS, count_needed_words
from rlvr.reward.graders.text_graders import OPERATIONS
from rlvr.reward.registry import reward_spec
from rlvr.service.http.requests import LARGEST
from rlvr.service.http.service_middleware import OPEN_PATHS
from rlvr.service.sessions.verification import MODULAR, grader_models, known_verifiers
from rlvr.service.sessions.verifier_options import (
    NO_NUL,
    NULL,
    OPTION_SCHEMAS,
    TEXT,
    WORDS_NO_NUL,
    Schema,
    closed_object,
    or_null,
)
from rlvr.web.openapi_route import declare_keys

if TYPE_CHECKING:
    from rlvr.service.http.runtime import Service

SHARE: Schema = or_null({"type": "number", "minimum": 0, "maximum": 1})
WEIGHT: Schema = {"type": "number", "minimum": 0, "maximum": 1_000}
_PLACE = r"""(?:item|sample)(?:\.[A-Za-z_][A-Za-z0-9_]*|\[[0-9]{1,9}\])+"""
TEMPLATE: Schema = {  # text, and placeholders such as {{ item.answer }}
    "type": "string",
    "format": "grader-template",
    "maxLength": MAX_TEMPLATE,
    "pattern": r"^(?:[^{\x00]|\{[^{\x00]|\{\{ ?" + _PLACE + r" ?\}\})*$",
}
_CALL = r"[^\x00]*[A-Za-z_][A-Za-z0-9_]*\([^\x00]*\)[^\x00]*"
PYTHON_ASSERT = rf"^(?:[^\x00]*[\s;:])?(?:assert {_CALL}|assert\({_CALL}\)[^\x00]*)$"
JSON_VALUE = {"$ref": "#/components/schemas/JsonValue"}
JSON_SCHEMA: Schema = {
    "title": "JsonValue",
    "anyOf": [
        NULL,
        {"type": "boolean"},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63},
        {"type": "number"},
        TEXT,
        {"type": "array", "items": JSON_VALUE},
        {"type": "object", "propertyNames": {"pattern": NO_NUL}, "additionalProperties": JSON_VALUE},
    ],
}


def build_openapi(app: FastAPI, service: Service) -> Schema:
    """The document of this service; the same at every call."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = document["components"]["schemas"]
        names = known_verifiers(service.sessions.judge)
        for name in names:
            schemas[f"Verifier_{name}"] = _verifier(name)
        schemas |= {"JsonValue": JSON_SCHEMA, "Grader": _grader(list(grader_models(service.sessions.judge)))}
        for body in ("TrainBody", "GradeBody", "FeedbackBody"):
            schemas[body] = _forms(schemas[body], body, names, service)
        for unused in ("Verifier", "GradeItem"):
            schemas.pop(unused, None)
        if service.keys:
            declare_keys(document, OPEN_PATHS.__contains__)
        app.openapi_schema = document
    return app.openapi_schema


def _forms(base: Schema, body: str, names: Sequence[str], service: Service) -> Schema:
    """The body's schema as `anyOf` its forms."""
    kept = {key: base[key] for key in ("title", "description", "examples") if key in base}
    fields: dict[str, Schema] = {name: _clean(schema) for name, schema in base["properties"].items()}
    if body == "FeedbackBody":
        by_id = {**fields, "experience_id": _present(fields["experience_id"]), "session_id": NULL, "iteration": NULL}
        by_place = {**fields, "experience_id": NULL}
        by_place |= {name: _present(fields[name]) for name in ("session_id", "iteration")}
        forms = [_form(by_id, "experience_id rating"), _form(by_place, "session_id iteration rating")]
        return {**kept, "anyOf": forms}
    limits, is_train = service.settings.limits, body == "TrainBody"
    fields["answer"] = {"type": "string", "format": "reference", "pattern": WORDS_NO_NUL}
    if is_train:
        fields["prompt"] = {"type": "string", "pattern": WORDS_NO_NUL, "maxLength": limits.max_prompt_chars}
        fields["context"] = {**TEXT, "maxLength": limits.max_prompt_chars}
        for name, most in (("max_iterations", limits.most_iterations), ("samples", limits.max_samples)):
            fields[name] = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": most}, NULL]}
    needed, item = ("task_id prompt", "item") if is_train else ("answers", "items")
    if not is_train:
        fields["answers"] = {**fields["answers"], "minItems": 1}
    plain = {name: schema for name, schema in fields.items() if name != item} | {"grader": NULL}
    forms: list[Schema] = []
    for tests in (None, *_tests()):
        for has_answer in (False, True):
            form = {**plain, "tests": tests or {"type": "array", "maxItems": 0}}
            if tests is None or tests["items"]["type"] == "object":  # only asserts have these
                form |= {
                    "setup": {"const": ""},
                    "entry_point": {"const": ""},
                    "answer_names": {"type": "array", "maxItems": 0},
                }
            else:
                form["setup"] = {**TEXT, "format": "python-setup", "maxLength": LARGEST}
            form |= {} if has_answer else {"answer": NULL}
            form["verifiers"] = _verifiers(names, tests is not None, has_answer)
            forms.append(_form(form, f"{needed}{' tests' * (tests is not None)}{' answer' * has_answer}"))
    left_out = {"answers", "answer", "tests", "setup", "entry_point", "answer_names", "verifiers"} | (
        set() if is_train else {"prompt"}
    )
    graded = {name: schema for name, schema in fields.items() if name not in left_out}
    graded["grader"] = {"$ref": "#/components/schemas/Grader"}
    if is_train:
        graded["item"] = {**_json_object(), "maxProperties": 200}
    else:
        row = closed_object("sample", item={**_json_object(), "maxProperties": 200}, sample=_json_object(50))
        graded["items"] = {"type": "array", "items": row, "minItems": 1, "maxItems": 256}
    return {**kept, "anyOf": [*forms, _form(graded, "task_id prompt grader" if is_train else "grader items")]}


def _form(fields: dict[str, Schema], required: str) -> Schema:
    return closed_object(required, **fields)


def _present(schema: Schema) -> Schema:
    """The schema of a field that may be null, where it has to be given."""
    return next(one for one in schema.get("anyOf", [schema]) if one != NULL)


def _clean(schema: Schema) -> Schema:
    """The schema of a field without its title; its texts hold no null characters."""
    schema = {key: copy.deepcopy(value) for key, value in schema.items() if key != "title"}
    for one in (schema, *schema.get("anyOf", ()), schema.get("items", {})):
        if one.get("type") == "string":
            one.setdefault("pattern", NO_NUL)
    return schema


def _tests() -> tuple[Schema, Schema]:
    """Assert statements, or pairs of input and output; a request has one or the other."""
    assertion = {"type": "string", "format": "python-assert", "pattern": PYTHON_ASSERT}
    pair = closed_object("input output", input=TEXT, output=TEXT)
    bounds = {"type": "array", "minItems": 1, "maxItems": 200}
    return {**bounds, "items": assertion}, {**bounds, "items": pair}


def _can_judge(name: str, has_tests: bool, has_answer: bool) -> bool:
    """Whether a verifier has what it compares with. Those of the arithmetic environment depend on the prompt, and some
    read fields of an environment's task, so they are in no form; the service takes them where they fit."""
    if name == "code":
        return has_tests
    needed = "" if name == "judge" else reward_spec(name).gold
    return name not in MODULAR and (not needed or (needed == "answer" and has_answer))


def _verifiers(known: Collection[str], has_tests: bool, has_answer: bool) -> Schema:
    """None, or a list with a weight above 0 in which the tests and the answer are read."""
    names = [name for name in known if _can_judge(name, has_tests, has_answer)]
    bare = {"enum": [name for name in names if not any("required" in form for form in OPTION_SCHEMAS.get(name, ()))]}
    objects = [{"$ref": f"#/components/schemas/Verifier_{name}"} for name in names]
    counts = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"weight": {"exclusiveMinimum": 0}}}]}
    filled: Schema = {"type": "array", "items": {"anyOf": [bare, *objects]}, "maxItems": 16, "contains": counts}
    readers = [["code"]] * has_tests + [[name for name in names if reward_spec(name).gold == "answer"]] * has_answer
    if readers:
        filled["allOf"] = [
            {"contains": {"anyOf": [{"enum": some}, {"type": "object", "properties": {"name": {"enum": some}}}]}}
            for some in readers
        ]
    return {"anyOf": [{"type": "array", "maxItems": 0}, filled]}


def _verifier(name: str) -> Schema:
    forms = OPTION_SCHEMAS.get(name, (closed_object(),))
    options = forms[0] if len(forms) == 1 else {"anyOf": list(forms)}
    required = "name options" if any("required" in form for form in forms) else "name"
    return {
        "title": f"Verifier {name}",
        **closed_object(required, name={"const": name}, weight=WEIGHT, options=options),
    }


def _json_object(most: int | None = None) -> Schema:
    schema: Schema = {"type": "object", "propertyNames": {"pattern": NO_NUL}, "additionalProperties": JSON_VALUE}
    return schema if most is None else {**schema, "maxProperties": most}


def _grader(models: Sequence[str]) -> Schema:
    """A configuration in the OpenAI graders' schema; model graders only if the settings name a judge behind a URL."""
    texts = {"input": TEMPLATE, "reference": TEMPLATE}
    source = {"type": "string", "format": "python-grader", "maxLength": MAX_SOURCE // 4}
    source["pattern"] = r"^[^\x00]*\bgrade\b[^\x00]*$"
    simple = [
        _grader_of("string_check", "input reference operation", **texts, operation={"enum": list(OPERATIONS)}),
        *(
            _grader_of("text_similarity", "input reference evaluation_metric", input=TEMPLATE, pass_threshold=SHARE,
                       reference=_reference(needed), evaluation_metric={"enum": metrics})
            for needed, metrics in _metrics_by_words()
        ),
        _grader_of("python", "source", source=source, pass_threshold=SHARE, image_tag=or_null(TEXT)),
    ]  # fmt: skip
    if models:
        asked: dict[str, Schema] = {
            "model": {"enum": list(models)},
            "input": {"type": "array", "minItems": 1, "items": {"type": "object"}},
            "sampling_params": {"type": "object"},
        }
        labels = {"type": "array", "items": {**TEXT, "minLength": 1}, "minItems": 1, "maxItems": MAX_LABELS}
        span = {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}
        simple += [
            _grader_of("score_model", "input model", **asked, range=span, pass_threshold=or_null({"type": "number"})),
            _grader_of(
                "label_model", "input model labels passing_labels", **asked, labels=labels, passing_labels=labels
            ),
        ]
    name = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "not": {"enum": list(FUNCTIONS)}}
    graders = {"type": "object", "propertyNames": name, "additionalProperties": {"anyOf": simple}, "minProperties": 1,
               "maxProperties": MAX_GRADERS}  # fmt: skip
    formula = {"type": "string", "format": "grader-formula", "maxLength": 4_000}
    multi = _grader_of(
        "multi", "graders calculate_output", graders=graders, calculate_output=formula, pass_threshold=SHARE
    )
    return {"title": "Grader", "anyOf": [*simple, multi]}


def _metrics_by_words() -> list[tuple[int, list[str]]]:
    """How many words a reference needs, and the metrics that need so many."""
    needs = sorted({count_needed_words(metric) for metric in METRICS})
    return [(needed, [metric for metric in METRICS if count_needed_words(metric) == needed]) for needed in needs]


def _reference(words: int) -> Schema:
    """A template with a place, or a text that is not blank and has at least so many words, as ROUGE counts them."""
    text = r"[^\x00]*".join([r"(?<![^\W_])[^\W_]"] * words) or r"\S"
    return {**TEMPLATE, "pattern": rf"^(?=[^\x00]*(?:\{{\{{|{text}))" + TEMPLATE["pattern"].removeprefix("^")}


def _grader_of(kind: str, required: str, **fields: Schema) -> Schema:
    return closed_object(f"type {required}", type={"const": kind}, name=TEXT, **fields)
