"""The answers of the open endpoints, as plain dictionaries: whole, or as chunks whenever a piece of text is certain.

Log-probs are those of the Tinker side: at the request's temperature, before top_p, top_k and min_p; at temperature 0,
and of prompts, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlvr.chat.dialects.chat_completions import write_calls, write_chunk, write_end
from rlvr.chat.dialects.forms import ChatAnswer, ChatRequest, Json
from rlvr.chat.dialects.openai_fields import LEAST_LOGPROB
from rlvr.core.messages import SampledSequence
from rlvr.core.types import StopReason
from rlvr.engine.scheduler import SampledToken
from rlvr.tinker_server.http.open_api.open_sampling import OpenSampling
from rlvr.tinker_server.http.open_api.served_text import ServedText, TextStream, cut_stops
from rlvr.tinker_server.protocol.open_requests import CompletionRequest, OpenChatRequest

Likeliest = Sequence[tuple[int, float]]
TokenName = Callable[[int], str]


def answer_tokens(sequence: SampledSequence) -> list[int]:
    """The tokens that are text: without the stop token at the end."""
    return sequence.tokens[: len(sequence.tokens) - (sequence.end_tokens or 0)]


def answer_text(sequence: SampledSequence, text: ServedText, stops: Sequence[str], skip_special: bool) -> str:
    return cut_stops(text.decode(answer_tokens(sequence), skip_special=skip_special), stops)


def completion_logprobs(
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    likeliest: Sequence[Likeliest | None] | None,
    text: ServedText,
    name: TokenName,
    offset: int = 0,
) -> dict[str, Any]:
    """`logprobs` of `/v1/completions`; `offset` is where the first token begins in the text."""
    tops = likeliest or [None] * len(tokens)
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(text.token_text(token))
    return {
        "tokens": [name(token) for token in tokens],
        "token_logprobs": [None if logprob is None else max(logprob, LEAST_LOGPROB) for logprob in logprobs],
        "top_logprobs": [
            None if logprob is None else name_likeliest(token, logprob, top or (), name)
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ],
        "text_offset": offsets,
    }


def name_likeliest(token: int, logprob: float, top: Likeliest, name: TokenName) -> dict[str, float]:
    """The log-probs of the likeliest tokens and of `token`. Where two have one name, as parts of a character have, the
    other one's is its id: a client that looks for the greedy token compares names."""
    named: dict[str, float] = {}
    for one, value in top:
        word = name(one)
        if one != token and (word in named or word == name(token)):
            word = f"token_id:{one}"
        named[word] = max(value, LEAST_LOGPROB)
    return {**named, name(token): max(logprob, LEAST_LOGPROB)}


def make_chat_answer(
    call: ChatRequest, prompt: list[int], sequence: SampledSequence, text: ServedText, skip_special: bool = True
) -> ChatAnswer:
    """A completion as its dialect writes it."""
    whole = text.decode(answer_tokens(sequence), skip_special=skip_special and not call.tools)
    said = cut_stops(whole, call.stop)
    stop = next((stop for stop in call.stop if whole.startswith(stop, len(said))), None)
    message = text.read_message(said, call, skip_special)
    ended = "length" if sequence.stop_reason == StopReason.LENGTH else "stop"
    answer = ChatAnswer(
        message, "tool_calls" if message.get("tool_calls") else ended, prompt, sequence.tokens, sequence.logprobs or (),
        stop=stop,
    )  # fmt: skip
    return name_tokens(call, answer, sequence.topk_logprobs, text)


def name_tokens(
    call: ChatRequest, answer: ChatAnswer, likeliest: Sequence[Likeliest] | None, text: ServedText
) -> ChatAnswer:
    """The answer with the texts of its tokens and of the likeliest ones, if its log-probs were asked for."""
    if not call.with_logprobs:
        return answer
    tops = [[(text.token_text(token), logprob) for token, logprob in top] for top in likeliest or ()]
    return replace(answer, token_texts=[text.token_text(token) for token in answer.tokens], likeliest=tops)


def generated_logprobs(sequence: SampledSequence) -> dict[str, Any]:
    """`logprobs` of `/inference/v1/generate`: each token by its id."""
    tops = sequence.topk_logprobs or [[]] * len(sequence.tokens)
    return {
        "content": [
            {
                "token": f"token_id:{token}",
                "logprob": logprob,
                "top_logprobs": [
                    {"token": f"token_id:{one}", "logprob": max(value, LEAST_LOGPROB)} for one, value in top
                ],
            }
            for token, logprob, top in zip(sequence.tokens, sequence.logprobs or (), tops, strict=True)
        ]
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class ChoiceStream:
    """One completion: its text so far, and the tokens that no chunk has named yet."""

    def __init__(
        self,
        body: CompletionRequest | OpenChatRequest,
        sampling: OpenSampling,
        text: ServedText,
        prompt: list[int],
        skip_special: bool,
    ) -> None:
        self._pieces = TextStream(text, body.stop_strings, skip_special)
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

    def __init__(
        self,
        body: CompletionRequest | OpenChatRequest,
        sampling: OpenSampling,
        text: ServedText,
        head: Json,
        has_tools: bool = False,
    ) -> None:
        skip = body.skip_special_tokens and not has_tools  # calls may be made of special tokens
        self._count, self._text, self._head, self._sampling = body.n, text, head, sampling
        self._has_usage = body.stream_options is not None and body.stream_options.include_usage
        self._streams = {
            i: ChoiceStream(body, sampling, text, sampling.prompts[i // body.n], skip)
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
            total = usage(sum(map(len, self._sampling.prompts)), spent)
            yield self._head | {"choices": [], "usage": total}


class CompletionStream(AnswerStream):
    """The streamed answer of `/v1/completions`."""

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
            choice["logprobs"] = completion_logprobs(
                tokens, logprobs, likeliest, self._text, self._name, self._offsets[index]
            )
            self._offsets[index] += sum(len(self._text.token_text(token)) for token in tokens)
        if self._body.return_token_ids:
            choice["token_ids"] = tokens
        return self._head | {"choices": [choice]}


class ChatStream(AnswerStream):
    """The streamed answer of `/v1/chat/completions`. With tools the text comes at once: a call is read when it is
    whole."""

    def __init__(self, body: OpenChatRequest, call: ChatRequest, sampling: OpenSampling, text: ServedText, head: Json):
        super().__init__(body, sampling, text, head, bool(call.tools))
        self._call, self._skip_special = call, body.skip_special_tokens
        self._whole = dict.fromkeys(self._streams, "")

    def begin(self) -> Iterator[Json]:
        for index in self._streams:
            yield self._make(index, {"role": "assistant", "content": ""}, None)

    def chunk(self, index: int, said: str, is_last: bool) -> Json | None:
        self._whole[index] += said
        reason = self._streams[index].reason if is_last else None
        if not self._call.tools:
            return self._make(index, {"content": said} if said else {}, reason)
        if not is_last:
            return None
        message = self._text.read_message(self._whole[index], self._call, self._skip_special)
        delta: Json = {"content": message["content"]} if message["content"] else {}
        if calls := write_calls(message):
            delta["tool_calls"] = [{"index": number, **one} for number, one in enumerate(calls)]
        return self._make(index, delta, "tool_calls" if calls else reason)

    def _make(self, index: int, delta: Json, reason: Any) -> Json:
        tokens, logprobs, likeliest = self._streams[index].take()
        answer = name_tokens(self._call, ChatAnswer({}, reason, (), tokens, logprobs), likeliest, self._text)
        end = write_end(self._call, answer)
        return write_chunk(self._head, index, delta, **(end if tokens else {**end, "logprobs": None}))
