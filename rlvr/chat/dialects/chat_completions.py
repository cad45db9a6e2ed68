"""OpenAI's chat completions, with vLLM's token ids.

Left out on purpose: parts that are not text, tools that are not functions, the names of participants, `functions` and
`function_call` of before 2023's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlvr.chat.dialects.forms import ChatAnswer, ChatRequest, Event, Json
from rlvr.chat.dialects.openai_fields import (
    WITHOUT_EFFECT,
    check_top_logprobs,
    choose_openai_tools,
    read_format,
    take_function,
    write_arguments,
    write_logprobs,
    write_openai_error,
)
from rlvr.chat.dialects.request_fields import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    read_body,
    read_call,
    read_sampling,
    read_text,
    read_tool,
)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatCompletions:
    """The dialect of OpenAI's `/v1/chat/completions`."""

    name = "chat_completions"
    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        fields = read_body(body)
        messages = [_read_message(one) for one in fields.take_children("messages", MAX_MESSAGES)]
        if not messages:
            fields.refuse("messages", fields.take("messages"), "at least one message")
        given = [_read_function(one) for one in fields.take_children("tools", MAX_TOOLS)]
        tools, required_tool = choose_openai_tools(fields, given)
        older, limit = fields.take_whole("max_tokens", 1), fields.take_whole("max_completion_tokens", 1)
        check_top_logprobs(fields)
        streaming = fields.take_child("stream_options")
        call = ChatRequest(
            model=fields.take_word("model"),
            messages=messages,
            tools=tools,
            count=fields.take_whole("n", 1, MAX_CHOICES) or 1,
            max_tokens=older if limit is None else limit,
            with_usage=streaming is not None and streaming.take_flag("include_usage"),
            one_call=not fields.take_flag("parallel_tool_calls", True),
            required_tool=required_tool,
            schema=read_format(fields.take_child("response_format")),
            with_token_ids=fields.take_flag("return_token_ids"),
            with_logprobs=fields.take_flag("logprobs"),
            **read_sampling(fields, "stop"),
        )
        fields.refuse_others(WITHOUT_EFFECT)
        return call

    def write(self, call: ChatRequest, answers: Sequence[ChatAnswer], id: str, created: int) -> Json:
        choices: list[Json] = []
        for index, answer in enumerate(answers):
            calls = answer.message.get("tool_calls") or []
            message: Json = {
                "role": "assistant",
                "content": answer.message["content"] or (None if calls else ""),
            }
            if reasoning := answer.message.get("reasoning_content"):
                message["reasoning_content"] = reasoning
            if calls:
                message["tool_calls"] = write_calls(answer.message)
            choices.append({"index": index, "message": message, **write_end(call, answer)})
        written = _write_head(call, id, created, "chat.completion") | {
            "choices": choices,
            "usage": _write_usage(answers),
        }
        return written | ({"prompt_token_ids": list(answers[0].prompt_tokens)} if call.with_token_ids else {})

    def write_events(self, call: ChatRequest, answers: Sequence[ChatAnswer], id: str, created: int) -> Iterator[Event]:
        head = _write_head(call, id, created, "chat.completion.chunk") | ({"usage": None} if call.with_usage else {})

        def chunk(index: int, delta: Json, around: Mapping[str, Any] | None = None, **more: Any) -> Event:
            return Event({**write_chunk(head, index, delta, **more), **(around or {})})

        more = {"prompt_token_ids": list(answers[0].prompt_tokens)} if call.with_token_ids else {}
        for index, answer in enumerate(answers):  # in order: clients make room for a choice with its first chunk
            delta = {"role": "assistant", "content": None if answer.message.get("tool_calls") else ""}
            yield chunk(index, delta, None if index else more, **_write_tokens(call, answer))
        for index, answer in enumerate(answers):
            if reasoning := answer.message.get("reasoning_content"):
                yield chunk(index, {"reasoning_content": reasoning})
            if answer.message["content"]:
                yield chunk(index, {"content": answer.message["content"]})
            for number, one in enumerate(answer.message.get("tool_calls") or ()):
                named = {"name": one["function"]["name"], "arguments": ""}
                yield chunk(index, {"tool_calls": [{"index": number, **one, "function": named}]})
                arguments = {"arguments": write_arguments(one)}
                yield chunk(index, {"tool_calls": [{"index": number, "function": arguments}]})
            yield chunk(index, {}, **write_end(replace(call, with_token_ids=False), answer))
        if call.with_usage:
            yield Event({**head, "choices": [], "usage": _write_usage(answers)})
        yield Event("[DONE]")

    def write_error(self, message: str, status: int, param: str | None = None) -> Json:
        return write_openai_error(message, status, param)


def _read_message(fields: Fields) -> Json:
    role = _ROLES[fields.take_one_of("role", _ROLES)]
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    given = fields.take("content")
    if given is None and role in ("system", "user"):
        fields.refuse("content", given, "a text or a list of parts")
    message: Json = {"role": role, "content": read_text(given, fields.join_path("content"), kinds)}
    if role == "tool":
        message["tool_call_id"] = fields.take_word("tool_call_id")
    if role != "assistant":
        return message
    for name in ("audio", "function_call"):
        if (given := fields.take(name)) is not None:
            fields.refuse(name, given, "none: it is not supported, and calls of tools are in `tool_calls`")
    if reasoning := fields.take_text("reasoning_content") or fields.take_text("reasoning"):
        message["reasoning_content"] = reasoning
    if calls := [_read_call(one) for one in fields.take_children("tool_calls", MAX_TOOLS)]:
        message["tool_calls"] = calls
    return message


def _read_call(fields: Fields) -> Json:
    if (kind := fields.take("type")) not in (None, "function"):
        fields.refuse("type", kind, "'function'")
    function = fields.take_child("function") or fields.refuse("function", None, "an object with name and arguments")
    return read_call(fields, "id", "arguments", function)


def _read_function(fields: Fields) -> Json:
    function = take_function(fields).take_child("function")
    return read_tool(function or fields.refuse("function", None, "an object with name, description and parameters"))


def _write_head(call: ChatRequest, id: str, created: int, kind: str) -> Json:
    return {"id": id, "object": kind, "created": created, "model": call.model, "system_fingerprint": None}


def write_chunk(head: Mapping[str, Any], index: int, delta: Json, **more: Any) -> Json:
    """A part of the answer `index` in a stream."""
    return {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}]}


def write_calls(message: Mapping[str, Any]) -> list[Json]:
    """The calls of tools in a message, with their arguments as text."""
    return [
        {**one, "function": {"name": one["function"]["name"], "arguments": write_arguments(one)}}
        for one in message.get("tool_calls") or ()
    ]


def write_end(call: ChatRequest, answer: ChatAnswer) -> Json:
    """How an answer ended, and what was asked for of its tokens."""
    end: Json = {"finish_reason": answer.finish, "logprobs": None}
    if call.with_logprobs:
        end["logprobs"] = {"content": write_logprobs(answer), "refusal": None}
    return end | _write_tokens(call, answer)


def _write_tokens(call: ChatRequest, answer: ChatAnswer) -> Json:
    """In a stream in the first chunk of a choice: OpenAI's SDK keeps fields that it does not know of that one alone."""
    return {"token_ids": list(answer.tokens)} if call.with_token_ids else {}


def _write_usage(answers: Sequence[ChatAnswer]) -> Json:
    prompt, sampled = len(answers[0].prompt_tokens), sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
