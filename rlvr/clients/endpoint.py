"""Sampling from a model behind a text endpoint: an OpenAI-compatible one, or the plain JSON of a `/generate`.

    client = EndpointSamplingClient(text_endpoint("http://127.0.0.1:3031/generate"))
    answer = client.sample(ModelInput(client.get_tokenizer().encode("2 + 2?")), 1, SamplingParams()).result()

Such an endpoint knows no tokens of ours, so a token is a character here (`CodePointTokenizer`): the same rollout and
the same environments play over it. It gives no log-probs, and none are made up: its answers can be judged, stored and
refined, and nothing can be trained on them. Requests run on one event loop for the process (`rlvr.reward.coroutines`),
so a future can be awaited on any loop or read from any thread, and cancelling an await cancels its request. With
`is_awaited` they are tasks of the caller's own loop, and nothing changes threads.

Left out on purpose: streaming, tools, images and log-probs that some endpoints offer (of their tokens, not of ours).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import re
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from rlvr.core import rng
from rlvr.core.chat_client import ChatClient, ChatError, ChatReply, Cost, Dialect, Endpoint
from rlvr.core.futures import Future
from rlvr.core.messages import ModelInput, SampledSequence, SampleResponse, SamplingParams
from rlvr.core.types import StopReason
from rlvr.reward.coroutines import in_loop_thread, start_coroutine

T = TypeVar("T")

MARK = "\ufdd0"  # begins a message of a conversation; a noncharacter, which no text that is exchanged may hold
MOST_PER_TOKEN, LEAST_MOST = 64, 10_000  # characters of an answer for each token that was asked for; and at least
CHARACTERS_PER_TOKEN = 4  # of an estimate, where the endpoint does not count: usual for English and code
MAX_TOKENS = 1024  # by default: an endpoint's own default may be 16
# What some receivers reject: halves of surrogate pairs (no UTF-8 has them), null (PostgreSQL), noncharacters.
_UNFIT = re.compile(r"[\x00\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_UNSENDABLE = re.compile(r"[\x00\ud800-\udfff]")

# The reasons of a `ChatError` as the six codes that users of the service see.
_CODES = {
    "unreachable": "endpoint_unreachable",
    "failed": "endpoint_unreachable",
    "timeout": "endpoint_timeout",
    "rate_limited": "endpoint_rate_limited",
    "refused": "endpoint_refused",
    "redirected": "endpoint_refused",
    "rejected": "endpoint_refused",
    "bad_reply": "endpoint_bad_reply",
    "empty": "empty_answer",
    "unfinished": "empty_answer",
}


class EndpointError(RuntimeError):
    """An endpoint gave no completion, after all retries.

    `code`: endpoint_unreachable (no connection, or 5xx), endpoint_timeout, endpoint_rate_limited, endpoint_refused (the
    key, the path, the model, this prompt), endpoint_bad_reply (not the JSON it should be) or empty_answer. The message
    names the endpoint. `retry_after` is its Retry-After in seconds, 0 without one.
    """

    def __init__(self, code: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after


def text_endpoint(
    url: str,
    model: str = "",
    *,
    key_variable: str = "",
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 120.0,
    retries: int = 4,
    concurrency: int = 16,
) -> Endpoint:
    """The settings of an endpoint to sample from, checked; nothing is sent.

    With a `model` it is OpenAI-compatible, and `url` its base (`http://host/v1`); without, `url` is where the plain
    JSON goes. `body` adds fields to every request, and takes one away by null: `{"seed": None}` for an endpoint that
    refuses to be given one, `{"max_tokens": None, "max_completion_tokens": 4000}` for one that calls it so.
    """
    dialect = Dialect.CHAT if model else Dialect.PLAIN
    url = url.removesuffix("/chat/completions") if model else url
    limits = {"timeout_s": timeout_s, "retries": retries, "concurrency": concurrency}
    endpoint = Endpoint(url, model, key_variable, dict(body or {}), dialect=dialect, retry_empty=True, **limits)
    endpoint.check("endpoint")
    return endpoint


class CodePointTokenizer:
    """A tokenizer whose ids are Unicode code points: exact both ways, no vocabulary, no end token.

    A conversation is one text in which `MARK` begins every message; `parse_messages` takes it apart again.
    """

    eos_token_id: int | None = None
    eos_token: str | None = None
    chat_template = "MARK, role, line break, content"  # that there is one is all that is asked
    all_special_tokens = (MARK,)  # not to be let into a prompt by what an answer says

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(map(ord, text))

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        text = "".join(map(chr, token_ids))
        return text.replace(MARK, "") if skip_special_tokens else text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False, tokenize: bool = True
    ) -> Any:
        turns = [(m["role"], m["content"]) for m in messages] + [("assistant", "")] * add_generation_prompt
        text = "".join(f"{MARK}{role}\n{content}" for role, content in turns)
        return self.encode(text) if tokenize else text


def parse_messages(text: str) -> list[dict[str, str]]:
    """The conversation in a prompt; plain text is one message from the user."""
    plain, *marked = text.split(MARK)
    turns = [("user", plain)] if plain else []
    turns += [(role, content) for role, _, content in (turn.partition("\n") for turn in marked)]
    return [{"role": role, "content": content} for role, content in turns if content]


def format_messages(conversation: Sequence[Mapping[str, str]]) -> str:
    """A conversation as plain text, for an endpoint without messages; one user message is its content."""
    if [m["role"] for m in conversation] == ["user"]:
        return conversation[0]["content"]
    return "\n\n".join([*(f"{m['role'].capitalize()}: {m['content']}" for m in conversation), "Assistant:"])


@dataclass
class Usage:
    """What was asked and what came. `estimated` of the answers' tokens are a guess: the endpoint did not count them."""

    requests: int = 0
    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    estimated: int = 0
    seconds: float = 0.0  # of waiting for answers, retries included


@dataclass(frozen=True)
class EndpointStatus:
    """The result of the last request. `error` is None if it succeeded; `at` is in seconds since the epoch."""

    at: float
    error: EndpointError | None = None


class RequestFuture(Generic[T]):
    """A request under way: `.result()` blocks from any thread, `await` works on any event loop. One that is a task of
    its caller's loop can only be awaited there."""

    def __init__(self, running: concurrent.futures.Future[T] | asyncio.Task[T]) -> None:
        self._running = running

    def result(self, timeout: float | None = None) -> T:
        if isinstance(self._running, asyncio.Task):
            if self._running.done():
                return self._running.result()
        elif self._running.done() or not in_loop_thread():
            return self._running.result(timeout)
        raise RuntimeError(".result() would block the event loop that runs this request: await it instead")

    async def result_async(self, timeout: float | None = None) -> T:
        async with asyncio.timeout(timeout):
            return await asyncio.wrap_future(self._running)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


class EndpointSamplingClient:
    """Satisfies `rlvr.core.protocols.SamplingClient`; `view()` gives another that shares the connections and counts
    alone.

    `temperature`, unless None, replaces that of the request, so that an environment can choose it per completion.
    `status` is the result of the last request, None before the first. `is_awaited`: requests run on the event loop that
    calls `sample`, and their results can only be awaited there.
    """

    def __init__(self, endpoint: Endpoint, *, is_awaited: bool = False) -> None:
        self.endpoint, self.usage = endpoint, Usage()
        self._start = asyncio.create_task if is_awaited else start_coroutine
        self.temperature: float | None = None
        self._connection = EndpointConnection(endpoint)
        self._tokenizer = CodePointTokenizer()

    @property
    def fingerprint(self) -> str:
        """The endpoint's name for its model; the weights behind it are unknown."""
        return self.endpoint.model or self.endpoint.url

    @property
    def status(self) -> EndpointStatus | None:
        return self._connection.status

    def view(self) -> EndpointSamplingClient:
        """The same endpoint and connections, with a `usage` and a `temperature` of its own: one for each session."""
        other = object.__new__(EndpointSamplingClient)
        other.__dict__.update(vars(self), usage=Usage(), temperature=None)
        return other

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        """`num_samples` requests at once. The request is under way when this returns."""
        asked = sampling_params
        for name, off in (("top_k", -1), ("min_p", 0.0)):
            if (given := getattr(asked, name)) != off:
                raise ValueError(f"sample: {name}={given} is not supported by text endpoints; use top_p")
        if asked.top_p != 1 and self.endpoint.dialect is Dialect.PLAIN:
            raise ValueError(f"sample: top_p={asked.top_p} is not supported by plain requests; use temperature")
        if include_prompt_logprobs:
            raise ValueError("sample: a text endpoint gives no log-probs; leave include_prompt_logprobs out")
        if num_samples < 1 or not prompt.tokens:
            raise ValueError(f"sample: {num_samples} samples of {prompt.length} tokens; expected at least one of each")
        if self.temperature is not None:
            asked = replace(asked, temperature=self.temperature)
        text = _UNSENDABLE.sub("\ufffd", self._tokenizer.decode(prompt.tokens))
        return RequestFuture(self._start(self._all(text, num_samples, asked)))

    async def _all(self, text: str, count: int, asked: SamplingParams) -> SampleResponse:
        tasks = [asyncio.create_task(self._one(text, asked, i)) for i in range(count)]
        try:
            return SampleResponse(list(await asyncio.gather(*tasks)), None, self.fingerprint)
        finally:
            for task in tasks:  # after a failure or a cancellation the others are not needed
                task.cancel()

    async def _one(self, text: str, asked: SamplingParams, index: int) -> SampledSequence:
        cost, began = Cost(), time.monotonic()
        stops = _stops(asked.stop)
        try:
            reply = await self._connection.client().ask(self._request(text, asked, stops, index), cost)
        except ChatError as failure:
            error = describe_failure(failure)
            self._connection.status = EndpointStatus(time.time(), error)
            raise error from failure
        finally:
            self.usage.requests += cost.requests
            self.usage.seconds += time.monotonic() - began
        self._connection.status = EndpointStatus(time.time())
        self._count(reply, text)
        return _sequence(reply, stops, max(LEAST_MOST, MOST_PER_TOKEN * (asked.max_tokens or MAX_TOKENS)))

    def _request(self, text: str, asked: SamplingParams, stops: list[str], index: int) -> dict[str, Any]:
        common = {"max_tokens": asked.max_tokens or MAX_TOKENS, "temperature": asked.temperature}
        if self.endpoint.dialect is Dialect.PLAIN:
            return {"prompt": format_messages(parse_messages(text)), **common}
        # 31 bits: a seed is a 32-bit integer to some servers.
        seed = None if asked.seed is None else rng.key("endpoint", asked.seed, index) >> 32
        more = {"top_p": asked.top_p if asked.top_p != 1 else None, "stop": stops or None, "seed": seed}
        return {"messages": parse_messages(text), **common, **more}

    def _count(self, reply: ChatReply, text: str) -> None:
        usage = self.usage
        usage.answers += 1
        if reply.counted:
            usage.prompt_tokens += reply.prompt_tokens
            usage.completion_tokens += reply.completion_tokens
            return
        usage.prompt_tokens += math.ceil(len(text) / CHARACTERS_PER_TOKEN)
        guess = math.ceil(len(reply.text) / CHARACTERS_PER_TOKEN)
        usage.completion_tokens += guess
        usage.estimated += guess

    def ping(self) -> Future[EndpointStatus]:
        """Check that the endpoint answers, by a request without content, and set `status`."""
        return RequestFuture(self._start(self._connection.ping()))

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        raise ValueError("compute_logprobs: a text endpoint gives none; use a model here or a Tinker server")

    def get_tokenizer(self) -> CodePointTokenizer:
        return self._tokenizer

    def close(self) -> None:
        """Drop the connections, those of all views; a later request opens new ones. May be called twice."""
        self._connection.close()


class EndpointConnection:
    """The chat client of an endpoint, one for each event loop that calls (a forked process has another), and the last
    status of the endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.status: EndpointStatus | None = None
        self._loop_and_client: tuple[asyncio.AbstractEventLoop, ChatClient] | None = None
        self._lock = threading.Lock()

    def client(self) -> ChatClient:
        """The client for the running event loop; opened by the first call on a loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._loop_and_client is None or self._loop_and_client[0] is not loop:
                self._loop_and_client = loop, ChatClient(self.endpoint, remember_failure=False)
            return self._loop_and_client[1]

    async def ping(self) -> EndpointStatus:
        failure = await self.client().ping()
        self.status = EndpointStatus(time.time(), failure and describe_failure(failure))
        return self.status

    def close(self) -> None:
        with self._lock:
            held, self._loop_and_client = self._loop_and_client, None
        if held is not None and held[0].is_running():
            asyncio.run_coroutine_threadsafe(held[1].aclose(), held[0]).result(5)


def describe_failure(failure: ChatError) -> EndpointError:
    """The failure of a request as users of the sampler see it."""
    return EndpointError(_CODES[failure.reason], str(failure), failure.retry_after)


def _stops(stop: Any) -> list[str]:
    """Stop strings; a stop token is its character. None and [] are the same here: there is no end token."""
    given = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
    stops = [one if isinstance(one, str) else chr(one) for one in given if one is not None]
    if "" in stops:
        raise ValueError("sample: an empty stop string would end every answer at its first token; leave it out")
    return stops


def _sequence(reply: ChatReply, stops: list[str], most: int) -> SampledSequence:
    """The answer as characters, up to the first stop string, which stays where the endpoint left it in. An endpoint
    that gives far more than it was asked for (`most`) is cut: every list of answers would carry its megabytes."""
    text = _UNFIT.sub("\ufffd", reply.text)
    ends = [at + len(one) for one in stops if (at := text.find(one)) >= 0]
    reason = StopReason.LENGTH if reply.ended == "length" else StopReason.STOP
    if ends:
        text, reason = text[: min(ends)], StopReason.STOP
    if len(text) > most:
        text, reason = text[:most], StopReason.LENGTH
    return SampledSequence(reason, list(map(ord, text)), None, end_tokens=0)
