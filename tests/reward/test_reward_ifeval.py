"""The instructions of IFEval: by hand for each kind, on hostile texts, and held against the paper's words."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case
from rlvr.reward.text import ifeval as module
from rlvr.reward.text.ifeval import INSTRUCTIONS, find_instruction_fault, split_sentences

SENTENCES = "One is here. Two is there! Is three? Dr"


def verdict(text: str, *instructions: tuple[str, dict[str, Any]]) -> tuple[float | None, str, str]:
    meta = {"instruction_id_list": [name for name, _ in instructions], "kwargs": [given for _, given in instructions]}
    score = resolve_reward("ifeval").judge(Case("p", text, meta))
    return score.value, score.outcome.value, score.reason


# kind, fields, texts that follow, texts that do not: each by the wording of the instruction.
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["Sun", "old tree"]}, ["The SUN and an Old Tree"], ["sun and tree", "tree"]),
    ("keywords:existence", {"keywords": ["a+b"]}, ["so a+b is"], ["aab"]),  # text, and no regular expression
    ("keywords:frequency", {"keyword": "so", "frequency": 2, "relation": "at least"}, ["So, so", "also so"], ["so"]),
    ("keywords:frequency", {"keyword": "so", "frequency": 2, "relation": "less than"}, ["so", "no"], ["so so"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["category", "dog"], ["a Cat.", "cat"]),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "at least"}, ["Eve"], ["eat"]),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "less than"}, ["eat"], ["eve"]),
    (
        "length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?", 'He said "no." She left. They stayed'], ["One. Two.", "3.14 is it", "... !!! ???"],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, ["One."], ["One. Two"]),
    (
        "length_constraints:number_paragraphs", {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***"], ["a", "a***b***c", "a*** ***b"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["a, b"], ["a b c", "a-b c"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["a b c"], ["a b"]),
    (
        "length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "So"},
        ["One.\n\n\"So, two.", "One.\n\nso"], ["so\n\none", "One.\n\nso\n\nthree", "so"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[a] and [b c]"], ["[a]", "[a\n] [b]", "[[["]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye. P.S. more", "p. s. x"], ["PS more"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["x\nP.P.S. y"], ["P.S. y"]),
    (
        "detectable_format:number_bullet_lists", {"num_bullets": 2},
        ["* a\n* b", "x\n - a\n  * b"], ["* a", "* a\n- b\n* c", "** a\n** b"],
    ),
    ("detectable_format:constrained_response", {}, ["My answer is maybe."], ["Maybe.", "my answer is yes."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* *b*"], ["*a*", "* \n*", "** **"]),
    (
        "detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"], ["Section 1", "section 1 section 2", "Section one Section two"],
    ),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n[1]\n```', "```\n2\n```"], ["{a: 1}", "NaN", "["]),
    ("detectable_format:title", {}, ["<<A poem>>\ntext"], ["<<>>", "<A>", "<<a\n>>", ">><<"]),
    ("combination:two_responses", {}, ["a\n******\nb"], ["a", "a******a", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it"}, ["say it. It."], ["I say it", "Sure: say it"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ["So. the end.", '"x the end."'], ["The end. No."]),
    ("startend:quotation", {}, ['"a"', ' "a b" '], ['"', 'a', '"a']),
    (
        "change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
        ["NATO and TOP-TEN", "I A"], ["TOP-TEN", "Top Ten"],
    ),
    ("punctuation:no_comma", {}, ["a b."], ["a, b"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "right", "wrong"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_an_instruction_is_followed_or_not(
    name: str, fields: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert verdict(text, (name, fields)) == (1.0, "passed", ""), text
    for text in [*wrong, "", "  \n"]:
        assert verdict(text, (name, fields)) == (0.0, "failed", "not_followed"), text


def test_every_kind_that_needs_no_detector_has_a_case() -> None:
    language = {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}
    assert {case[0] for case in CASES} == set(INSTRUCTIONS) - language
    assert len(INSTRUCTIONS) == 25


def test_all_instructions_of_a_row_must_be_followed_and_the_share_is_a_part() -> None:
    meta = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{"num_words": None}, {}],  # the rows of google/IFEval have every field, most of them null
    }
    score = resolve_reward("ifeval").judge(Case("p", "a b", meta))
    assert (score.value, score.parts, score.detail) == (0.0, {"followed": 0.5}, "startend:quotation")


@pytest.mark.parametrize(
    ("ids", "fields", "message"),
    [
        (None, None, "instruction_id_list=None, expected a list of 1 to 100"),
        ([], [], "expected a list of 1 to 100"),
        (["punctuation:no_coma"], [{}], "is unknown (did you mean 'punctuation:no_comma'?)"),
        (["punctuation:no_comma"], [{}, {}], "expected a list of 1 mappings"),
        (["keywords:existence"], [{}], "'keywords' is missing; its fields are keywords"),
        (["keywords:existence"], [{"keywords": "sun"}], "keywords='sun', expected a list of texts"),
        (["keywords:existence"], [{"keywords": [" "]}], "expected a list of texts"),
        (["startend:end_checker"], [{"end_phrase": ""}], "expected text"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": -1}], "expected a whole number of at least 0"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "at most"}], "one of 'less than'"),
    ],
)
def test_a_fault_of_the_row_is_invalid_and_named(ids: Any, fields: Any, message: str) -> None:
    assert message in find_instruction_fault(ids, fields)
    score = resolve_reward("ifeval").judge(Case("p", "any text", {"instruction_id_list": ids, "kwargs": fields}))
    assert (score.value, score.outcome.value, score.reason) == (None, "invalid", "bad_instructions")


def test_languages_by_langdetect() -> None:
    pytest.importorskip("langdetect", reason="the package langdetect is not installed")
    german = "Das ist ein deutscher Satz über einen alten Baum und die Sonne am Himmel."
    assert verdict(german, ("language:response_language", {"language": "de"}))[0] == 1.0
    assert verdict(german, ("language:response_language", {"language": "en"}))[0] == 0.0
    assert verdict("12 34 !", ("language:response_language", {"language": "en"}))[0] == 0.0  # cannot be told
    english = "this is an english sentence about an old tree and the sun in the sky."
    assert verdict(english, ("change_case:english_lowercase", {}))[0] == 1.0
    assert verdict(english.upper(), ("change_case:english_capital", {}))[0] == 1.0
    assert verdict(german.lower(), ("change_case:english_lowercase", {}))[0] == 0.0


def test_without_langdetect_the_verdict_is_an_error_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise module.NoLanguageDetector("pip install langdetect")

    monkeypatch.setattr(module, "_load_detector", missing)
    assert verdict("all small.", ("change_case:english_lowercase", {})) == (None, "error", "no_langdetect")


def test_sentences() -> None:
    assert split_sentences(SENTENCES) == ["One is here.", "Two is there!", "Is three?", "Dr"]
    assert split_sentences("It is 3.14 m. (Yes.) No") == ["It is 3.14 m.", "(Yes.)", "No"]


@pytest.mark.timeout(120)  # about a second; a check whose time grows with the square of the text takes minutes
def test_hostile_texts_take_linear_time() -> None:
    pieces = ("[", "*", "<", "<<", "\n", " ", "***", "a.", "p.", "Section ", "(", '"', "\n\n", "{", "-\n", "x'")
    for text in [(piece * 100_000)[:100_000] for piece in pieces]:
        for name, fields, _, _ in CASES:
            verdict(text, (name, fields))
    assert verdict("a" * 100_001, ("punctuation:no_comma", {})) == (0.0, "failed", "too_large")
