"""From what a request says of its task to what verifies the answers: a `Task`, and the `Blend` that judges it.

| the request has | what judges | what only watches |
|---|---|---|
| `verifiers` | these, by their weights | |
| `tests` | `code`, in the sandbox | `draft`, and `judge` where one is set up |
| `answer` | `math` | the same |
| a prompt that the generator's environment knows | the environment's reward | `judge` where one is set up |
| neither | `draft` by .3 and `judge` by .7 where one is set up, else `draft` | |

A request names verifiers by their registered names and sets the options of `OPTIONS` alone: no path to code, no URL and
no key comes from outside, and a judge is the one that the service's settings name. What watches has no say in the
confidence; it is there so that the verifiers without knowledge of the truth can be measured against those that have it
(`verifier_accuracy`). Exercised by `python -m pytest tests/test_service_verification.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlvr.registry import nearest
from rlvr.reward import Reward, resolve_reward
from rlvr.reward.blend import Blend
from rlvr.reward.code import Problem
from rlvr.reward.feedback import Feedback
from rlvr.reward.judge import judged_by
from rlvr.reward.registry import known_rewards
from rlvr.service.loop.local_judge import LocalJudge
from rlvr.service.options import Request
from rlvr.service.settings import TextEndpoint
from rlvr.types import Outcome, Task

# What a request may set of each verifier. Those that are not listed take no options from outside.
OPTIONS: Mapping[str, frozenset[str]] = {
    name: frozenset(options.split())
    for name, options in {
        "code": "partial",
        "combined": "boxed_weight correct_weight",
        "exact_match": "ignore_case",
        "forbidden_words": "words match case",
        "format_compliance": "required_format pattern match",
        "json_schema": "schema part",
        "judge": "rubric scale passed_at reference",
        "keyword_contains": "keywords mode",
        "length": "at_least at_most unit",
        "length_penalty": "target_length penalty_per_token",
        "math": "extract on_many_boxes percent decimals units",
        "regex": "pattern match expect",
        "repetition": "words at_most",
        "required_words": "words match case",
    }.items()
}
RULES_WEIGHT, JUDGE_WEIGHT = 0.3, 0.7  # where nothing but form and an opinion is to be had
HERE = ("localhost", "127.0.0.1", "::1")
NESTED = ("composite",)  # names further rewards in its options: give these as `verifiers` with their weights
ELSEWHERE = ("environment", "first_attempt", "grader")  # judge by what no session has: a run's episode, a configuration
MODULAR = ("boxed", "combined", "correct")  # judge arithmetic modulo a number, which the generator's environment brings

Judge = TextEndpoint | LocalJudge  # who is asked for an opinion: a model behind a URL, or one in this process


@dataclass(frozen=True)
class Case:
    """What a session works on. `opinions` are the labels of verifiers that do not know what is right;
    `self_judging`: the judge is the model that answers."""

    task: Task
    blend: Blend
    opinions: frozenset[str] = frozenset()
    self_judging: bool = False


def named_verifier(name: str, options: Mapping[str, Any], judge: Judge = TextEndpoint()) -> Reward:
    """The verifier that a request names; ValueError for a name or an option that no request may give."""
    known = [one for one in known_rewards() if one not in (*NESTED, *ELSEWHERE)]
    if name not in known:
        more = "; give its parts as verifiers with weights" if name in NESTED else ""
        raise ValueError(
            f"verifier {name!r} is unknown here{nearest(name, known)}{more}; known: {', '.join(sorted(known))}"
        )
    allowed = OPTIONS.get(name, frozenset())
    if refused := sorted(set(options) - allowed):
        takes = ", ".join(sorted(allowed)) or "no options"
        raise ValueError(f"verifier {name!r}: the option {refused[0]!r} cannot be set by a request; it takes {takes}")
    return judge_of(judge, options) if name == "judge" else resolve_reward(name, **options)


def judge_of(judge: Judge, options: Mapping[str, Any] | None = None) -> Reward:
    """The judge that the settings name."""
    if not judge or not judge.model:
        raise ValueError(
            "verifier 'judge': no judge is set up here; the service's JUDGE_MODEL names one, alone (a model's folder "
            "or hub name) or with JUDGE_ENDPOINT (OpenAI-compatible, such as http://127.0.0.1:8000/v1)"
        )
    if isinstance(judge, LocalJudge):
        return judged_by(judge, **(options or {}))
    base = judge.endpoint.removesuffix("/").removesuffix("/chat/completions")
    return resolve_reward("judge", base_url=base, model=judge.model, api_key_env=judge.key_variable, **(options or {}))


def case_of(
    request: Request,
    *,
    judge: Judge = TextEndpoint(),
    generator: TextEndpoint | str = "",
    posed: Task | None = None,
    known: str = "",
) -> Case:
    """The task and its verifiers; ValueError for what cannot be verified as it is asked.

    `generator` is who answers: an endpoint, or what the settings call the model in this process.
    `posed` is the task that the generator's own environment made of the prompt, judged by its reward `known` where the
    request names no verifier and brings no tests; an `answer` of the request takes the place of the task's own.
    """
    meta: dict[str, Any] = {}
    if request.tests:
        row = {"tests": list(request.tests), "statement": request.prompt, "setup": request.setup}
        meta |= Problem.of(row | ({"entry_point": request.entry_point} if request.entry_point else {})).row()
    if request.answer is not None:
        meta["answer"] = request.answer
    task = Task(request.task_id, request.prompt, meta)
    if posed is not None:
        task = Task(request.task_id, posed.prompt, {**posed.meta, **meta})
    verifiers = _verifiers(request, judge, known if posed is not None and not request.tests else "")
    for reward, _ in verifiers:
        needs = "tests" if reward.name == "code" else reward.entry.gold * reward.entry.computes
        if needs and _lacks(task.meta, needs):
            raise ValueError(f"verifier {reward.name!r} compares with `{needs}`, and the request has none; give it")
        if reward.name in MODULAR and _lacks(task.meta, "modulus"):
            raise ValueError(
                f"verifier {reward.name!r} judges tasks of the arithmetic environment, and this is none of the "
                "generator's; use `math` with an `answer`"
            )
    blend = Blend(verifiers)
    opinions = frozenset(
        label for label, (reward, _) in zip(blend.names, verifiers, strict=True) if not reward.entry.computes
    )
    judged = any(reward.name == "judge" for reward, _ in verifiers)
    return Case(task, blend, opinions, judged and same_model(judge, generator))


def _lacks(meta: Mapping[str, Any], key: str) -> bool:
    return meta.get(key) is None or not str(meta[key]).strip()


def _verifiers(request: Request, judge: Judge, known: str) -> list[tuple[Reward, float]]:
    if request.verifiers:
        return [(named_verifier(name, options, judge), weight) for name, weight, options in request.verifiers]
    truth = ["code"] if request.tests else []
    truth += [known] if known else ["math"] if request.answer is not None else []
    opinion = judge_of(judge) if judge and judge.model else None
    if not truth:
        rules = resolve_reward("draft")
        return [(rules, 1.0)] if opinion is None else [(rules, RULES_WEIGHT), (opinion, JUDGE_WEIGHT)]
    # What an environment's own model says is short and no prose: rules on form would only object to that.
    watching = [*([] if known else [resolve_reward("draft")]), *([] if opinion is None else [opinion])]
    return [*((resolve_reward(name), 1.0) for name in truth), *((reward, 0.0) for reward in watching)]


def same_model(one: Judge, other: TextEndpoint | str) -> bool:
    """Whether the two are one model, as far as their addresses or folders tell."""
    if not one or not other:
        return False
    if isinstance(one, LocalJudge):
        return isinstance(other, str) and _folder(one.model) == _folder(other)
    if isinstance(other, str):
        return False
    return _place(one) == _place(other) and (not one.model or not other.model or one.model == other.model)


def _folder(model: str) -> Path:
    """A hub name is one folder too, here or not."""
    return Path(model).expanduser().resolve()


def _place(endpoint: TextEndpoint) -> tuple[str, int]:
    """The host, by one name where it is this machine, and the port, said or not."""
    at = urlsplit(endpoint.endpoint)
    host = at.hostname or ""
    return "localhost" if host in HERE else host, at.port or (443 if at.scheme == "https" else 80)


@dataclass(frozen=True)
class Accuracy:
    """The share of checks in which an opinion agreed with the truth, on passed or not."""

    share: float
    count: int


def accuracy(feedbacks: Iterable[Feedback], opinions: Collection[str]) -> Accuracy | None:
    """How often the verifiers that compute nothing agree with the truth; None where none is known.

    `opinions` are their labels (`Case.opinions`); each pair of an opinion and a truth is one check.
    """
    agreed = [
        (score.outcome is Outcome.PASSED) == feedback.truth
        for feedback in feedbacks
        if feedback.truth is not None
        for label, score in feedback.scores.items()
        if label in opinions and score.value is not None
    ]
    return Accuracy(sum(agreed) / len(agreed), len(agreed)) if agreed else None
