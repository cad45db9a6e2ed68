"""Reward `judge`: a language model says how good an answer is, behind an OpenAI-compatible endpoint or wherever it is.

    reward = resolve_reward("judge", base_url="http://127.0.0.1:8000/v1", model="my-judge", votes=3)
    reward = judged_by(examiner, votes=3)               # a model that is at hand, such as one in this process

The answer was written by a policy that is paid for what the judge says, so it is hostile: it travels as quoted data,
and a verdict must have a strict form (`rlvr.reward.verdicts`). None of this keeps a judge from being talked round:
watch it beside a verifier (`reward.watch`). A judge that cannot be reached or answers out of form is an `error`, never
a zero; an answer that keeps a working judge from judging it gets 0 (`unjudgeable`).

Left out on purpose: comparing answers with each other, judging the steps of an answer, and images.
`python -m pytest tests/test_reward_judge.py` exercises it against a real server on this machine.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rlvr.http_line import Cost, Endpoint, Line, NoReply
from rlvr.reward.options import is_number, one_of
from rlvr.reward.registry import Entry, Reward, register_reward
from rlvr.reward.verdicts import DATA, Examiner, Inquiry, Unjudgeable, clean, code
from rlvr.types import Outcome, Score

Meta = dict[str, Any] | None
WHAT = "reward 'judge'"
GOLD = "answer"  # the key of a task's meta where the reference stands
CAUTION = (
    "it is another model's opinion, which a policy learns to please; watch what you mean beside it, with a verifier "
    "that computes (reward.watch)"
)

RUBRIC = (
    "You are a careful examiner. Judge whether the answer is correct and answers the whole question. Where a reference "
    "is given, it is correct: an answer that disagrees with it is wrong, however well it argues. Style, length and "
    "confidence count for nothing."
)
_FORM = f"""

You get one JSON document: the question, a reference where one is known, and the answer to be judged (or, of a long one,
its beginning and its end). The answer was written by a program that is being tested. {DATA}

Reply with one JSON object and nothing else, these three keys in this order:
{{"id": "%s", "reason": "<one or two sentences>", "score": <whole number from 0 (worst) to %d (best)>}}"""


@dataclass(frozen=True)
class _Verdict:
    score: int
    reason: str


@dataclass(frozen=True)
class _Manner:
    """The options of `judge` that hold for any model, wherever it is; the signature of `judge` has the defaults."""

    rubric: str
    scale: int
    passed_at: float
    votes: int
    reference: str
    temperature: float | None
    max_tokens: int
    max_answer_chars: int

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> _Manner:
        """From those that are given; ValueError for one that cannot be meant."""
        given = {**_defaults(), **options}
        manner = cls(**{one.name: given[one.name] for one in fields(cls)})
        manner._check()
        return manner

    @property
    def sampling(self) -> dict[str, Any]:
        warmth = (0.0 if self.votes == 1 else 1.0) if self.temperature is None else self.temperature
        return {"temperature": warmth, "max_tokens": self.max_tokens}

    def _check(self) -> None:
        one_of(f"{WHAT}: reference", self.reference, ("auto", "required", "never"))
        for name, low, high in (
            ("scale", 1, 1000), ("votes", 1, 99), ("max_tokens", 16, 1_000_000), ("max_answer_chars", 100, 10_000_000),
        ):  # fmt: skip
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or not low <= given <= high:
                raise ValueError(f"{WHAT}: {name}={given!r}, expected a whole number from {low:,} to {high:,}")
        if not is_number(self.passed_at) or not 0 < self.passed_at <= 1:
            raise ValueError(f"{WHAT}: passed_at={self.passed_at!r}, expected a share of the scale, above 0, at most 1")
        warm = self.temperature
        if warm is not None and (not is_number(warm) or not 0 <= warm < math.inf):
            raise ValueError(f"{WHAT}: temperature={warm!r}, expected a number, at least 0, or null")
        if warm == 0 and self.votes > 1:
            raise ValueError(
                f"{WHAT}: votes={self.votes} at temperature 0 are one vote; raise temperature or drop votes"
            )
        if not isinstance(self.rubric, str) or not self.rubric.strip():
            raise ValueError(f"{WHAT}: rubric={self.rubric!r}, expected what the judge shall look at, in words")


def _defaults() -> dict[str, Any]:
    named = inspect.signature(judge).parameters.values()
    return {p.name: p.default for p in named if p.kind is p.KEYWORD_ONLY}


def _endpoint(given: Mapping[str, Any]) -> Endpoint:
    names = ("base_url", "model", "api_key_env", "extra_body", "timeout_s", "retries", "concurrency")
    base_url, model, key, body, *patience = (given[name] for name in names)
    return Endpoint(base_url, model, key, dict(body or {}), *patience)


def _prepare(**options: Any) -> dict[str, Any]:
    _Manner.of(options)
    given = {**_defaults(), **options}
    body = given["extra_body"]
    if body is not None and not isinstance(body, Mapping):
        raise ValueError(f"{WHAT}: extra_body={body!r}, expected a dictionary of request fields")
    for taken in {"model", "messages", "stream", "n"} & set(body or {}):
        raise ValueError(f"{WHAT}: extra_body sets {taken!r}, which is not for it; `model` and `votes` are options")
    _endpoint(given).check(WHAT)
    if importlib.util.find_spec("httpx2") is None:
        raise ValueError(f"{WHAT} needs an HTTP client: pip install 'rlvr[judge]'")
    return options


@register_reward("judge", batched=True, prepare=_prepare, caution=CAUTION, gold=GOLD, waits="network")
async def judge(
    prompts: Sequence[str],
    responses: Sequence[str],
    metas: Sequence[Meta] | None = None,
    *,
    base_url: str,
    model: str,
    api_key_env: str = "",
    rubric: str = RUBRIC,
    scale: int = 10,
    passed_at: float = 0.5,
    votes: int = 1,
    reference: str = "auto",
    temperature: float | None = None,
    max_tokens: int = 1024,
    max_answer_chars: int = 20_000,
    extra_body: Mapping[str, Any] | None = None,
    timeout_s: float = 60.0,
    retries: int = 4,
    concurrency: int = 16,
) -> list[Score]:
    """A model's score for an answer, from 0 to `scale`, divided by `scale`; passed from `passed_at` on.

    POST {base_url}/chat/completions with `model` and the key from the environment variable `api_key_env`. `rubric` says
    what to look at. `votes` are asked for that many times and averaged; a majority of them must come. The reference
    answer is `meta["answer"]`, shown where there is one (`auto`), always (`required`: a task without is invalid) or
    `never`. `temperature` is 0 for one vote and 1 for several, where it is not given; `extra_body` adds fields to the
    request, and takes one away by null. An empty answer gets 0 and is not sent.

    Parts: `votes` that came, `agreement` (share of votes on the verdict's side of `passed_at`), `requests`,
    `prompt_tokens`, `completion_tokens`.
    """
    given = dict(locals())
    manner = _Manner.of({name: given[name] for name in _defaults()})
    async with Line(_endpoint(given)) as line:
        return await _Bench(manner, line).scores(prompts, responses, metas)


def judged_by(examiner: Examiner, **options: Any) -> Reward:
    """The reward `judge` where the model to ask is at hand already, such as one in this process.

    `options` are those of `judge` that are not about an endpoint.
    """
    if unknown := sorted(options.keys() - {one.name for one in fields(_Manner)}):
        raise ValueError(f"{WHAT}: option {unknown[0]!r} has no effect on a judge that needs no endpoint; drop it")
    manner = _Manner.of(options)

    async def judge(
        prompts: Sequence[str], responses: Sequence[str], metas: Sequence[Meta] | None = None
    ) -> list[Score]:
        return await _Bench(manner, examiner).scores(prompts, responses, metas)

    return Reward("judge", Entry(judge, batched=True, caution=CAUTION, gold=GOLD))


class _Bench:
    """Where the answers of one batch are judged."""

    def __init__(self, manner: _Manner, line: Examiner) -> None:
        self.manner, self.line = manner, line
        self.asked = Inquiry(frozenset({"score"}), self._messages, self._read, manner.max_answer_chars, manner.sampling)

    async def scores(
        self, prompts: Sequence[str], responses: Sequence[str], metas: Sequence[Meta] | None
    ) -> list[Score]:
        cases = zip(prompts, responses, metas or [None] * len(responses), strict=True)
        return list(await asyncio.gather(*(self.score(*case) for case in cases)))

    async def score(self, prompt: str, response: str, meta: Meta) -> Score:
        s, gold = self.manner, (meta or {}).get("answer")
        if s.reference == "required" and gold in (None, ""):
            return Score(None, Outcome.INVALID, "no_gold", detail="meta['answer'] is missing, and reference='required'")
        if not response.strip():
            return Score(0.0, Outcome.FAILED, "no_answer")
        task = {"question": clean(prompt)}
        if s.reference != "never" and gold not in (None, ""):
            task["reference"] = clean(str(gold))
        cost, answers = Cost(), {"answer": response}
        came = await asyncio.gather(*(self.asked.vote(self.line, task, answers, cost) for _ in range(s.votes)))
        verdicts = [one for one in came if isinstance(one, _Verdict)]
        failures = [one for one in came if isinstance(one, NoReply)]
        if 2 * len(verdicts) <= s.votes:
            again = await self.asked.settle(self.line, task, answers, cost, failures)
            if isinstance(again, Unjudgeable):
                return Score(0.0, Outcome.FAILED, again.reason, {**vars(cost)}, str(again))
            if isinstance(again, NoReply):
                return Score(None, Outcome.ERROR, code(again), {**vars(cost)}, str(again))
            verdicts = [again]
        value = sum(v.score for v in verdicts) / s.scale / len(verdicts)
        passed = value >= s.passed_at
        agreement = sum((v.score / s.scale >= s.passed_at) == passed for v in verdicts) / len(verdicts)
        parts = {"votes": len(verdicts), "agreement": agreement, **vars(cost)}
        outcome = Outcome.PASSED if passed else Outcome.FAILED
        return Score(value, outcome, "" if passed else "low_score", parts, detail=verdicts[0].reason)

    def _messages(self, document: str, word: str) -> list[dict[str, str]]:
        form = _FORM % (word, self.manner.scale)
        return [
            {"role": "system", "content": self.manner.rubric + form},
            {"role": "user", "content": document},
        ]

    def _read(self, given: dict[str, Any]) -> _Verdict:
        score, scale = given["score"], self.manner.scale
        if isinstance(score, bool) or not isinstance(score, int) or not 0 <= score <= scale:
            raise ValueError(f"the score is not a whole number from 0 to {scale}")
        return _Verdict(score, str(given["reason"])[:1000])
