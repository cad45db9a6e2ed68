"""Rewards on the form of a text: keywords, length, format, and their weighted mean. Each docstring is the formula.

Checks in this process take linear time; a user's regular expression runs in a guarded worker (`rlvr.sandbox`).
Keywords, lengths and formats are easy to satisfy without being right: they shape, they do not verify.
`python -m pytest tests/test_reward_text.py tests/test_sandbox_regex.py` exercises it.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from rlvr.reward.options import is_list, is_number, one_of
from rlvr.reward.pattern import NO_WORKER, SECONDS, check_pattern, matcher
from rlvr.reward.registry import Reward, Waits, register_reward, resolve_reward
from rlvr.reward.signatures import Case
from rlvr.types import Outcome, Score, Trajectory

MAX_CHARS = 100_000  # a longer text complies with no format
MAX_DEPTH = 100  # of JSON; Python's parser goes no deeper than its caller's stack leaves room for
Meta = dict[str, Any] | None


def _keywords(keywords: Sequence[str], mode: str = "any") -> dict[str, Any]:
    one_of("reward 'keyword_contains': mode", mode, ("any", "all"))
    if not is_list(keywords) or not all(isinstance(k, str) and k for k in keywords):
        raise ValueError(
            f"reward 'keyword_contains': keywords={str(keywords)[:200]}, expected a non-empty list of words "
            "(a number in quotes)"
        )
    return {"keywords": [k.lower() for k in keywords], "mode": mode}


@register_reward("keyword_contains", prepare=_keywords)
def keyword_contains(
    prompt: str, response: str, meta: Meta = None, *, keywords: Sequence[str], mode: str = "any"
) -> float:
    """1.0 if the response contains any (`mode="any"`) or all (`mode="all"`) of the keywords, else -0.5.

    A keyword is found anywhere in the response, inside longer words too ("key" in "monkey"), and may hold spaces; upper
    and lower case are the same (both are compared in lower case). The prompt does not count. Passed at 1.0.
    """
    text = response.lower()
    return 1.0 if (any if mode == "any" else all)(k in text for k in keywords) else -0.5


def _length(target_length: int = 50, penalty_per_token: float = 0.01) -> dict[str, Any]:
    if isinstance(target_length, bool) or not isinstance(target_length, int) or target_length < 0:
        raise ValueError(f"reward 'length_penalty': target_length={target_length!r}, expected an integer, at least 0")
    if not is_number(penalty_per_token) or not 0 <= penalty_per_token < math.inf:
        raise ValueError(
            f"reward 'length_penalty': penalty_per_token={penalty_per_token!r}, expected a finite number, at least 0"
        )
    return {"target_length": target_length, "penalty_per_token": penalty_per_token}


@register_reward("length_penalty", passed_at=0.0, prepare=_length)
def length_penalty(
    prompt: str, response: str, meta: Meta = None, *, target_length: int = 50, penalty_per_token: float = 0.01
) -> float:
    """max(-1, 1 - penalty_per_token * |n - target_length|) with n the response's words, split at white space.

    A token is such a word here, whatever the model's tokenizer makes of it; the prompt does not count. 1.0 at the
    target, `penalty_per_token` less for each word more or fewer, never below -1.0. Passed where it is not negative.
    """
    return max(-1.0, 1.0 - penalty_per_token * abs(len(response.split()) - target_length))


def _format(
    required_format: str, pattern: str | None = None, match: str | None = None, seconds: float | None = None
) -> dict[str, Any]:
    """The options that were given, checked."""
    one_of("reward 'format_compliance': required_format", required_format, [*sorted(_FORMATS), "regex"])
    options = {"pattern": pattern, "match": match, "seconds": seconds}
    given = {name: value for name, value in options.items() if value is not None}
    if required_format != "regex":
        for name in given:
            raise ValueError(
                f"reward 'format_compliance': {name} has no effect with required_format={required_format!r}; leave it "
                "out, or set required_format to 'regex'"
            )
        return {"required_format": required_format}
    check_pattern(
        "reward 'format_compliance'",
        pattern,
        "full" if match is None else match,
        SECONDS if seconds is None else seconds,
    )
    return {"required_format": required_format, **given}


@register_reward("format_compliance", batched=True, prepare=_format)
def format_compliance(
    prompts: Sequence[str],
    responses: Sequence[str],
    metas: Sequence[Meta] | None = None,
    *,
    required_format: str,
    pattern: str | None = None,
    match: str = "full",
    seconds: float = SECONDS,
) -> list[Score]:
    """1.0 if the whole response has the format, else 0.0; over 100,000 characters nothing has.

    `json`: one JSON object or array and nothing else but white space (no code fence, no NaN), nested at most
    100 deep.
    `numbered_list`: at least half of the lines that are not blank are items `1. text` or `1) text`, and the items are
    numbered 1, 2, 3, ... in order.
    `regex`: Python's `re` matches `pattern` to the whole response, nothing stripped (`match="full"`), or to some part
    of it (`match="search"`). `.` matches no end of line unless the pattern begins with `(?s)`; `(?i)` ignores case.

    Patterns run in a guarded process. An answer on which one needs more than `seconds` or too much memory is judged
    neither way: it is an error (`regex_timeout`, `regex_failed`), for the pattern is the verifier's, not the answer's.
    `seconds` covers compiling the pattern, too. Once 20 answers of a batch in a row were late, the rest of the batch
    is not tried and gets the same error, which a training run's error budget then counts.
    """
    if required_format != "regex":
        return [_verdict(len(r) <= MAX_CHARS and _FORMATS[required_format](r)) for r in responses]
    fitting = [r for r in responses if len(r) <= MAX_CHARS]
    replies = iter(matcher().map({"pattern": pattern, "match": match}, fitting, seconds))
    scores: list[Score] = []
    for response in responses:
        if len(response) > MAX_CHARS:
            scores.append(_verdict(False))
        elif not (reply := next(replies)).failure:
            scores.append(_verdict(reply.value["fits"]))
        else:
            reason = "regex_timeout" if reply.failure == "timeout" else "regex_failed"
            what = f"pattern {str(pattern)[:200]!r} on an answer of {len(response):,} characters: {reply.detail}"
            detail = NO_WORKER + reply.detail if reply.failure == "not_started" else what + _REMEDY
            scores.append(Score(None, Outcome.ERROR, reason, detail=detail))
    return scores


_REMEDY = (
    "; where one repeat stands in another, as in (a+)+, every way to split a text is tried: write a+ or a possessive "
    "(a++)+ instead, or raise `seconds`"
)


def _verdict(fits: bool) -> Score:
    return Score(1.0, Outcome.PASSED) if fits else Score(0.0, Outcome.FAILED, "wrong_format")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_MARK = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


def _is_deep(text: str) -> bool:
    """Whether brackets outside strings stand more than MAX_DEPTH deep, up to where the text stops being JSON."""
    depth, quoted = 0, False
    for mark in _MARK.findall(text):
        if mark == '"':
            quoted = not quoted
        elif not quoted and mark in ("[", "{"):
            depth += 1
            if depth > MAX_DEPTH:
                return True
        elif not quoted and mark in ("]", "}"):
            depth -= 1
    return False


def _is_json(text: str) -> bool:
    if _is_deep(text):
        return False
    try:  # Numbers stay text: no digit string, however long, becomes an integer.
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except ValueError:  # a RecursionError is the caller's, whose stack is nearly full, and no verdict
        return False
    return isinstance(value, (dict, list))


_ITEM = re.compile(r"\s*([0-9]{1,6})[.)]\s+\S")


def _is_numbered_list(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    items = [int(found[1]) for found in map(_ITEM.match, lines) if found]
    return bool(items) and 2 * len(items) >= len(lines) and items == list(range(1, len(items) + 1))


_FORMATS = {"json": _is_json, "numbered_list": _is_numbered_list}


def _parts(rewards: Any) -> dict[str, Any]:
    return {"rewards": weighted("reward 'composite'", rewards)}


def weighted(what: str, rewards: Any) -> list[tuple[str, float, Reward]]:
    """[(label, weight, reward)] of a list of {name, weight = 1, kwargs = {}}; `what` stands in errors."""
    if not is_list(rewards):
        raise ValueError(f"{what}: rewards={rewards!r}, expected a list of {{name, weight, kwargs}}")
    resolved: list[tuple[str, float, Reward]] = []
    for i, part in enumerate(rewards, 1):
        where = f"{what}, part {i}"
        if not isinstance(part, Mapping) or "name" not in part:
            raise ValueError(
                f"{where}: {part!r}, expected a dictionary {{name, weight, kwargs}}, at least {{'name': 'boxed'}}"
            )
        for key in part:
            one_of(f"{where}: key", key, ("name", "weight", "kwargs"))
        weight = part.get("weight", 1.0)
        if not is_number(weight) or not 0 <= weight < math.inf:
            raise ValueError(
                f"{where} ({part['name']}): weight={weight!r}, expected a finite number, at least 0, without quotes"
            )
        kwargs = part.get("kwargs") or {}
        if not isinstance(kwargs, Mapping):
            raise ValueError(f"{where} ({part['name']}): kwargs={kwargs!r}, expected a dictionary")
        try:
            reward = resolve_reward(part["name"], **kwargs)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        twins = sum(label.partition("#")[0] == reward.name for label, _, _ in resolved)
        resolved.append((f"{reward.name}#{twins + 1}" if twins else reward.name, float(weight), reward))
    if not 0 < math.fsum(weight for _, weight, _ in resolved) < math.inf:
        raise ValueError(f"{what}: the weights sum to 0, or to no finite number; one at least must count")
    return resolved


def _start_parts(rewards: Sequence[tuple[str, float, Reward]]) -> None:
    for _, _, reward in rewards:
        reward.start()


_alone = threading.Lock()  # a composite that waits is asked by several threads; of its parts only those that wait are


def _slowest(rewards: Sequence[tuple[str, float, Reward]]) -> Waits:
    waits = {reward.waits for _, _, reward in rewards}
    return "processes" if "processes" in waits else "network" if "network" in waits else ""


@register_reward("composite", batched=True, prepare=_parts, start=_start_parts, waits=_slowest)
def composite(
    prompts: Sequence[str],
    responses: Sequence[str],
    metas: Sequence[Meta] | None = None,
    trajectories: Sequence[Trajectory | None] | None = None,
    *,
    rewards: Sequence[Any],
) -> list[Score]:
    """sum(weight_i * value_i) / sum(weight_i) over `rewards`, a list of {name, weight = 1, kwargs = {}}.

    A name is a registered one, a path `package.module:function` or a function; weights are numbers from 0 and need not
    sum to 1. Each part gets all answers at once, where it can judge lists.

    Passed where every part of a weight above 0 passed; else the outcome and reason are those of the first that did
    not. A part that is an error or invalid makes the whole so, whatever its weight: none is left out of the mean.
    Parts: the value of each by name (`name#2` for the second of a name).
    """
    nothing = [None] * len(responses)
    cases = [Case(*case) for case in zip(prompts, responses, metas or nothing, trajectories or nothing, strict=True)]
    # One answer alone is judged so that what a part raises reaches the caller, as in any direct call.
    columns: list[list[Score]] = []
    threads = bool(_slowest(rewards))
    for _, _, reward in rewards:
        with _alone if threads and not reward.waits else nullcontext():
            columns.append([reward.judge(case) for case in cases] if len(cases) == 1 else reward.judge_all(cases))
    return [
        _mean([(label, weight, score) for (label, weight, _), score in zip(rewards, row, strict=True)])
        for row in zip(*columns, strict=True)
    ]


def _mean(scores: Sequence[tuple[str, float, Score]]) -> Score:
    """The verdict of a composite from those of its parts."""
    counted = [(label, weight, score) for label, weight, score in scores if weight > 0]
    parts = {label: score.value for label, _, score in scores if score.value is not None}
    for label, _, score in scores:
        if score.value is None:
            return Score(None, score.outcome, score.reason, parts, f"part {label}: {score.detail}")
    value = math.fsum(weight * (score.value or 0.0) for _, weight, score in counted)
    value /= math.fsum(weight for _, weight, _ in counted)
    missed = next(((label, score) for label, _, score in counted if score.outcome is not Outcome.PASSED), None)
    if missed is None:
        return Score(value, Outcome.PASSED, parts=parts)
    return Score(value, missed[1].outcome, missed[1].reason or missed[0], parts)
