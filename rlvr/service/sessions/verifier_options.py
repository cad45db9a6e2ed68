"""The options that a request may set for each verifier, as JSON schemas: what /openapi.json promises.

A verifier that is not listed takes no options. No path to code, no URL and no key comes from outside. The rewards check
the values themselves; tests/service/test_service_openapi.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.reward.math.compare import DECIMALS, PERCENT, UNITS
from rlvr.reward.text.final_answer import MANY_BOXES, PLACES
from rlvr.reward.text.repetition import MOST_WORDS
from rlvr.reward.text.rules import MAX_WORD, MAX_WORDS

Schema = dict[str, Any]

NO_NUL = r"^[^\x00]*$"
# Text that is not blank. The separators U+001C to U+001F and U+0085 are white space in Python, not in other regexes.
WORDS_NO_NUL = r"^[^\x00]*[^\s\x00\x1c-\x1f\x85][^\x00]*$"
TEXT: Schema = {"type": "string", "pattern": NO_NUL}
NULL: Schema = {"type": "null"}
BOOLEAN: Schema = {"type": "boolean"}
WEIGHT: Schema = {"type": "number", "minimum": 0}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**53}
PATTERN: Schema = {"type": "string", "format": "regex", "minLength": 1, "maxLength": 10_000}


def _one_of(*words: str) -> Schema:
    return {"enum": list(words)}


def _words(longest: int = MAX_WORD) -> Schema:
    word = {"type": "string", "pattern": WORDS_NO_NUL, "maxLength": longest}
    return {"type": "array", "items": word, "minItems": 1, "maxItems": MAX_WORDS}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def closed_object(required: str = "", **properties: Schema) -> Schema:
    """An object with these properties and no others."""
    needed = {"required": required.split()} if required else {}
    return {"type": "object", "properties": properties, "additionalProperties": False, **needed}


_WORD_LIST = closed_object("words", words=_words(), match=_one_of("word", "anywhere"), case=_one_of("ignore", "same"))
_MATCH = _one_of("full", "search")
_JSON_SCHEMA: Schema = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": {"pattern": NO_NUL},
    "additionalProperties": {"$ref": "#/components/schemas/JsonValue"},
}
_UNIT = _one_of("words", "characters", "lines", "tokens")
_PLACES: Schema = {"type": "array", "items": _one_of(*PLACES), "minItems": 1, "maxItems": len(PLACES)}
_MATH: dict[str, Schema] = {
    "extract": {"anyOf": [_one_of("auto"), _PLACES]},
    "percent": _one_of(*PERCENT),
    "decimals": _one_of(*DECIMALS),
    "units": _one_of(*UNITS),
}

# Each verifier's forms of options; one of them has to fit.
OPTION_SCHEMAS: Mapping[str, tuple[Schema, ...]] = {
    "code": (closed_object(partial=BOOLEAN),),
    "combined": (closed_object(boxed_weight=WEIGHT, correct_weight=WEIGHT),),
    "exact_match": (closed_object(ignore_case=BOOLEAN),),
    "forbidden_words": (_WORD_LIST,),
    "format_compliance": (
        closed_object("required_format", required_format=_one_of("json", "numbered_list"), pattern=NULL, match=NULL),
        closed_object(
            "required_format pattern",
            required_format=_one_of("regex"),
            pattern=PATTERN,
            match=or_null(_MATCH),
        ),
    ),
    "json_schema": (closed_object("schema", schema=_JSON_SCHEMA, part=_one_of("whole", "code_block")),),
    "judge": (
        closed_object(
            rubric={"type": "string", "pattern": WORDS_NO_NUL, "maxLength": 20_000},
            scale={"type": "integer", "minimum": 1, "maximum": 1_000},
            passed_at={"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            reference=_one_of("auto", "required", "never"),
        ),
    ),
    "keyword_contains": (closed_object("keywords", keywords=_words(), mode=_one_of("any", "all")),),
    "length": (  # with both bounds, at_least is not above at_most
        closed_object("at_least", at_least=COUNT, at_most=NULL, unit=_UNIT),
        closed_object("at_most", at_least=NULL, at_most=COUNT, unit=_UNIT),
    ),
    "length_penalty": (closed_object(target_length=COUNT, penalty_per_token=WEIGHT),),
    "math": (
        closed_object("", profile=_one_of("strict"), on_many_boxes=_one_of(*MANY_BOXES), **_MATH),
        closed_object("", profile=_one_of("lenient"), on_many_boxes=_one_of("last"), **_MATH),
    ),
    "regex": (closed_object("pattern", pattern=PATTERN, match=_MATCH, expect=_one_of("match", "no_match")),),
    "repetition": (
        closed_object(
            words={"type": "integer", "minimum": 1, "maximum": MOST_WORDS},
            at_most={"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        ),
    ),
    "required_words": (_WORD_LIST,),
}

# Their names.
OPTIONS: Mapping[str, frozenset[str]] = {
    name: frozenset(option for form in forms for option in form["properties"]) for name, forms in OPTION_SCHEMAS.items()
}
