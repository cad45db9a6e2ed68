"""The teacher of on-policy distillation: where it is, and the client of one behind an endpoint.

    teacher = EndpointTeacher(TeacherOptions(url="http://127.0.0.1:8000/v1", name="large"))
    teacher.check(tokenizer, "model.name=small")                      # ValueError if it cannot teach this policy
    logprobs = teacher.compute_logprobs(ModelInput(tokens)).result()

An endpoint is asked for the log-probs of a prompt that it is given as token ids: `POST /completions` with `echo` and
`logprobs`, which our engine server and vLLM answer. Left out on purpose: a temperature other than 1, which no such
endpoint applies to a prompt.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from rlvr.clients.endpoint import EndpointConnection, EndpointError, RequestFuture, describe_failure
from rlvr.core import rng
from rlvr.core.chat_client import ChatError, Cost, Dialect, Endpoint
from rlvr.core.futures import Future
from rlvr.core.messages import ModelInput
from rlvr.core.registry import did_you_mean
from rlvr.core.variants import make_variant
from rlvr.reward.coroutines import start_coroutine

PROBES = 64  # tokens by which two tokenizers are compared


@dataclass(frozen=True)
class TeacherOptions:
    """The teacher of `algorithm.teacher_coef`: `model` or `url`, and those `for_tasks`.

    `model` is a run, one of its checkpoints, a model folder, an adapter or a hub name, loaded into this process beside
    the policy. `url` is the base of an API with `/completions` (http://127.0.0.1:8000/v1) whose model is called `name`
    there; the variable `api_key_env` holds its key. A call may take `timeout_s` and is tried again up to `retries`
    times; at most `concurrency` are in flight.

    `for_tasks` are other teachers for some tasks, `{code: runs/coder, math: {url: ..., name: ...}}`: by the value that
    a task has under `task_key` in its `meta` (or by its `level`) a `model`, or the keys of this section. Without a
    `model` or `url` for the others every task needs one.
    """

    model: str | None = None
    url: str | None = None
    name: str | None = None
    api_key_env: str | None = None
    timeout_s: float = 120.0
    retries: int = 4
    concurrency: int = 16
    task_key: str = "source"
    for_tasks: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        _ = self.of_values
        if self.model and self.url:
            raise ValueError(f"teacher: model={self.model!r} and url={self.url!r} are both given; give one of them")
        if bool(self.url) != bool(self.name):
            raise ValueError(
                f"teacher: url={self.url!r} and name={self.name!r} belong together: the base of the API, such as "
                "http://127.0.0.1:8000/v1, and the model's name there"
            )
        if self.url:
            self.endpoint.check("teacher")

    @cached_property
    def of_values(self) -> dict[str, TeacherOptions]:
        """The teachers for some tasks, by the value that these have under `task_key`."""
        return {str(value): _read_other(str(value), given) for value, given in self.for_tasks.items()}

    @property
    def is_given(self) -> bool:
        """Whether these options name a teacher for all tasks, or for tasks without a teacher of their own."""
        return bool(self.model or self.url)

    @property
    def every(self) -> list[TeacherOptions]:
        """This teacher, if it is given, and the teachers for some tasks."""
        return [*([self] if self.is_given else []), *self.of_values.values()]

    @property
    def weights_source(self) -> str:
        """Where the teacher's weights are; equal for two entries that name the same weights."""
        if self.url:
            return f"{self.name} at {self.url}"
        path = Path(self.model or "").expanduser()
        return str(path.resolve()) if path.exists() else str(self.model)

    def __str__(self) -> str:
        return f"{self.name} at {self.url}" if self.url else str(self.model)

    @property
    def endpoint(self) -> Endpoint:
        limits = {"timeout_s": self.timeout_s, "retries": self.retries, "concurrency": self.concurrency}
        url, name = str(self.url), str(self.name)
        return Endpoint(url, name, self.api_key_env or "", dialect=Dialect.COMPLETIONS, **limits)


def _read_other(value: str, given: Any) -> TeacherOptions:
    """The teacher that an entry of `teacher.for_tasks` names."""
    key = f"teacher.for_tasks.{value}"
    options = {"model": given} if isinstance(given, str) else given
    known = [one.name for one in fields(TeacherOptions) if one.name not in ("task_key", "for_tasks")]
    if not isinstance(options, dict) or not options:
        raise ValueError(f"{key}={given!r}: expected a model, or its keys: {', '.join(known)}")
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{key} has no key {unknown[0]!r}{did_you_mean(unknown[0], known)}; known: {', '.join(known)}")
    try:
        teacher = make_variant(key, TeacherOptions, options)
    except ValueError as error:
        raise ValueError(str(error).replace("teacher: ", f"{key}: ", 1)) from None
    if not teacher.is_given:
        raise ValueError(f"{key}={given!r} names no teacher; give model, or url and name")
    return teacher


class EndpointTeacher:
    """Log-probs of given tokens under a model behind an endpoint."""

    def __init__(self, options: TeacherOptions) -> None:
        self.options = options
        self._connection = EndpointConnection(options.endpoint)

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        """The log-prob of every token given those before it, [P] in nats; None for the first."""
        if temperature != 1.0:
            raise ValueError(
                f"rollout.temperature={temperature:g} with the teacher {self.options}: an endpoint scores a prompt at "
                "temperature 1; use rollout.temperature=1, or a teacher in this process (teacher.model)"
            )
        return RequestFuture(start_coroutine(self._score(prompt.to_ints())))

    async def _score(self, tokens: list[int]) -> list[float | None]:
        return [None, *(logprob for _, logprob in (await self._ask(tokens))[1:])]

    async def _ask(self, tokens: list[int]) -> list[tuple[str, float]]:
        """The text and the log-prob of every token; the first has 0."""
        client = self._connection.client()
        request = {"prompt": tokens, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 1.0}
        where, count = client.where, len(tokens)
        try:
            return await client.fetch(request, lambda body: read_prompt(body, count, where), Cost())
        except ChatError as failure:
            raise describe_failure(failure) from failure

    def close(self) -> None:
        """Drop the connections; a later request opens new ones."""
        self._connection.close()

    def check(self, tokenizer: Any, policy: str) -> None:
        """ValueError if the endpoint gives no log-probs, or its model reads tokens as other texts than `tokenizer`.

        `policy` names the model whose tokenizer it is.
        """
        last = len(tokenizer) - 1
        drawn = (rng.integer(last + 1, rng.key("teacher"), i) for i in range(PROBES))
        tokens = sorted({0, last, *drawn})
        try:
            theirs = RequestFuture(start_coroutine(self._ask(tokens))).result()
        except EndpointError as error:
            raise ValueError(
                f"teacher {self.options} cannot score tokens (it was sent {len(tokens)} of the policy's tokenizer as a "
                f"trial): {error}"
            ) from error
        for token, (text, _) in zip(tokens, theirs, strict=True):
            own = tokenizer.decode([token], skip_special_tokens=False)
            if own.isascii() and own.strip() != text.strip():
                raise ValueError(describe_difference(f"teacher {self.options}", policy, text, token, own))


def read_prompt(body: bytes, count: int, where: str) -> list[tuple[str, float]] | ChatError:
    """The text and the log-prob of the first `count` tokens of an answer; an error that says what is missing."""
    try:
        found = json.loads(body)["choices"][0]["logprobs"]
        texts, logprobs = found["tokens"][:count], found["token_logprobs"][:count]
    except (ValueError, LookupError, TypeError, AttributeError):
        return ChatError("refused", f"{where} sent no log-probs of a prompt (echo=true, logprobs=0)")
    known = [0.0, *logprobs[1:]]
    if len(texts) != count or len(known) != count or not all(map(_is_logprob, known)):
        return ChatError("refused", f"{where} sent no log-prob of each of the {count} tokens of a prompt")
    return list(zip(map(str, texts), map(float, known), strict=True))


def _is_logprob(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value <= 1e-3


def check_same_tokens(ours: Any, theirs: Any, other: str, policy: str) -> None:
    """ValueError if a token of the policy's tokenizer is another one, or none, of that of the model `other`."""
    known = {number: text for text, number in theirs.get_vocab().items()}
    for number, text in sorted((number, text) for text, number in ours.get_vocab().items()):
        if known.get(number) != text:
            raise ValueError(describe_difference(other, policy, known.get(number), number, text))


def describe_difference(other: str, policy: str, theirs: str | None, token: int, ours: str) -> str:
    return (
        f"{other} has another tokenizer than the policy ({policy}): token {token} is {theirs!r} there and {ours!r} for "
        "the policy, so the same tokens are not the same text; use a model of the same family"
    )
