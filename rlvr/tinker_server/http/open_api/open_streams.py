"""Completions of the open endpoints as server-sent events: a chunk whenever a piece of text is certain.

Exercised by `python -m pytest tests/test_open_http.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlvr.engine.scheduler import SampledToken
from rlvr.tinker_server.http.open_api import open_replies as replies
from rlvr.tinker_server.http.open_api.open_sampling import OpenSampling
from rlvr.tinker_server.http.open_api.served_text import ServedText, TextStream
from rlvr.tinker_server.protocol.open_requests import ChatRequest, CompletionRequest

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


class AnswerStream:
    """The chunks of a streamed answer: `begin`, `add` for all tokens as they come, `end`. Its methods compute; call
    them on a thread, one at a time."""

    def __init__(self, body: CompletionRequest | ChatRequest, sampling: OpenSampling, text: ServedText, head: Json):
        self._count, self._text, self._head, self._sampling = body.n, text, head, sampling
        self._has_usage = body.stream_options is not None and body.stream_options.include_usage
        self._streams = {
            i: ChoiceStream(body, sampling, text, sampling.prompts[i // body.n])
            for i in range(len(sampling.prompts) * body.n)
        }

    def chunk(self, index: int, said: str, is_last: bool) -> Json | None:
        """The chunk for a piece of a choice's text; None if there is nothing to say yet."""
        raise NotImplementedError

    def begin(self) -> Iterator[Json]:
        raise NotImplementedError

    def add(self, batch: Sequence[tuple[int, SampledToken]]) -> Iterator[Json]:
        for number, sampled in batch:
            index = number * self._count + sampled.index
            stream = self._streams[index]
            said = stream.add(sampled.token, sampled.logprob, sampled.likeliest)
            is_last = stream.is_complete and not stream.is_sent
            if is_last:
                said += stream.finish()
            if (said or is_last) and (chunk := self.chunk(index, said, is_last)):
                yield chunk

    def end(self) -> Iterator[Json]:
        """The rest: every choice has one last chunk."""
        for index, stream in self._streams.items():
            if not stream.is_sent and (chunk := self.chunk(index, stream.finish(), True)):
                yield chunk
        if self._has_usage:
            spent = sum(stream.count for stream in self._streams.values())
            total = replies.usage(sum(map(len, self._sampling.prompts)), spent)
            yield self._head | {"choices": [], "usage": total}


class CompletionStream(AnswerStream):
    """`/v1/completions`."""

    def __init__(
        self,
        body: CompletionRequest,
        sampling: OpenSampling,
        prompt_texts: list[str],
        text: ServedText,
        head: Json,
        name: Callable[[int], str],
    ) -> None:
        super().__init__(body, sampling, text, head)
        self._body, self._prompt_texts, self._name = body, prompt_texts, name
        self._offsets = {i: len(prompt_texts[i // body.n]) for i in self._streams}

    def begin(self) -> Iterator[Json]:
        if self._body.echo:
            for index in self._streams:
                yield self.chunk(index, self._prompt_texts[index // self._count], False)

    def chunk(self, index: int, said: str, is_last: bool) -> Json:
        tokens, logprobs, likeliest = self._streams[index].take()
        reason = self._streams[index].reason if is_last else None
        choice: Json = {"index": index, "text": said, "finish_reason": reason, "logprobs": None}
        if self._body.logprobs is not None:
            choice["logprobs"] = replies.completion_logprobs(
                tokens, logprobs, likeliest, self._text, self._name, self._offsets[index]
            )
            self._offsets[index] += sum(len(self._text.token_text(token)) for token in tokens)
        if self._body.return_token_ids:
            choice["token_ids"] = tokens
        return self._head | {"choices": [choice]}


class ChatStream(AnswerStream):
    """`/v1/chat/completions`. With tools the text comes at once: a call is read when it is whole."""

    def __init__(self, body: ChatRequest, sampling: OpenSampling, text: ServedText, head: Json, has_tools: bool):
        super().__init__(body, sampling, text, head | {"object": "chat.completion.chunk"})
        self._body, self._has_tools = body, has_tools
        self._whole = dict.fromkeys(self._streams, "")

    def begin(self) -> Iterator[Json]:
        for index in self._streams:
            yield self._make(index, {"role": "assistant", "content": ""}, None)

    def chunk(self, index: int, said: str, is_last: bool) -> Json | None:
        self._whole[index] += said
        reason, calls = self._streams[index].reason if is_last else None, list[Any]()
        if self._has_tools:
            if not is_last:
                return None
            said, calls = self._text.tool_calls.split(self._whole[index])
            reason = "tool_calls" if calls else reason
        delta: Json = {"content": said} if said else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(replies.tool_call_fields(calls))]
        return self._make(index, delta, reason)

    def _make(self, index: int, delta: Json, reason: str | None) -> Json:
        tokens, logprobs, likeliest = self._streams[index].take()
        choice: Json = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        if self._body.logprobs and tokens:
            choice["logprobs"] = replies.chat_logprobs(tokens, logprobs, likeliest, self._text)
        if self._body.return_token_ids:
            choice["token_ids"] = tokens
        return self._head | {"choices": [choice]}
