"""Rules an answer keeps (1.0) or not (0.0): `regex`, `json_schema`, `length`, `required_words`, `forbidden_words`.

They say nothing about whether an answer is right: use them as parts of a `composite`, or to check instructions about
form. Patterns and schemas run in guarded workers. An answer on which one runs out of time or memory, and does so again
in a worker that has just done the same for a plain item, has not kept the rule (`timeout`, `memory`): were it an
`error`, whoever writes such answers would never be told that they are wrong. Texts over 100,000 characters keep no rule
about their content (`too_large`).

Left out on purpose: rules on meaning, and on languages. `python -m pytest tests/test_reward_rules.py` exercises it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from rlvr.reward.options import is_list, one_of
from rlvr.reward.pattern import SECONDS, check_pattern, check_seconds, matcher
from rlvr.reward.registry import register_reward
from rlvr.reward.text import MAX_CHARS
from rlvr.types import Outcome, Score, Trajectory

if TYPE_CHECKING:
    from rlvr.sandbox import Reply, Worker

Meta = dict[str, Any] | None
WARM_SECONDS = 30.0  # that a fresh worker may take to load what it needs, on a busy machine
CHECK_SECONDS = 5.0  # that a schema may take to be checked by a warm one
MAX_WORDS, MAX_WORD = 1_000, 1_000  # of a list; characters of one


def _kept(reason: str = "", detail: str = "") -> Score:
    return Score(float(not reason), Outcome.FAILED if reason else Outcome.PASSED, reason, detail=detail)


def _guarded(
    worker: Worker, setup: dict[str, Any], texts: Sequence[str], seconds: float, read: Callable[[Any], Score]
) -> list[Score]:
    """One score per text by `read` of what the worker's job returns; see the top of this file for failures."""
    from rlvr.sandbox.worker import LATE_IN_A_ROW

    replies = iter(worker.map(setup, [text for text in texts if len(text) <= MAX_CHARS], seconds))
    scores: list[Score] = []
    late = 0
    for text in texts:
        if len(text) > MAX_CHARS:
            scores.append(_kept("too_large"))
            continue
        reply = next(replies)
        if not reply.failure:
            late = 0
            scores.append(read(reply.value))
        elif reply.failure == "not_started":
            scores.append(Score(None, Outcome.ERROR, "no_worker", detail=f"could not start the worker: {reply.detail}"))
        elif late == LATE_IN_A_ROW:  # the worker gave up on the rest of the batch: nobody has looked at these
            scores.append(Score(None, Outcome.ERROR, "not_run", detail=reply.detail))
        else:
            late += reply.failure == "timeout"
            scores.append(_again(worker, setup, text, seconds, read))
    return scores


def _again(worker: Worker, setup: dict[str, Any], text: str, seconds: float, read: Callable[[Any], Score]) -> Score:
    """A text that failed, once more, behind an item that any worker can do: where that fails too, blame the machine."""
    (warm,) = worker.map(setup, [None], WARM_SECONDS)
    if warm.failure:
        return Score(None, Outcome.ERROR, "worker_failed", detail=f"{warm.failure}: {warm.detail}")
    (reply,) = worker.map(setup, [text], seconds)
    return _blamed(reply) if reply.failure else read(reply.value)


def _blamed(reply: Reply) -> Score:
    if reply.failure == "timeout":
        return Score(0.0, Outcome.TIMEOUT, "timeout", detail=reply.detail)
    return _kept("memory" if reply.failure == "died" else "unjudgeable", f"{reply.failure}: {reply.detail}")


def _regex(pattern: str, match: str = "search", expect: str = "match", seconds: float = SECONDS) -> dict[str, Any]:
    one_of("reward 'regex': expect", expect, ("match", "no_match"))
    check_pattern("reward 'regex'", pattern, match, seconds)
    return {"pattern": pattern, "match": match, "expect": expect, "seconds": seconds}


@register_reward("regex", batched=True, prepare=_regex)
def regex(
    prompts: Sequence[str],
    responses: Sequence[str],
    metas: Sequence[Meta] | None = None,
    *,
    pattern: str,
    match: str = "search",
    expect: str = "match",
    seconds: float = SECONDS,
) -> list[Score]:
    """1.0 if Python's `re` finds `pattern` in the response, else 0.0; with `expect="no_match"` the other way round.

    `match="full"` asks that the whole response matches. `(?i)`, `(?s)` and the like stand at the start of the pattern.
    An answer has `seconds`. Reasons: `no_match`, `match`, `timeout`, `memory`, `too_large`.
    """
    wanted = expect == "match"
    setup = {"pattern": pattern, "match": match}
    missed = "no_match" if wanted else "match"
    return _guarded(
        matcher(), setup, responses, seconds, lambda value: _kept("" if value["fits"] == wanted else missed)
    )


def _json_schema(schema: Mapping[str, Any], part: str = "whole", seconds: float = SECONDS) -> dict[str, Any]:
    what = "reward 'json_schema'"
    one_of(f"{what}: part", part, ("whole", "code_block"))
    check_seconds(what, seconds)
    if not isinstance(schema, Mapping) or not schema:
        raise ValueError(f"{what}: schema={str(schema)[:200]!r}, expected a JSON schema as a dictionary, not empty")
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}: the schema is not JSON ({error})") from error
    if importlib.util.find_spec("jsonschema") is None:
        raise ValueError(f"{what} needs jsonschema: pip install 'rlvr[rules]'")
    # A schema may refer to itself in more ways than there is time for: first whether the worker works at all.
    (reply,) = _validating().map(_setup('{"type": "object"}'), [None], WARM_SECONDS)
    if not reply.failure:
        (reply,) = _validating().map(_setup(text), [None], CHECK_SECONDS)
    if reply.failure:
        raise ValueError(f"{what}: the schema could not be checked: {reply.failure}: {reply.detail}")
    if reply.value:
        raise ValueError(f"{what}: the schema cannot be used: {reply.value['detail']}")
    return {"schema": json.loads(text), "part": part, "seconds": seconds}


@register_reward("json_schema", batched=True, prepare=_json_schema)
def json_schema(
    prompts: Sequence[str],
    responses: Sequence[str],
    metas: Sequence[Meta] | None = None,
    *,
    schema: Mapping[str, Any],
    part: str = "whole",
    seconds: float = SECONDS,
) -> list[Score]:
    """1.0 if the response is JSON that `schema` allows, else 0.0. Checked by `jsonschema`, the draft as `$schema` says.

    `part="whole"`: nothing else may stand in the response but white space; `code_block`: its last fenced block is
    judged. No NaN, nested at most 100 deep, no number beyond a float or of more than 300 digits. `format` counts where
    the library can check it (date, email, ipv4, uuid, ...). `$ref` stays inside the schema: nothing is fetched. An
    answer has `seconds`. Reasons: `no_answer` (no block), `wrong_format` (no JSON), `wrong_schema`, `timeout`,
    `memory`, `too_large`.
    """
    texts = [r if part == "whole" or len(r) > MAX_CHARS else _last_block(r) for r in responses]
    scores = iter(
        _guarded(
            _validating(), _setup(json.dumps(schema)), [t for t in texts if t is not None], seconds,
            lambda value: _kept(value.get("problem", ""), value.get("detail", "")),
        )
    )  # fmt: skip
    return [_kept("no_answer") if text is None else next(scores) for text in texts]


def _setup(schema: str) -> dict[str, Any]:
    return {"schema": schema, "paths": [path for path in sys.path if os.path.isabs(path)]}


@cache
def _validating() -> Worker:
    from rlvr.sandbox import Worker  # only where a schema is used

    return Worker("rlvr.reward.schema")


def _last_block(text: str) -> str | None:
    """What stands in the last fenced block, None where there is none that is closed."""
    end = text.rfind("\n```")
    start = text.rfind("```", 0, end) if end >= 0 else -1
    if start < 0 or (start and text[start - 1] != "\n"):
        return None
    return text[start:end].partition("\n")[2]


_UNITS = ("words", "characters", "lines", "tokens")


def _length(at_least: int | None = None, at_most: int | None = None, unit: str = "words") -> dict[str, Any]:
    one_of("reward 'length': unit", unit, _UNITS)
    for name, bound in (("at_least", at_least), ("at_most", at_most)):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int) or bound < 0):
            raise ValueError(f"reward 'length': {name}={bound!r}, expected a whole number, at least 0")
    if at_least is None and at_most is None:
        raise ValueError("reward 'length' needs at_least, at_most, or both")
    if at_least is not None and at_most is not None and at_least > at_most:
        raise ValueError(f"reward 'length': at_least={at_least} is above at_most={at_most}; no answer could keep that")
    return {"at_least": at_least, "at_most": at_most, "unit": unit}


@register_reward("length", prepare=_length)
def length(
    prompt: str,
    response: str,
    meta: Meta = None,
    trajectory: Trajectory | None = None,
    *,
    at_least: int | None = None,
    at_most: int | None = None,
    unit: str = "words",
) -> Score:
    """1.0 if the response has from `at_least` to `at_most` words, characters, lines or tokens, both included, else 0.0.

    Words are split at white space; lines are those that are not blank; tokens are those that the policy sampled, and
    on text alone there are none to count (`invalid`). Reasons: `too_short`, `too_long`. Part: `length`.
    """
    if unit == "tokens":
        if trajectory is None or (response and not trajectory.response_tokens):
            return Score(None, Outcome.INVALID, "no_tokens", detail="length in tokens needs the tokens, not text alone")
        count = trajectory.num_action_tokens
    elif unit == "lines":
        count = sum(bool(line.strip()) for line in response.splitlines())
    else:
        count = len(response) if unit == "characters" else len(response.split())
    short, long = count < (at_least or 0), at_most is not None and count > at_most
    reason = "too_short" if short else "too_long" if long else ""
    return Score(float(not reason), Outcome.FAILED if reason else Outcome.PASSED, reason, {"length": count})


def _words(words: Sequence[str], match: str = "word", case: str = "ignore") -> dict[str, Any]:
    one_of("match", match, ("word", "anywhere"))
    one_of("case", case, ("ignore", "same"))
    if not is_list(words) or not all(isinstance(w, str) and _plain(w, case).strip() for w in words):
        given = f"{words!r:.200}"
        raise ValueError(f"words={given}, expected a non-empty list of words or phrases (a number in quotes)")
    if len(words) > MAX_WORDS or any(len(word) > MAX_WORD for word in words):
        raise ValueError(f"expected at most {MAX_WORDS:,} words, of at most {MAX_WORD:,} characters each")
    return {"words": list(words), "match": match, "case": case}


def _prepare_words(name: str) -> Callable[..., dict[str, Any]]:
    def prepare(**given: Any) -> dict[str, Any]:
        try:
            return _words(**given)
        except ValueError as error:
            raise ValueError(f"reward {name!r}: {error}") from error

    return prepare


@register_reward("required_words", prepare=_prepare_words("required_words"))
def required_words(
    prompt: str, response: str, meta: Meta = None, *, words: Sequence[str], match: str = "word", case: str = "ignore"
) -> Score:
    """1.0 if every one of `words` stands in the response, else 0.0 (`missing_word`). Part: `found`, their share.

    A word may be a phrase; any white space between its words counts as one space. `match="word"`: no letter, digit or
    underscore may touch it; `anywhere`: inside longer words too. `case="same"` tells capitals from small letters.
    Letters that Unicode calls compatible are the same, and invisible characters are nothing.
    """
    if len(response) > MAX_CHARS:
        return _kept("too_large")
    missing = [word for word, there in _found(response, words, match, case) if not there]
    reason = "missing_word" if missing else ""
    parts = {"found": 1 - len(missing) / len(words)}
    outcome = Outcome.FAILED if missing else Outcome.PASSED
    return Score(float(not missing), outcome, reason, parts, ", ".join(missing)[:300])


@register_reward("forbidden_words", prepare=_prepare_words("forbidden_words"))
def forbidden_words(
    prompt: str, response: str, meta: Meta = None, *, words: Sequence[str], match: str = "word", case: str = "ignore"
) -> Score:
    """1.0 if none of `words` stands in the response, else 0.0 (`forbidden_word`). Part: `found`, the share that does.

    Options as in `required_words`. An empty response keeps this rule; letters of other alphabets that only look alike
    are not seen through.
    """
    if len(response) > MAX_CHARS:
        return _kept("too_large")
    used = [word for word, there in _found(response, words, match, case) if there]
    parts = {"found": len(used) / len(words)}
    outcome = Outcome.FAILED if used else Outcome.PASSED
    return Score(float(not used), outcome, "forbidden_word" if used else "", parts, ", ".join(used)[:300])


def _found(text: str, words: Sequence[str], match: str, case: str) -> list[tuple[str, bool]]:
    text = " ".join(_plain(text, case).split())
    return [(word, _stands(text, " ".join(_plain(word, case).split()), match)) for word in words]


def _stands(text: str, word: str, match: str) -> bool:
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
