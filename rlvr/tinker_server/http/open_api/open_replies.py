"""The answers of the open endpoints, as plain dictionaries, from what the engine sampled.

Log-probs are those of the Tinker side: at the request's temperature, before top_p, top_k and min_p; at temperature 0,
and of prompts, at temperature 1. `python -m pytest tests/test_open_http.py` exercises it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlvr.core.messages import SampledSequence
from rlvr.envs.tool_calls import ToolCall
from rlvr.tinker_server.http.json_routes import MAX_PARTS, MAX_VALUES
from rlvr.tinker_server.http.open_api.served_text import ServedText, cut_stops
from rlvr.tinker_server.protocol.open_requests import ChatMessage
from rlvr.web.json_bodies import has_more_parts, read_json

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
