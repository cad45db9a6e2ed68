"""Instructions that code can check: the 25 kinds of IFEval (Zhou et al. 2023, https://arxiv.org/abs/2311.07911).

    {"prompt": "...", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}

The rows of `google/IFEval` and data sets of its form are read as they are. Differences from the paper's program: words
and phrases are text and never regular expressions; sentences end at `.`, `!` or `?` before white space (the paper's
program asks a trained splitter); an answer whose language cannot be told does not follow an instruction on language.
Every check takes linear time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlvr.core.registry import did_you_mean
from rlvr.core.types import Outcome, Score
from rlvr.reward.registry import register_reward
from rlvr.reward.signatures import Case
from rlvr.reward.text.guarded_rules import MAX_CHARS
from rlvr.reward.text.json_schema import MAX_DEPTH, refuse_constant

RELATIONS = ("less than", "at least")
CONSTRAINED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
MOST_INSTRUCTIONS = 100
_WORD, _WORD_WITH_MARKS = re.compile(r"\w+"), re.compile(r"\w[\w'-]*")
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")
_FENCE = re.compile(r"^```(?:json)?", re.IGNORECASE)


class NoLanguageDetector(Exception):
    """The package `langdetect`, which tells languages, is not installed."""


Check = Callable[..., bool]


@dataclass(frozen=True)
class Instruction:
    """A kind of instruction: its check, called with the answer and the fields, and each field's type."""

    follows: Check
    fields: Mapping[str, type]

    def find_fault(self, given: Mapping[str, Any]) -> str:
        """Why the fields given are not those of the kind, or an empty text. Fields that are None were not given."""
        given = {name: value for name, value in given.items() if value is not None}
        for name, kind in self.fields.items():
            if name not in given:
                return f"{name!r} is missing; its fields are {', '.join(self.fields)}"
            value, is_list = given[name], kind is list
            right = (
                bool(value) and isinstance(value, list) and all(isinstance(one, str) and one.strip() for one in value)
                if is_list
                else type(value) is kind and (value >= 0 if kind is int else bool(value.strip()))
            )
            if name.endswith("relation") and value not in RELATIONS:
                return f"{name}={value!r:.80}, expected one of {', '.join(map(repr, RELATIONS))}"
            if not right:
                expected = {int: "a whole number of at least 0", str: "text", list: "a list of texts"}[kind]
                return f"{name}={value!r:.80}, expected {expected}"
        return ""


@register_reward("ifeval", gold="instruction_id_list", verifiable=True, reward_range=(0.0, 1.0))
def ifeval(case: Case) -> Score:
    """1.0 if the response follows every instruction of `meta["instruction_id_list"]`, else 0.0 (`not_followed`).

    `meta["kwargs"]` has the fields of each, in the same order (IFEval's "prompt-level strict accuracy"). An empty
    response follows none. Part: `followed`, the share that is followed ("instruction-level"). Unknown instructions and
    wrong fields are the task's fault: `invalid`. Instructions on language or case need the package `langdetect`:
    without it `error`.
    """
    meta = case.meta or {}
    ids, fields = meta.get("instruction_id_list"), meta.get("kwargs")
    if fault := find_instruction_fault(ids, fields):
        return Score(None, Outcome.INVALID, "bad_instructions", detail=fault)
    assert isinstance(ids, list)
    fields = fields if fields is not None else [{}] * len(ids)
    if len(case.response) > MAX_CHARS:
        return Score(0.0, Outcome.FAILED, "too_large", {"followed": 0.0})
    broken: list[str] = []
    try:
        for name, given in zip(ids, fields, strict=True):
            kind = INSTRUCTIONS[name]
            values = {field: given[field] for field in kind.fields}
            if not case.response.strip() or not kind.follows(case.response, **values):
                broken.append(name)
    except NoLanguageDetector as error:
        return Score(None, Outcome.ERROR, "no_langdetect", detail=str(error))
    parts = {"followed": 1 - len(broken) / len(ids)}
    if broken:
        reason = "truncated" if case.truncated else "not_followed"
        return Score(0.0, Outcome.FAILED, reason, parts, detail=", ".join(broken)[:300])
    return Score(1.0, Outcome.PASSED, "", parts)


def find_instruction_fault(ids: Any, fields: Any) -> str:
    """Why a row's instructions cannot be checked, or an empty text."""
    if not isinstance(ids, list) or not 0 < len(ids) <= MOST_INSTRUCTIONS:
        return f"instruction_id_list={ids!r:.80}, expected a list of 1 to {MOST_INSTRUCTIONS} instructions"
    if fields is None:
        fields = [{}] * len(ids)
    if not isinstance(fields, list) or len(fields) != len(ids) or not all(isinstance(one, Mapping) for one in fields):
        return f"kwargs={fields!r:.80}, expected a list of {len(ids)} mappings, one for each instruction"
    for place, (name, given) in enumerate(zip(ids, fields, strict=True)):
        if name not in INSTRUCTIONS:
            return f"instruction_id_list[{place}]={name!r:.80} is unknown{did_you_mean(str(name), INSTRUCTIONS)}"
        if fault := INSTRUCTIONS[name].find_fault(given):
            return f"kwargs[{place}] of {name}: {fault}"
    return ""


def _compare(count: int, relation: str, bound: int) -> bool:
    return count < bound if relation == "less than" else count >= bound


def split_sentences(text: str) -> list[str]:
    """The sentences of a text; one that has no end mark counts where it stands last."""
    found: list[str] = []
    start = 0
    for end in _SENTENCE_END.finditer(text):
        found.append(text[start : end.end()].strip())
        start = end.end()
    return [one for one in [*found, text[start:].strip()] if _WORD.search(one)]


def _has_words(text: str, words: list[str], whole: bool) -> list[bool]:
    """Whether each word or phrase stands in the text, in any case; `whole`: with no letter or digit beside it."""
    edge = r"\b" if whole else ""
    return [bool(re.search(f"{edge}{re.escape(word)}{edge}", text, re.IGNORECASE)) for word in words]


def _keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE)), relation, frequency)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs between `***`; one at an end may be empty."""
    parts = text.split("***")
    inner = parts[1:-1]
    return all(part.strip() for part in inner) and sum(bool(part.strip()) for part in parts) == num_paragraphs


def _nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs between blank lines, and the first word of one of them."""
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'\"").lower()
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0] == first_word.strip().lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    """Square brackets within a line, such as [address]."""
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count += 1
            start = line.find("[", end)
    return count >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    marker = postscript_marker.strip()
    return bool(re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()))


def _bullets(text: str, num_bullets: int) -> bool:
    """Lines that begin with `* ` or `-`; a line of several stars is none."""
    lines = [line.lstrip() for line in text.split("\n")]
    count = sum(line.startswith("-") or (line.startswith("*") and len(line) > 1 and line[1] != "*") for line in lines)
    return count == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
    """*marked* or **marked** text within a line."""
    one = [found for found in re.findall(r"\*[^\n*]*\*", text) if found.strip("*").strip()]
    two = [found for found in re.findall(r"\*\*[^\n*]*\*\*", text) if found[2:-2].strip()]
    return len(one) + len(two) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(re.escape(section_spliter.strip()) + r"\s?\d+", text)) >= num_sections


def _is_json(text: str) -> bool:
    """JSON, in a code fence or not; nested so deep that it is no answer counts as none."""
    body = _FENCE.sub("", text.strip()).removesuffix("```").strip()
    depth = 0
    for mark in re.findall(r"[\[{\]}]", body):
        depth += 1 if mark in "[{" else -1
        if depth > MAX_DEPTH:
            return False
    try:
        json.loads(body, parse_constant=refuse_constant)
    except ValueError:
        return False
    return True


def _title(text: str) -> bool:
    """<<a title>> within a line."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].strip("<>").strip():
            return True
    return False


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _end(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _starts_with(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Words without a small letter; a word with a hyphen is one."""
    return _compare(sum(word.isupper() for word in _WORD_WITH_MARKS.findall(text)), capital_relation, capital_frequency)


def detect_language(text: str) -> str:
    """The code of a text's language (ISO 639-1), empty where it cannot be told. NoLanguageDetector as it says."""
    detect, undetected = _load_detector()
    try:
        return detect(text[:MAX_LANGUAGE])
    except undetected:
        return ""


MAX_LANGUAGE = 5_000  # characters that are looked at: the language of a longer text is that of its beginning


@cache
def _load_detector() -> tuple[Callable[[str], str], type[Exception]]:
    try:
        import langdetect  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
    except ImportError as error:
        raise NoLanguageDetector(
            "instructions on language and case need the package langdetect: pip install langdetect"
        ) from error
    langdetect.DetectorFactory.seed = 0  # else its answer is drawn by chance
    return langdetect.detect, langdetect.LangDetectException


INSTRUCTIONS: dict[str, Instruction] = {
    "keywords:existence": Instruction(lambda t, keywords: all(_has_words(t, keywords, False)), {"keywords": list}),
    "keywords:frequency": Instruction(_keyword_frequency, {"keyword": str, "frequency": int, "relation": str}),
    "keywords:forbidden_words": Instruction(
        lambda t, forbidden_words: not any(_has_words(t, forbidden_words, True)), {"forbidden_words": list}
    ),
    "keywords:letter_frequency": Instruction(
        _letter_frequency, {"letter": str, "let_frequency": int, "let_relation": str}
    ),
    "language:response_language": Instruction(lambda t, language: detect_language(t) == language, {"language": str}),
    "length_constraints:number_sentences": Instruction(
        lambda t, num_sentences, relation: _compare(len(split_sentences(t)), relation, num_sentences),
        {"num_sentences": int, "relation": str},
    ),
    "length_constraints:number_paragraphs": Instruction(_paragraphs, {"num_paragraphs": int}),
    "length_constraints:number_words": Instruction(
        lambda t, num_words, relation: _compare(len(_WORD.findall(t)), relation, num_words),
        {"num_words": int, "relation": str},
    ),
    "length_constraints:nth_paragraph_first_word": Instruction(
        _nth_paragraph, {"num_paragraphs": int, "nth_paragraph": int, "first_word": str}
    ),
    "detectable_content:number_placeholders": Instruction(_placeholders, {"num_placeholders": int}),
    "detectable_content:postscript": Instruction(_postscript, {"postscript_marker": str}),
    "detectable_format:number_bullet_lists": Instruction(_bullets, {"num_bullets": int}),
    "detectable_format:constrained_response": Instruction(lambda t: any(one in t for one in CONSTRAINED_ANSWERS), {}),
    "detectable_format:number_highlighted_sections": Instruction(_highlights, {"num_highlights": int}),
    "detectable_format:multiple_sections": Instruction(_sections, {"section_spliter": str, "num_sections": int}),
    "detectable_format:json_format": Instruction(_is_json, {}),
    "detectable_format:title": Instruction(_title, {}),
    "combination:two_responses": Instruction(_two_responses, {}),
    "combination:repeat_prompt": Instruction(_starts_with, {"prompt_to_repeat": str}),
    "startend:end_checker": Instruction(_end, {"end_phrase": str}),
    "startend:quotation": Instruction(_is_quoted, {}),
    "change_case:capital_word_frequency": Instruction(
        _capital_words, {"capital_frequency": int, "capital_relation": str}
    ),
    "change_case:english_capital": Instruction(lambda t: t.isupper() and detect_language(t) == "en", {}),
    "change_case:english_lowercase": Instruction(lambda t: t.islower() and detect_language(t) == "en", {}),
    "punctuation:no_comma": Instruction(lambda t: "," not in t, {}),
}
