"""The answers of the open endpoints, as plain dictionaries: whole, or as chunks whenever a piece of text is certain.

Log-probs are those of the Tinker side: at the request's temperature, before top_p, top_k and min_p; at temperature 0,
and of prompts, at temperature 1.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlvr.chat.call_parts import ToolCall
from rlvr.core.messages import SampledSequence
from rlvr.engine.scheduler import SampledToken
from rlvr.tinker_server.http.dependencies import MAX_PARTS, MAX_VALUES
from rlvr.tinker_server.http.open_api.open_sampling import OpenSampling
from rlvr.tinker_server.http.open_api.served_text import ServedText, TextStream, cut_stops
from rlvr.tinker_server.protocol.open_requests import ChatMessage, CompletionRequest, OpenChatRequest
from rlvr.web.json_bodies import has_more_parts, read_json

Json = dict[str, Any]
Likeliest = Sequence[tuple[int, float]]
TokenName = Callable[[int], str]
_LEAST = -9999.0  # of a token that a model excludes: JSON has no infinity, and vLLM sends this number


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
        "token_logprobs": [None if logprob is None else max(logprob, _LEAST) for logprob in logprobs],
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
        named[word] = max(value, _LEAST)
    return {**named, name(token): max(logprob, _LEAST)}


def chat_logprobs(
    tokens: Sequence[int], logprobs: Sequence[float], likeliest: Sequence[Likeliest] | None, text: ServedText
) -> dict[str, Any]:
    """`logprobs` of `/v1/chat/completions`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        word = text.token_text(token)
        return {"token": word, "logprob": max(logprob, _LEAST), "bytes": list(word.encode(errors="replace"))}

    tops: Sequence[Likeliest] = likeliest or [()] * len(tokens)
    return {
        "content": [
            {**entry(token, logprob), "top_logprobs": [entry(*one) for one in top]}
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ],
        "refusal": None,
    }


def generated_logprobs(sequence: SampledSequence) -> dict[str, Any]:
    """`logprobs` of `/inference/v1/generate`: each token by its id."""
    tops = sequence.topk_logprobs or [[]] * len(sequence.tokens)
    return {
        "content": [
            {
                "token": f"token_id:{token}",
                "logprob": logprob,
                "top_logprobs": [{"token": f"token_id:{one}", "logprob": max(value, _LEAST)} for one, value in top],
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


def tool_call_fields(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as chat templates read them; ValueError for a part that is not text, or arguments that are not JSON.

    Templates take a call's arguments as an object, clients send them as JSON text.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        fields = message.model_dump(exclude_none=True)
        if isinstance(content := message.content, list):
            if wrong := next((part for part in content if part.get("type") != "text"), None):
                raise ValueError(f"messages: a part of type {wrong.get('type')!r:.60}; this server reads text only")
            if not all(isinstance(part.get("text"), str) for part in content):
                raise ValueError("messages: the `text` of a part is no text; give a string")
            fields["content"] = "".join(part["text"] for part in content)
        fields.setdefault("content", "")
        if message.tool_calls:
            fields["tool_calls"] = [_template_call(call) for call in message.tool_calls]
        found.append(fields)
    return found


def _template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError("messages: a tool call needs a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        if has_more_parts(arguments.encode(errors="replace"), MAX_PARTS, MAX_VALUES):
            raise ValueError(
                f"messages: the arguments of {function['name']!r:.60} have more than {MAX_PARTS:,} lists, objects and "
                f"fields, or more than {MAX_VALUES:,} values; leave some out"
            )
        try:
            arguments = read_json(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"messages: the arguments of {function['name']!r:.60} are not JSON ({error})") from error
    return {**call, "function": {**function, "arguments": arguments}}


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
            choice["logprobs"] = completion_logprobs(
                tokens, logprobs, likeliest, self._text, self._name, self._offsets[index]
            )
            self._offsets[index] += sum(len(self._text.token_text(token)) for token in tokens)
        if self._body.return_token_ids:
            choice["token_ids"] = tokens
        return self._head | {"choices": [choice]}


class ChatStream(AnswerStream):
    """`/v1/chat/completions`. With tools the text comes at once: a call is read when it is whole."""

    def __init__(self, body: OpenChatRequest, sampling: OpenSampling, text: ServedText, head: Json, has_tools: bool):
        super().__init__(body, sampling, text, head | {"object": "chat.completion.chunk"}, has_tools)
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
            said, calls = self._text.split_calls(
                self._whole[index], self._body.tools or (), skip_special=self._body.skip_special_tokens
            )
            reason = "tool_calls" if calls else reason
        delta: Json = {"content": said} if said else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(tool_call_fields(calls))]
        return self._make(index, delta, reason)

    def _make(self, index: int, delta: Json, reason: str | None) -> Json:
        tokens, logprobs, likeliest = self._streams[index].take()
        choice: Json = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        if self._body.logprobs and tokens:
            choice["logprobs"] = chat_logprobs(tokens, logprobs, likeliest, self._text)
        if self._body.return_token_ids:
            choice["token_ids"] = tokens
        return self._head | {"choices": [choice]}
