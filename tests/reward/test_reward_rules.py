"""Rules: patterns, schemas, lengths and words, on plain answers and on ones that want to break the check."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlvr.core.types import Outcome, Score, Trajectory
from rlvr.reward import resolve_reward

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TREE = {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}


def scores(name: str, *texts: str, **options: Any) -> list[Score]:
    return resolve_reward(name, **options).score([Trajectory("p", [1], text, [2]) for text in texts])


def values_and_reasons(name: str, *texts: str, **options: Any) -> list[tuple[float | None, str]]:
    return [(score.value, score.reason) for score in scores(name, *texts, **options)]


def test_regex_searches_unless_a_full_match_is_asked_for_and_can_forbid() -> None:
    assert values_and_reasons("regex", "is 42", "none", pattern="[0-9]+") == [(1.0, ""), (0.0, "no_match")]
    assert values_and_reasons("regex", "is 42", "42", pattern="[0-9]+", match="full") == [(0.0, "no_match"), (1.0, "")]
    assert values_and_reasons("regex", "is 42", "none", pattern="[0-9]+", expect="no_match") == [
        (0.0, "match"),
        (1.0, ""),
    ]
    assert values_and_reasons("regex", "4" * 100_001, pattern="4") == [(0.0, "too_large")]


def test_an_answer_on_which_a_pattern_runs_away_fails_alone() -> None:
    got = scores("regex", "aaa", "a" * 60 + "!", "aa", pattern="^(a+)+$", seconds=0.5)
    assert [(s.value, s.outcome, s.reason) for s in got] == [
        (1.0, Outcome.PASSED, ""), (0.0, Outcome.TIMEOUT, "timeout"), (1.0, Outcome.PASSED, ""),
    ]  # fmt: skip


def test_answers_that_were_not_tried_are_errors() -> None:
    """After 20 in a row were late the worker gives up on the batch: those before are late, those after unjudged."""
    got = scores("regex", *["a" * 60 + "!"] * 22, pattern="^(a+)+$", seconds=0.01)
    assert [s.outcome for s in got] == [Outcome.TIMEOUT] * 20 + [Outcome.ERROR] * 2
    assert {s.reason for s in got[20:]} == {"not_run"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "(a"}, r"reward 'regex': pattern='\(a' is not a regular expression"),
        ({"pattern": "a", "expect": "nomatch"}, r"expect='nomatch' \(did you mean 'no_match'\?\)"),
        ({"pattern": "a", "match": "anywhere"}, "match='anywhere'"),
        ({"pattern": "a", "seconds": 0}, "seconds=0, expected a finite number above 0"),
        ({}, "reward 'regex' needs 'pattern'"),
    ],
)
def test_bad_regex_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("regex", **options)


def test_json_schema_distinguishes_bad_json_from_a_mismatch() -> None:
    got = scores(
        "json_schema", '{"name": "Ada", "age": 36}', " {}\n", '{"name": ""}', "Ada", '{"name": 1}', schema=PERSON
    )
    assert [s.value for s in got] == [1, 0, 0, 0, 0]
    assert [s.reason for s in got] == ["", "wrong_schema", "wrong_schema", "wrong_format", "wrong_schema"]
    assert got[1].detail == "$: 'name' is a required property" and got[4].detail.startswith("$.name: 1 is not of type")
    (extra,) = scores("json_schema", '{"name": "Ada", "' + "x" * 5000 + '": 1}', schema=PERSON)
    assert extra.reason == "wrong_schema" and len(extra.detail) < 600


def test_json_schema_in_the_last_code_block() -> None:
    inside = "Here:\n```json\n{}\n```\nor rather\n```json\n[1, 2]\n```\nDone."
    texts = (inside, "[1]", "```json\n[1]", "```\n[1]\n```", "``` \n[1]\n\n```", "x ```\n[1]\n```")
    assert values_and_reasons("json_schema", *texts, schema={"type": "array"}, part="code_block") == [
        (1.0, ""), (0.0, "no_answer"), (0.0, "no_answer"), (1.0, ""), (1.0, ""), (0.0, "no_answer"),
    ]  # fmt: skip


def test_formats_and_references_inside_the_schema_count() -> None:
    schema = {"properties": {"on": {"$ref": "#/$defs/day"}}, "$defs": {"day": {"type": "string", "format": "date"}}}
    assert values_and_reasons("json_schema", '{"on": "2026-02-28"}', '{"on": "2026-02-30"}', schema=schema) == [
        (1.0, ""), (0.0, "wrong_schema"),
    ]  # fmt: skip
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}
    assert values_and_reasons("json_schema", "3", "4", schema=old) == [(0.0, "wrong_schema"), (1.0, "")]


NO_JSON = {
    "not a number": "[NaN]", "endless": "[1e999]", "digits": "[" + "9" * 5000 + "]", "deep": "[" * 101 + "]" * 101,
    "very deep": "[" * 99_000, "fence": "```json\n[]\n```", "nothing": "", "two": "[] []", "null bytes": "[\x00]",
}  # fmt: skip


@pytest.mark.parametrize("text", NO_JSON.values(), ids=NO_JSON)
def test_unsound_json_is_the_wrong_format(text: str) -> None:
    assert values_and_reasons("json_schema", text, schema=TREE) == [(0.0, "wrong_format")]


HOSTILE: dict[str, tuple[dict[str, Any], str, str]] = {
    "recursion as deep as allowed": (TREE, "[" * 100 + "]" * 100, ""),
    "a runaway pattern": ({"items": {"pattern": "^(a+)+$"}}, json.dumps(["a" * 60 + "!"]), "timeout"),
    "items to compare in pairs": (
        {"uniqueItems": True}, str([{"": i} for i in range(9000)]).replace("'", '"').replace(" ", ""), "timeout",
    ),
    "a multiple of a large number": ({"multipleOf": 0.1}, "9" * 300, ""),
    "half a pair": ({"type": "string", "maxLength": 1}, '"\ud800"', ""),
    "half a pair escaped": ({"type": "string", "maxLength": 1}, '"\\ud800"', ""),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_no_answer_raises_in_the_check(schema: dict[str, Any], text: str, reason: str) -> None:
    """Whatever it is made of, an answer gets a verdict, and so does the next one."""
    hostile, plain = scores("json_schema", text, "[]", schema=schema, seconds=1)
    assert hostile.outcome not in (Outcome.ERROR, Outcome.INVALID)
    assert (hostile.reason, hostile.value) == (reason, float(not reason)), hostile
    assert plain.value is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": {"type": "strin"}}, r"the schema cannot be used: at \$\.type: 'strin' is not valid"),
        ({"schema": {"$ref": "#/$defs/none"}}, "the schema cannot be used: .*none"),
        ({"schema": {"properties": {"a": {"$ref": "http://127.0.0.1:1/x.json"}}}}, "cannot be used: .*127.0.0.1"),
        ({"schema": {"$ref": "#"}}, "refers to itself without end"),
        ({"schema": {"pattern": "(a"}}, "the schema cannot be used: "),
        ({"schema": "person.json"}, "schema='person.json', expected a JSON schema as a dictionary"),
        ({"schema": {}}, "expected a JSON schema as a dictionary, not empty"),
        ({"schema": {"const": {1, 2}}}, "the schema is not JSON"),
        ({"schema": PERSON, "part": "block"}, r"part='block' \(did you mean 'code_block'\?\)"),
        ({"schema": PERSON, "seconds": -1}, "seconds=-1"),
        ({}, "reward 'json_schema' needs 'schema'"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_when_resolved(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("json_schema", **options)


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({"at_least": 2, "at_most": 3}, "one", "too_short"),
        ({"at_least": 2, "at_most": 3}, "one two", ""),
        ({"at_least": 2, "at_most": 3}, " one\ntwo  three ", ""),
        ({"at_least": 2, "at_most": 3}, "1 2 3 4", "too_long"),
        ({"at_most": 0}, "", ""),
        ({"at_most": 3, "unit": "characters"}, "äöü", ""),
        ({"at_most": 3, "unit": "characters"}, "abc ", "too_long"),
        ({"at_least": 2, "unit": "lines"}, "a\n\n \nb\n", ""),
        ({"at_least": 3, "unit": "lines"}, "a\n\n \nb\n", "too_short"),
    ],
)
def test_length(options: dict[str, Any], text: str, expected: str) -> None:
    assert values_and_reasons("length", text, **options) == [(float(not expected), expected)]


def test_length_in_tokens_counts_what_the_policy_sampled_and_needs_tokens() -> None:
    reward = resolve_reward("length", at_most=2, unit="tokens")
    three = Trajectory("p", [1], "abc", [2, 3, 4])
    asked = Trajectory("p", [1], "abc", [2, 3, 4], action_mask=[1, 0, 1])
    text = Trajectory("p", [], "abc", [])
    got = reward.score([three, asked, text])
    assert [(s.value, s.reason) for s in got] == [(0.0, "too_long"), (1.0, ""), (None, "no_tokens")]
    assert got[0].parts == {"length": 3.0} and got[2].outcome is Outcome.INVALID and reward("p", "abc") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected at_least, at_most, or both"),
        ({"at_least": 3, "at_most": 2}, "at_least=3 is above at_most=2"),
        ({"at_most": -1}, "at_most=-1"),
        ({"at_most": True}, "at_most=True"),
        ({"at_most": 2, "unit": "word"}, r"unit='word' \(did you mean 'words'\?\)"),
    ],
)
def test_bad_lengths(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_reward("length", **options)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The KEY turns.", True),
        ("monkey", False),
        ("key_", False),
        ("a key, please", True),
        ("keys key", True),
        ("k\u200bey", True),  # an invisible character in it
        ("\uff4b\uff45\uff59", True),  # full-width letters
        ("ключ", False),
        ("", False),
    ],
)
def test_words_are_found_whole_and_however_they_are_disguised(text: str, found: bool) -> None:
    assert values_and_reasons("required_words", text, words=["key"]) == [(1.0, "") if found else (0.0, "missing_word")]
    assert values_and_reasons("forbidden_words", text, words=["key"]) == [
        (0.0, "forbidden_word") if found else (1.0, "")
    ]


def test_words_may_be_phrases_stand_inside_others_and_keep_their_case() -> None:
    assert values_and_reasons("required_words", "on the\n other  hand", words=["the other hand"]) == [(1.0, "")]
    assert values_and_reasons("required_words", "monkey", words=["key"], match="anywhere") == [(1.0, "")]
    assert values_and_reasons("required_words", "Key", words=["key"], case="same") == [(0.0, "missing_word")]
    assert values_and_reasons("forbidden_words", "c++ or c#", words=["c++"]) == [(0.0, "forbidden_word")]
    assert values_and_reasons("required_words", "STRASSE", words=["straße"]) == [(1.0, "")]
    (score,) = scores("required_words", "alpha gamma", words=["alpha", "beta", "gamma", "delta"])
    assert score.parts == {"found": 0.5} and score.detail == "beta, delta"
    (score,) = scores("forbidden_words", "alpha gamma", words=["alpha", "beta"])
    assert score.parts == {"found": 0.5} and score.detail == "alpha"
    for name in ("required_words", "forbidden_words"):
        assert values_and_reasons(name, "key " * 30_000, words=["key"]) == [(0.0, "too_large")]


@pytest.mark.parametrize("words", [[], "key", [""], [" "], ["\u200b"], [3], None])
def test_words_must_be_a_list_of_words(words: Any) -> None:
    with pytest.raises(ValueError, match=r"reward 'forbidden_words': words=.*, expected a non-empty list of words"):
        resolve_reward("forbidden_words", words=words)


def test_rules_are_parts_of_a_composite() -> None:
    reward = resolve_reward(
        "composite",
        rewards=[
            {"name": "json_schema", "weight": 2, "kwargs": {"schema": {"type": "array"}}},
            {"name": "regex", "kwargs": {"pattern": "[0-9]"}},
            {"name": "length", "kwargs": {"at_most": 1}},
        ],
    )
    assert [reward("p", text) for text in ("[1]", "[1, 2]", "{}", "a 1")] == [1.0, 0.75, 0.25, 0.25]
