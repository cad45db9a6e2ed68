"""Graders of texts and of graders: their values, what is refused, and who bears what is missing or too long."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.core.types import Outcome, Score
from rlvr.reward.graders import Grader

CHECK = {"type": "string_check", "name": "c", "input": "{{ sample.output_text }}", "reference": "{{ item.a }}"}
LIKE = {"type": "text_similarity", "name": "s", "input": "{{ sample.output_text }}", "reference": "{{ item.a }}"}


def grade(config: dict[str, Any], text: str, item: dict[str, Any] | None = None, **sample: Any) -> Score:
    return Grader.of(config).grade(item or {}, {"output_text": text, **sample})


def verdict_of(score: Score) -> tuple[float | None, str, str]:
    return score.value, score.outcome.value, score.reason


@pytest.mark.parametrize(
    ("operation", "text", "reference", "value"),
    [
        ("eq", "Paris", "Paris", 1),
        ("eq", "paris", "Paris", 0),
        ("ne", "paris", "Paris", 1),
        ("ne", "Paris", "Paris", 0),
        ("like", "in Paris.", "Paris", 1),
        ("like", "in paris.", "Paris", 0),
        ("ilike", "in PARIS.", "Paris", 1),
        ("ilike", "STRASSE", "straße", 1),
        ("like", "Pari", "Paris", 0),
    ],
)
def test_a_string_check_is_one_or_zero(operation: str, text: str, reference: str, value: float) -> None:
    score = grade({**CHECK, "operation": operation}, text, {"a": reference})
    assert (score.value, score.outcome) == (value, Outcome.PASSED if value else Outcome.FAILED)


def test_similarity_passes_from_its_threshold_on_and_from_the_middle_without_one() -> None:
    config = {**LIKE, "evaluation_metric": "fuzzy_match"}
    item = {"a": "abcd"}
    assert verdict_of(grade(config, "abxx", item)) == (0.5, "passed", "")
    assert verdict_of(grade({**config, "pass_threshold": 0.51}, "abxx", item)) == (0.5, "failed", "low_score")


def test_an_answer_that_is_json_is_read_as_such() -> None:
    config = {**CHECK, "input": "{{ sample.output_json.steps[1].x }}", "operation": "eq"}
    assert grade(config, '{"steps": [{}, {"x": 7}]}', {"a": "7"}).value == 1.0
    assert grade(config, "no json", {"a": "7"}, output_json={"steps": [0, {"x": "7"}]}).value == 1.0


@pytest.mark.parametrize("text", ["no json", '{"steps": []}', '{"steps": [1, NaN]}', "[" * 100_000, '{"x": ' * 50_000])
@pytest.mark.parametrize("operation", ["eq", "ne", "like"])
def test_an_answer_without_the_field_fails(text: str, operation: str) -> None:
    """Also where texts shall differ: there an answer that says nothing would pass."""
    config = {**CHECK, "input": "{{ sample.output_json.steps[1] }}", "operation": operation}
    assert verdict_of(grade(config, text, {"a": "7"})) == (0.0, "failed", "missing_field")


def test_a_deeply_nested_answer_does_not_affect_others() -> None:
    """Parsed, it might not be written again; the answers beside it must not bear that."""
    grader = Grader.of({**CHECK, "input": "{{ sample.output_json }}", "operation": "eq"})
    deep = [{"output_text": "[" * n + "]" * n} for n in (2, 100, 101, 300, 900, 990, 5000)]
    scores = grader.grade_many([({"a": "[[]]"}, sample) for sample in deep])
    assert [score.value for score in scores] == [1.0] + [0.0] * 6
    assert [score.reason for score in scores[1:]] == ["not_equal"] + ["missing_field"] * 5


def test_an_item_that_breaks_its_grader_does_not_affect_others() -> None:
    item: dict[str, Any] = {"a": "7"}
    item["a"] = item  # no JSON can say this
    cases = [(item, {"output_text": "7"}), ({"a": "7"}, {"output_text": "7"})]
    broken, good = Grader.of({**CHECK, "operation": "eq"}).grade_many(cases)
    assert verdict_of(broken) == (None, "error", "exception") and good.value == 1.0


def test_a_field_missing_from_the_task_makes_it_invalid() -> None:
    assert verdict_of(grade({**CHECK, "operation": "eq"}, "7")) == (None, "invalid", "missing_field")
    tools = {**CHECK, "input": "{{ sample.output_tools[0].function.name }}", "operation": "eq"}
    assert verdict_of(grade(tools, "7", {"a": "f"})) == (None, "invalid", "missing_field")
    assert verdict_of(grade(tools, "7", {"a": "f"}, output_tools=[])) == (0.0, "failed", "missing_field")
    called = grade(tools, "", {"a": "f"}, output_tools=[{"function": {"name": "f"}}])
    assert called.value == 1.0


def test_an_empty_reference_is_an_invalid_task() -> None:
    assert verdict_of(grade({**CHECK, "operation": "like"}, "anything", {"a": ""})) == (
        None,
        "invalid",
        "empty_reference",
    )
    assert verdict_of(grade({**LIKE, "evaluation_metric": "bleu"}, "x", {"a": " "})) == (
        None,
        "invalid",
        "empty_reference",
    )
    turned = {**CHECK, "input": "{{ item.a }}", "reference": "{{ sample.output_text }}", "operation": "ilike"}
    assert verdict_of(grade(turned, "", {"a": "all"})) == (0.0, "failed", "empty_reference")


@pytest.mark.parametrize("operation", ["eq", "ne", "like", "ilike"])
def test_an_answer_of_ten_megabytes_fails_at_once(operation: str) -> None:
    score = grade({**CHECK, "operation": operation}, "ab" * 5_000_000, {"a": "a" * 1000})
    assert verdict_of(score) == (0.0, "failed", "too_large")


def test_too_long_a_task_is_invalid_and_too_long_an_answer_fails() -> None:
    config = {**LIKE, "evaluation_metric": "rouge_l"}
    assert verdict_of(grade(config, "x", {"a": "a " * 20_000})) == (None, "invalid", "too_large")
    assert verdict_of(grade(config, "a " * 20_000, {"a": "x"})) == (0.0, "failed", "too_large")


def test_a_phrase_that_nearly_matches_everywhere_is_found_in_linear_time() -> None:
    """To try every place anew would be 2.4e11 comparisons."""
    assert grade({**CHECK, "operation": "like"}, "a" * 999_999, {"a": "a" * 400_000 + "b"}).reason == "not_found"


def multi(formula: str, **graders: dict[str, Any]) -> dict[str, Any]:
    return {"type": "multi", "name": "m", "graders": graders, "calculate_output": formula}


def test_a_multi_is_its_formula_over_its_graders() -> None:
    config = multi(
        "0.75 * same + 0.25 * close",
        same={**CHECK, "operation": "eq"},
        close={**LIKE, "evaluation_metric": "fuzzy_match"},
    )
    good, half = (grade(config, text, {"a": "abcd"}) for text in ("abcd", "abxx"))
    assert verdict_of(good) == (1.0, "passed", "") and good.parts == {"same": 1.0, "close": 1.0}
    assert verdict_of(half) == (0.125, "failed", "low_score") and half.parts == {"same": 0.0, "close": 0.5}
    assert "same: not_equal" in half.detail
    assert grade({**config, "pass_threshold": 0.1}, "abxx", {"a": "abcd"}).outcome is Outcome.PASSED


def test_a_multi_of_a_grader_that_cannot_grade_has_no_value() -> None:
    config = multi("a + b", a={**CHECK, "operation": "eq"}, b={**CHECK, "reference": "{{ item.b }}", "operation": "ne"})
    score = grade(config, "7", {"a": "7"})
    assert verdict_of(score) == (None, "invalid", "missing_field") and score.detail.startswith("b: {{ item.b }}")


def test_a_formula_without_a_value_is_an_error() -> None:
    score = grade(multi("1 / a", a={**CHECK, "operation": "eq"}), "8", {"a": "7"})
    assert verdict_of(score) == (None, "error", "no_value") and "/(1, 0) has no value" in score.detail
    assert score.parts == {"a": 0.0}
    large = grade(multi("10 ^ (31 + a)", a={**CHECK, "operation": "eq"}), "8", {"a": "7"})
    assert verdict_of(large) == (None, "error", "no_value")


def test_many_are_graded_in_order() -> None:
    grader = Grader.of({**CHECK, "operation": "eq"})
    cases = [({"a": str(i)}, {"output_text": str(i % 3)}) for i in range(50)]
    assert [score.value for score in grader.grade_many(cases)] == [float(i < 3) for i in range(50)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "expected an object with a type: string_check"),
        ({}, "type=None; expected one of string_check"),
        ({"type": "strng_check"}, "type='strng_check' .did you mean 'string_check'"),
        ({"type": ["multi"]}, "type="),
        (CHECK, "operation is missing; a string_check grader needs input, reference, operation"),
        ({**CHECK, "operation": "equals"}, "operation='equals'.*expected one of eq, ne, like, ilike"),
        ({**CHECK, "operation": "eq", "refrence": "x"}, "refrence is not known .did you mean 'reference'"),
        ({**CHECK, "operation": "eq", "input": "{{ itm.x }}"}, "^input: .* begins with 'itm'"),
        ({**CHECK, "operation": "eq", "name": 7}, "name=7, expected text"),
        ({**CHECK, "operation": "eq", "pass_threshold": 1}, "pass_threshold is not known"),
        ({**LIKE, "evaluation_metric": "rouge"}, "evaluation_metric='rouge'.*expected one of fuzzy_match, bleu"),
        ({**LIKE, "evaluation_metric": "meteor"}, "'meteor' is not supported: it needs WordNet"),
        ({**LIKE, "evaluation_metric": "cosine"}, "'cosine' is not supported: it needs an embedding model"),
        ({**LIKE, "evaluation_metric": "bleu", "pass_threshold": 2}, "pass_threshold=2, expected a number from 0 to 1"),
        ({**LIKE, "evaluation_metric": "bleu", "pass_threshold": float("nan")}, "pass_threshold=nan"),
        ({**LIKE, "evaluation_metric": "bleu", "pass_threshold": True}, "pass_threshold=True"),
        (multi("a", a={**CHECK, "operation": "x"}), r"graders.a.operation='x'"),
        (
            multi("a", a=multi("b", b={**CHECK, "operation": "eq"})),
            "graders.a.type='multi': a multi grader cannot hold another",
        ),
        (multi("b", a={**CHECK, "operation": "eq"}), "calculate_output names 'b'.*the graders are: a"),
        (multi("a"), "graders={}, expected an object of 1 to 20 graders by name"),
        (multi("min", min={**CHECK, "operation": "eq"}), "graders has the name 'min'"),
        (multi("a", **{"a b": {**CHECK, "operation": "eq"}}), "graders has the name 'a b'"),
        (multi("x0", **{f"x{i}": {**CHECK, "operation": "eq"} for i in range(21)}), "1 to 20 graders"),
        ({"type": "multi", "graders": [], "calculate_output": "1"}, r"graders=\[\], expected an object"),
        ({"type": "endpoint", "url": "http://example.com"}, "type='endpoint'"),
    ],
)
def test_a_bad_grader_is_refused_with_the_path_of_the_field(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grader.of(config)
