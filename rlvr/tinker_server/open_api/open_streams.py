"""Completions of the open endpoints as server-sent events: a chunk whenever a piece of text is certain.

Exercised by `python -m pytest tests/test_open_http.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from rlvr.tinker_server.open_api import open_replies as replies
from rlvr.tinker_server.open_api.open_requests import ChatRequest, CompletionRequest
from rlvr.tinker_server.open_api.open_sampling import OpenSampling
from rlvr.tinker_server.open_api.served_text import ServedText, TextStream

Json = dict[str, Any]


class ChoiceStream:
    """One completion: its text so far, and the tokens that no chunk has named yet."""

    def __init__(
        self, body: CompletionRequest | ChatRequest, sampling: OpenSampling, text: ServedText, prompt: list[int]
    ) -> None:
        self._pieces = TextStream(text, body.stop_strings, body.skip_special_tokens)
        self._ends = (frozenset() if body.ignore_eos else sampling.end_tokens) | frozenset(body.stop_token_ids or ())
        room = sampling.context - len(prompt)
        self._limit = room if body.limit is None else min(body.limit, room)
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._likeliest: list[Any] = []
        self.count, self.reason, self.is_sent = 0, "length", False

    def add(self, token: int, logprob: float, likeliest: Any) -> str:
        """The text that is certain with this token."""
        self.count += 1
        self._tokens.append(token)
        self._logprobs.append(logprob)
        self._likeliest.append(likeliest)
        if token in self._ends:
            self.reason = "stop"
            return ""
        said = self._pieces.add(token)
        if self._pieces.is_stopped:
            self.reason = "stop"
        return said

    @property
    def is_complete(self) -> bool:
        return self.reason == "stop" or self.count == self._limit

    def finish(self) -> str:
        """The rest of the text. A stop string may end in it, or in the text of a special token, which is not shown."""
        self.is_sent = True
        said = self._pieces.finish()
        if self._pieces.is_stopped or self.count < self._limit:
            self.reason = "stop"
        return said

    def take(self) -> tuple[list[int], list[float], list[Any]]:
        """The tokens since the last call, with their log-probs and the likeliest ones."""
        taken = self._tokens, self._logprobs, self._likeliest
        self._tokens, self._logprobs, self._likeliest = [], [], []
        return taken


async def _events(
    sampling: OpenSampling, streams: dict[int, ChoiceStream], count: int
) -> AsyncIterator[tuple[int, str, bool]]:
    """(choice, text, whether it is the last) of each piece; every choice has one last piece."""
    async for number, sampled in sampling.stream():
        index = number * count + sampled.index
        stream = streams[index]
        said = stream.add(sampled.token, sampled.logprob, sampled.likeliest)
        if stream.is_complete and not stream.is_sent:
            yield index, said + stream.finish(), True
        elif said:
            yield index, said, False
    for index, stream in streams.items():
        if not stream.is_sent:
            yield index, stream.finish(), True


def _usage_chunk(
    body: CompletionRequest | ChatRequest, sampling: OpenSampling, head: Json, streams: dict[int, ChoiceStream]
) -> Iterator[Json]:
    if body.stream_options and body.stream_options.include_usage:
        spent = sum(stream.count for stream in streams.values())
        yield head | {"choices": [], "usage": replies.usage(sum(map(len, sampling.prompts)), spent)}


async def stream_completions(
    body: CompletionRequest,
    sampling: OpenSampling,
    prompt_texts: list[str],
    text: ServedText,
    head: Json,
    name: Callable[[int], str],
) -> AsyncIterator[Json]:
    """The chunks of `/v1/completions`."""
    streams = {
        i: ChoiceStream(body, sampling, text, sampling.prompts[i // body.n])
        for i in range(len(sampling.prompts) * body.n)
    }
    offsets = {i: len(prompt_texts[i // body.n]) for i in streams}

    def chunk(index: int, said: str, reason: str | None) -> Json:
        tokens, logprobs, likeliest = streams[index].take()
        choice: Json = {"index": index, "text": said, "finish_reason": reason, "logprobs": None}
        if body.logprobs is not None:
            choice["logprobs"] = replies.completion_logprobs(tokens, logprobs, likeliest, text, name, offsets[index])
            offsets[index] += sum(len(text.token_text(token)) for token in tokens)
        if body.return_token_ids:
            choice["token_ids"] = tokens
        return head | {"choices": [choice]}

    if body.echo:
        for index in streams:
            yield chunk(index, prompt_texts[index // body.n], None)
    async for index, said, is_last in _events(sampling, streams, body.n):
        yield chunk(index, said, streams[index].reason if is_last else None)
    for last in _usage_chunk(body, sampling, head, streams):
        yield last


async def stream_chat(
    body: ChatRequest, sampling: OpenSampling, text: ServedText, head: Json, has_tools: bool
) -> AsyncIterator[Json]:
    """The chunks of `/v1/chat/completions`. With tools the text comes at once: a call is read when it is whole."""
    head = head | {"object": "chat.completion.chunk"}
    streams = {i: ChoiceStream(body, sampling, text, sampling.prompts[0]) for i in range(body.n)}
    whole = dict.fromkeys(streams, "")

    def chunk(index: int, delta: Json, reason: str | None = None) -> Json:
        tokens, logprobs, likeliest = streams[index].take()
        choice: Json = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        if body.logprobs and tokens:
            choice["logprobs"] = replies.chat_logprobs(tokens, logprobs, likeliest, text)
        if body.return_token_ids:
            choice["token_ids"] = tokens
        return head | {"choices": [choice]}

    for index in streams:
        yield chunk(index, {"role": "assistant", "content": ""})
    async for index, said, is_last in _events(sampling, streams, body.n):
        whole[index] += said
        reason, calls = streams[index].reason if is_last else None, list[Any]()
        if has_tools:
            if not is_last:
                continue
            said, calls = text.tool_calls.split(whole[index])
            reason = "tool_calls" if calls else reason
        delta: Json = {"content": said} if said else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(replies.tool_call_fields(calls))]
        yield chunk(index, delta, reason)
    for last in _usage_chunk(body, sampling, head, streams):
        yield last
