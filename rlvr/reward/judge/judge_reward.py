"""Reward `judge`: a language model scores an answer, behind an OpenAI-compatible endpoint or in this process.

    reward = resolve_reward("judge", base_url="http://127.0.0.1:8000/v1", model="my-judge", votes=3)
    reward = judge_with(model, votes=3)                 # a model that needs no endpoint, such as one in this process

The policy is paid for what the judge says, so its answer is hostile: it is sent as quoted data, and a verdict must have
a strict form (`judge_requests`). That does not stop an answer from persuading the judge: watch a verifiable reward too
(`reward.watch`). A judge that cannot be reached or replies out of form is an `error`, never a zero; an answer that a
working judge cannot judge gets 0 (`unjudgeable`).

Left out on purpose: comparing answers with each other, judging the steps of an answer, and images.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rlvr.core.chat_client import ChatClient, ChatError, Cost, Endpoint
from rlvr.core.types import Outcome, Score
from rlvr.reward.judge.judge_requests import (
    DATA,
    PLAIN,
    JudgeModel,
    JudgeQuestion,
    UnjudgeableAnswer,
    clean,
    reason_code,
)
from rlvr.reward.references import find_reference_fault
from rlvr.reward.registry import Reward, RewardSpec, register_reward
from rlvr.reward.reward_options import check_choice, check_integer, check_number, is_number
from rlvr.reward.signatures import Case

GOLD = "answer"  # the `meta` key of the reference
CAUTION = "it is another model's opinion, which a policy learns to please; watch a verifiable reward too (reward.watch)"

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
class JudgeOptions:
    """The options of `judge` that hold for any model."""

    rubric: str = RUBRIC
    scale: int = 10
    passed_at: float = 0.5
    votes: int = 1
    reference: str = "auto"
    temperature: float | None = None
    max_tokens: int = 1024
    max_answer_chars: int = 20_000

    def __post_init__(self) -> None:
        check_choice("reference", self.reference, ("auto", "required", "never"))
        check_integer("scale", self.scale, 1, 1000)
        check_integer("votes", self.votes, 1, 99)
        check_integer("max_tokens", self.max_tokens, 16, 1_000_000)
        check_integer("max_answer_chars", self.max_answer_chars, 100, 10_000_000)
        if not is_number(self.passed_at) or not 0 < self.passed_at <= 1:
            raise ValueError(f"passed_at={self.passed_at!r}, expected a share of the scale, above 0, at most 1")
        if self.temperature is not None:
            check_number("temperature", self.temperature, 0)
        if self.temperature == 0 and self.votes > 1:
            raise ValueError(f"votes={self.votes} at temperature 0 are one vote; raise temperature or drop votes")
        if not isinstance(self.rubric, str) or not self.rubric.strip():
            raise ValueError(f"rubric={self.rubric!r}, expected instructions to the judge")

    @property
    def sampling(self) -> dict[str, Any]:
        default = 0.0 if self.votes == 1 else 1.0
        return {"temperature": default if self.temperature is None else self.temperature, "max_tokens": self.max_tokens}


@dataclass(frozen=True, kw_only=True)
class EndpointJudgeOptions(JudgeOptions):
    base_url: str
    model: str
    api_key_env: str = ""
    extra_body: Mapping[str, Any] | None = None
    timeout_s: float = 60.0
    retries: int = 4
    concurrency: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        body = self.extra_body
        if body is not None and not isinstance(body, Mapping):
            raise ValueError(f"extra_body={body!r}, expected a dictionary of request fields")
        for name in {"model", "messages", "stream", "n"} & set(body or {}):
            raise ValueError(f"extra_body sets {name!r}, which the judge sets itself; `model` and `votes` are options")
        self.endpoint.check("endpoint")
        if importlib.util.find_spec("httpx2") is None:
            raise ValueError("reward 'judge' needs an HTTP client: pip install 'rlvr[judge]'")

    @property
    def endpoint(self) -> Endpoint:
        """The judge's address, model and request limits, for `ChatClient`."""
        patience = self.timeout_s, self.retries, self.concurrency
        return Endpoint(self.base_url, self.model, self.api_key_env, dict(self.extra_body or {}), *patience)


@register_reward(
    "judge",
    batched=True,
    options=EndpointJudgeOptions,
    caution=CAUTION,
    gold=GOLD,
    waits_for="network",
    is_awaited=True,
)
async def judge(cases: Sequence[Case], options: EndpointJudgeOptions) -> list[Score]:
    """A model's score for an answer, from 0 to `scale`, divided by `scale`; passed from `passed_at` on.

    POST {base_url}/chat/completions with `model` and the key from the environment variable `api_key_env`. `rubric` says
    what to look at. `votes` are asked for that many times and averaged; a majority of them must come. The reference
    answer is `meta["answer"]`, shown where there is one (`auto`), always (`required`: a task without is invalid) or
    `never`. `temperature` is 0 for one vote and 1 for several, where it is not given; `extra_body` adds fields to the
    request, and takes one away by null. An empty answer gets 0 and is not sent.

    Parts: `votes` that came, `agreement` (share of votes on the verdict's side of `passed_at`), `requests`,
    `prompt_tokens`, `completion_tokens`.
    """
    async with ChatClient(options.endpoint) as client:
        return await _Judge(options, client).score_all(cases)


def judge_with(model: JudgeModel, **options: Any) -> Reward:
    """The reward `judge` with a model that needs no endpoint, such as one in this process.

    `options` are those of `JudgeOptions`.
    """
    if unknown := sorted(options.keys() - {one.name for one in fields(JudgeOptions)}):
        raise ValueError(f"reward 'judge': {unknown[0]!r} has no effect on a judge without an endpoint; drop it")

    async def judge(cases: Sequence[Case], options: JudgeOptions) -> list[Score]:
        return await _Judge(options, model).score_all(cases)

    spec = RewardSpec(judge, batched=True, options=JudgeOptions, caution=CAUTION, gold=GOLD, is_awaited=True)
    return Reward("judge", spec, options)


class _Judge:
    """Judges the answers of one batch."""

    def __init__(self, options: JudgeOptions, model: JudgeModel) -> None:
        self.options, self.model = options, model
        self.question = JudgeQuestion(
            frozenset({"score"}), self._messages, self._read, options.max_answer_chars, options.sampling
        )

    async def score_all(self, cases: Sequence[Case]) -> list[Score]:
        return list(await asyncio.gather(*map(self.score, cases)))

    async def score(self, case: Case) -> Score:
        o, gold = self.options, (case.meta or {}).get(GOLD)
        reference = "" if gold is None or o.reference == "never" else clean(str(gold))
        if o.reference == "required" and gold in (None, ""):
            return Score(None, Outcome.INVALID, "no_gold", detail="meta['answer'] is missing, and reference='required'")
        if reference and (fault := find_reference_fault(reference, case.prompt, "meta['answer']")):
            return Score(None, Outcome.INVALID, fault.reason, detail=fault.detail)
        if not case.response.strip():
            return Score(0.0, Outcome.FAILED, "no_answer")
        task = {"question": clean(case.prompt)}
        if reference:
            task["reference"] = reference
        cost, answers = Cost(), {"answer": case.response}
        replies = await asyncio.gather(*(self.question.ask(self.model, task, answers, cost) for _ in range(o.votes)))
        verdicts = [reply for reply in replies if isinstance(reply, _Verdict)]
        failures = [reply for reply in replies if isinstance(reply, ChatError)]
        if 2 * len(verdicts) <= o.votes:
            again = await self.question.retry_or_blame(self.model, task, answers, cost, failures, reference or PLAIN)
            if isinstance(again, UnjudgeableAnswer):
                return Score(0.0, Outcome.FAILED, again.reason, {**vars(cost)}, str(again))
            if isinstance(again, ChatError):
                return Score(None, Outcome.ERROR, reason_code(again), {**vars(cost)}, str(again))
            verdicts = [again]
        value = sum(v.score for v in verdicts) / o.scale / len(verdicts)
        passed = value >= o.passed_at
        agreement = sum((v.score / o.scale >= o.passed_at) == passed for v in verdicts) / len(verdicts)
        parts = {"votes": len(verdicts), "agreement": agreement, **vars(cost)}
        outcome = Outcome.PASSED if passed else Outcome.FAILED
        return Score(value, outcome, "" if passed else "low_score", parts, detail=verdicts[0].reason)

    def _messages(self, document: str, word: str) -> list[dict[str, str]]:
        form = _FORM % (word, self.options.scale)
        return [
            {"role": "system", "content": self.options.rubric + form},
            {"role": "user", "content": document},
        ]

    def _read(self, given: dict[str, Any]) -> _Verdict:
        score, scale = given["score"], self.options.scale
        if isinstance(score, bool) or not isinstance(score, int) or not 0 <= score <= scale:
            raise ValueError(f"the score is not a whole number from 0 to {scale}")
        return _Verdict(score, str(given["reason"])[:1000])
