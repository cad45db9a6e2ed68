"""Templates of graders: filled once, with text, in one walk; what cannot be read or found is said with its place."""

from __future__ import annotations

import pytest

from rlvr.reward.graders.grader_templates import MAX_TEMPLATE, MissingField, Placeholder, Template

VALUES = {
    "item": {
        "answer": "7",
        "n": 7,
        "rows": [{"x": 1.5}, None],
        "odd key": {"ü": True},
        "text": "{{ sample.output_text }}",
    },
    "sample": {"output_text": "it is {{ item.answer }}", "output_json": {"k": [1, [2]]}},
}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("", ""),
        ("no braces { } }}", "no braces { } }}"),
        ("{{item.answer}}", "7"),
        ("<{{ item.answer }}|{{item.n}}>", "<7|7>"),
        ("{{ item.rows[0].x }} {{ item.rows[1] }}", "1.5 null"),
        ("{{ item['odd key'][\"ü\"] }}", "true"),
        ("{{ sample.output_json.k }}", "[1, [2]]"),
        ("{{ sample.output_json.k[1][0] }}", "2"),
    ],
)
def test_places_are_filled_with_texts_as_they_are_and_other_values_as_json(text: str, filled: str) -> None:
    assert Template.of(text, "input").fill(VALUES) == filled


def test_inserted_text_is_not_a_template() -> None:
    """An answer that holds braces would otherwise read the reference into itself."""
    assert Template.of("{{ sample.output_text }}", "input").fill(VALUES) == "it is {{ item.answer }}"
    assert Template.of("{{ item.text }}", "input").fill(VALUES) == "{{ sample.output_text }}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (7, r"input=.7. \(int\), expected text"),
        ("{{ item.answer", "input: '{{' at character 0 is never closed"),
        ("{{ items.answer }}", "begins with 'items' .did you mean 'item'"),
        ("{{ item }}", "names no field; expected item.<field>"),
        ("{{ }}", "expected item.<field>"),
        ("{{ item.answer | upper }}", "cannot be read from ' | upper' on"),
        ("{{ item.__class__() }}", r"cannot be read from '\(\)' on"),
        ("{{ item[-1] }}", "cannot be read"),
        ("{% for x in item %}{{ x }}", "begins with 'x'"),
        ("x" * (MAX_TEMPLATE + 1), "at most 100,000"),
        ("{{" * 50_000, "never closed"),
        ("{{ item" + "[" * 99_000 + "}}", "cannot be read"),
    ],
)
def test_a_bad_template_is_refused_with_the_field(text: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Template.of(text, "input")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ item.nope }}", "no 'nope' among answer, n, rows"),
        ("{{ item.rows[2] }}", r"no \[2\] in a list of 2"),
        ("{{ item.answer.x }}", "a str has no fields"),
        ("{{ item.__class__ }}", "no '__class__' among"),
        ("{{ item.answer[0] }}", "a str has no fields"),
    ],
)
def test_a_missing_field_is_named_with_its_path(text: str, message: str) -> None:
    with pytest.raises(MissingField, match=message):
        Template.of(text, "input").fill(VALUES)


def test_a_place_reads_as_it_was_written() -> None:
    assert str(Placeholder.of(" item.rows[0]['odd key'] ", "input")) == 'item.rows[0]["odd key"]'
