"""Rules that an answer follows (1.0) or breaks (0.0): `regex`, `json_schema`, `length` and two on words.

They say nothing about whether an answer is right: use them as parts of a `composite`, or to check instructions about
form. Patterns and schemas run in guarded workers (`rlvr.reward.text.guarded_rules`). Texts over 100,000 characters
break every rule about their content (`too_large`).

Left out on purpose: rules on meaning, and on languages.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from rlvr.core.types import Outcome, Score
from rlvr.reward.registry import register_reward
from rlvr.reward.reward_options import check_choice, check_integer, check_number, is_list
from rlvr.reward.signatures import Case
from rlvr.reward.text.form import count_of
from rlvr.reward.text.guarded_rules import MAX_CHARS, WARM_SECONDS, GuardedRule, rule_score
from rlvr.reward.text.pattern import MAX_SECONDS, SECONDS, check_pattern, match_pattern

if TYPE_CHECKING:
    from rlvr.sandbox import Worker

CHECK_SECONDS = 5.0  # that a schema may take to be checked by a warm worker
MAX_WORDS, MAX_WORD = 1_000, 1_000  # of a list; characters of one


@dataclass(frozen=True)
class RegexOptions:
    pattern: str
    match: str = "search"
    expect: str = "match"
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        check_choice("expect", self.expect, ("match", "no_match"))
        check_pattern(self.pattern, self.match, self.seconds)


@register_reward("regex", batched=True, options=RegexOptions)
def regex(cases: Sequence[Case], options: RegexOptions) -> list[Score]:
    """1.0 if Python's `re` finds `pattern` in the response, else 0.0; with `expect="no_match"` the other way round.

    `match="full"` asks that the whole response matches. `(?i)`, `(?s)` and the like stand at the start of the pattern.
    An answer has `seconds`. Reasons: `no_match`, `match`, `timeout`, `memory`, `too_large`; of the pattern, which fails
    on the task's reference too: `rule_timeout`, `rule_failed`.
    """
    wanted = options.expect == "match"
    broken = rule_score("no_match" if wanted else "match")
    return match_pattern(cases, options, lambda fits: rule_score() if fits == wanted else broken)


@dataclass(frozen=True)
class JsonSchemaOptions:
    schema: Mapping[str, Any]
    part: str = "whole"
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        check_choice("part", self.part, ("whole", "code_block"))
        check_number("seconds", self.seconds, 0, MAX_SECONDS, above=True)
        if not isinstance(self.schema, Mapping) or not self.schema:
            given = str(self.schema)[:200]
            raise ValueError(f"schema={given!r}, expected a JSON schema as a dictionary, not empty")
        try:
            text = json.dumps(self.schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not JSON ({error})") from error
        if importlib.util.find_spec("jsonschema") is None:
            raise ValueError("jsonschema is not installed: pip install 'rlvr[rules]'")
        # A schema may refer to itself in more ways than there is time for: first whether the worker works at all.
        (reply,) = _validating_worker().map(_schema_setup('{"type": "object"}'), [None], WARM_SECONDS)
        if not reply.failure:
            (reply,) = _validating_worker().map(_schema_setup(text), [None], CHECK_SECONDS)
        if reply.failure:
            raise ValueError(f"the schema could not be checked: {reply.failure}: {reply.detail}")
        if reply.value:
            raise ValueError(f"the schema cannot be used: {reply.value['detail']}")


@register_reward("json_schema", batched=True, options=JsonSchemaOptions)
def json_schema(cases: Sequence[Case], options: JsonSchemaOptions) -> list[Score]:
    """1.0 if the response is JSON that `schema` allows, else 0.0. Checked by `jsonschema`, the draft as `$schema` says.

    `part="whole"`: nothing else may stand in the response but white space; `code_block`: its last fenced block is
    judged. No NaN, nested at most 100 deep, no number beyond a float or of more than 300 digits. `format` counts where
    the library can check it (date, email, ipv4, uuid, ...). `$ref` stays inside the schema: nothing is fetched. An
    answer has `seconds`. Reasons: `no_answer` (no block), `wrong_format` (no JSON), `wrong_schema`, `timeout`,
    `memory`, `too_large`.
    """
    responses = [case.response for case in cases]
    texts = [r if options.part == "whole" or len(r) > MAX_CHARS else _last_block(r) for r in responses]
    setup, blocks = _schema_setup(json.dumps(options.schema)), [text for text in texts if text is not None]
    rule = GuardedRule(
        _validating_worker(),
        setup,
        options.seconds,
        lambda value: rule_score(value.get("problem", ""), value.get("detail", "")),
    )
    scores = iter(rule.score(blocks))
    no_block = rule_score("no_answer", "no closed code block")
    return [no_block if text is None else next(scores) for text in texts]


def _schema_setup(schema: str) -> dict[str, Any]:
    return {"schema": schema, "paths": [path for path in sys.path if os.path.isabs(path)]}


@cache
def _validating_worker() -> Worker:
    from rlvr.sandbox import Worker  # only where a schema is used

    return Worker("rlvr.reward.text.json_schema")


def _last_block(text: str) -> str | None:
    """The text of the last closed fenced block; None where there is none."""
    end = text.rfind("\n```")
    start = text.rfind("```", 0, end) if end >= 0 else -1
    if start < 0 or (start and text[start - 1] != "\n"):
        return None
    return text[start:end].partition("\n")[2]


@dataclass(frozen=True)
class LengthOptions:
    at_least: int | None = None
    at_most: int | None = None
    unit: str = "words"

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, ("words", "characters", "lines", "tokens"))
        for name, bound in (("at_least", self.at_least), ("at_most", self.at_most)):
            if bound is not None:
                check_integer(name, bound, 0)
        if self.at_least is None and self.at_most is None:
            raise ValueError("no bound is given; expected at_least, at_most, or both")
        if self.at_most is not None and (self.at_least or 0) > self.at_most:
            raise ValueError(f"at_least={self.at_least} is above at_most={self.at_most}; no answer could follow that")


@register_reward("length", options=LengthOptions)
def length(case: Case, options: LengthOptions) -> Score:
    """1.0 if the response has from `at_least` to `at_most` words, characters, lines or tokens, both included, else 0.0.

    Words are split at white space; lines are those that are not blank; tokens are those that the policy sampled; text
    alone has no tokens to count (`invalid`). Reasons: `too_short`, `too_long`; the detail has the count and the bounds.
    Part: `length`.
    """
    response = case.response
    if options.unit == "tokens":
        if response and not case.tokens:
            return Score(None, Outcome.INVALID, "no_tokens", detail="length in tokens needs the tokens, not text alone")
        count = case.num_sampled
    elif options.unit == "lines":
        count = sum(bool(line.strip()) for line in response.splitlines())
    else:
        count = len(response) if options.unit == "characters" else len(response.split())
    short, long = count < (options.at_least or 0), options.at_most is not None and count > options.at_most
    reason = "too_short" if short else "too_long" if long else ""
    bounds = {"at least": options.at_least, "at most": options.at_most}
    expected = " and ".join(f"{word} {bound:,}" for word, bound in bounds.items() if bound is not None)
    detail = f"{count_of(count, options.unit)}, expected {expected}" if reason else ""
    return rule_score(reason, detail, parts={"length": count})


@dataclass(frozen=True)
class WordsOptions:
    words: Sequence[str]
    match: str = "word"
    case: str = "ignore"

    def __post_init__(self) -> None:
        check_choice("match", self.match, ("word", "anywhere"))
        check_choice("case", self.case, ("ignore", "same"))
        if not is_list(self.words) or not all(isinstance(w, str) and _plain(w, self.case).strip() for w in self.words):
            given = f"{self.words!r:.200}"
            raise ValueError(f"words={given}, expected a non-empty list of words or phrases (a number in quotes)")
        if len(self.words) > MAX_WORDS or any(len(word) > MAX_WORD for word in self.words):
            raise ValueError(f"words: expected at most {MAX_WORDS:,}, of at most {MAX_WORD:,} characters each")

    def split(self, text: str) -> tuple[list[str], list[str]]:
        """Split the words of the option into those that the text has and those that it lacks."""
        text = " ".join(_plain(text, self.case).split())
        has = [_occurs(text, " ".join(_plain(word, self.case).split()), self.match) for word in self.words]
        pairs = list(zip(self.words, has, strict=True))
        return [word for word, there in pairs if there], [word for word, there in pairs if not there]


@register_reward("required_words", options=WordsOptions)
def required_words(case: Case, options: WordsOptions) -> Score:
    """1.0 if every one of `words` stands in the response, else 0.0 (`missing_word`). Part: `found`, their share.

    A word may be a phrase; any white space between its words counts as one space. `match="word"`: no letter, digit or
    underscore may touch it; `anywhere`: inside longer words too. `case="same"` tells capitals from small letters.
    Letters that Unicode calls compatible are the same, and invisible characters are ignored.
    """
    if len(case.response) > MAX_CHARS:
        return rule_score("too_large")
    _, missing = options.split(case.response)
    parts = {"found": 1 - len(missing) / len(options.words)}
    return rule_score("missing_word" if missing else "", ", ".join(missing)[:300], parts=parts)


@register_reward("forbidden_words", options=WordsOptions)
def forbidden_words(case: Case, options: WordsOptions) -> Score:
    """1.0 if none of `words` stands in the response, else 0.0 (`forbidden_word`). Part: `found`, the share that does.

    Options as in `required_words`. An empty response passes; letters of other alphabets that look the same are not
    recognised.
    """
    if len(case.response) > MAX_CHARS:
        return rule_score("too_large")
    used, _ = options.split(case.response)
    parts = {"found": len(used) / len(options.words)}
    return rule_score("forbidden_word" if used else "", ", ".join(used)[:300], parts=parts)


def _occurs(text: str, word: str, match: str) -> bool:
    at = text.find(word)
    while at >= 0:
        end = at + len(word)
        before, after = text[at - 1 : at] if at else "", text[end : end + 1]
        touched = (_is_word(word[0]) and _is_word(before)) or (_is_word(word[-1]) and _is_word(after))
        if match == "anywhere" or not touched:
            return True
        if not _is_word(word[0]):
            at = text.find(word, at + 1)
        elif gap := _GAP.search(text, at):  # up to there a letter would touch it; one step each would take for ever
            at = text.find(word, gap.end())
        else:
            return False
    return False


_GAP = re.compile(r"\W")  # `\w` is what `_is_word` says


def _is_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


# Characters without a glyph: joiners, direction marks, fillers, variation selectors.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u202a-\u202e"
    "\u2060-\u2064\u206a-\u206f\ufe00-\ufe0f\ufeff]"
)


def _plain(text: str, case: str) -> str:
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    return text.casefold() if case == "ignore" else text
