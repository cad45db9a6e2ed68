"""Anthropic's messages.

Left out on purpose: blocks that are not text, tools that Anthropic defines or runs, and answers that the caller begins
(a last message of the assistant).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlvr.chat.dialects.forms import ChatAnswer, ChatRequest, DialectError, Event, Json
from rlvr.chat.dialects.request_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    choose_tools,
    clean_arguments,
    read_body,
    read_call,
    read_sampling,
    read_text,
    read_tool,
    refuse_tool,
    show,
)

# How much a policy thinks is the run's to say (`prompt.thinking`), so hints to a provider's model change nothing.
_WITHOUT_EFFECT = {
    *("metadata", "service_tier", "cache_control", "betas", "anthropic_beta", "anthropic_version", "inference_geo"),
    *(
        "user_profile_id",
        "workspace_id",
        "billing_policy",
        "diagnostics",
        "speed",
        "fallbacks",
        "fallback_credit_token",
    ),
    "thinking",
}
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_MAX_BLOCKS = 10_000  # of one message


class AnthropicMessages:
    """The dialect of Anthropic's `/v1/messages`."""

    name = "anthropic_messages"
    path = "/v1/messages"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        fields = read_body(body)
        messages: list[Json] = []
        if system := read_text(fields.take("system"), "system"):
            messages.append({"role": "system", "content": system})
        given = fields.take_children("messages", MAX_MESSAGES)
        if not given:
            fields.refuse("messages", fields.take("messages"), "at least one message")
        for one in given:
            messages += _read_message(one)
        if messages[-1]["role"] == "assistant":
            raise DialectError(
                "messages: the last is the assistant's, and an answer cannot be begun for it", "messages"
            )
        tools, required_tool, one_call = _read_tools(fields)
        _check_context_management(fields)
        if fields.take("thread") is not None:
            raise DialectError("thread: no conversation is kept here; send all messages with each call", "thread")
        call = ChatRequest(
            model=fields.take_word("model"),
            messages=messages,
            tools=tools,
            max_tokens=fields.take_whole("max_tokens", 1),
            one_call=one_call,
            required_tool=required_tool,
            schema=_read_format(fields),
            **read_sampling(fields, "stop_sequences"),
        )
        fields.refuse_others(_WITHOUT_EFFECT)
        return call

    def write(self, call: ChatRequest, answers: Sequence[ChatAnswer], id: str, created: int) -> Json:
        [answer] = answers
        return {
            **_write_head(call, id),
            "content": _write_blocks(answer),
            **_write_end(answer),
            "usage": _write_usage(answer, len(answer.tokens)),
        }

    def write_events(self, call: ChatRequest, answers: Sequence[ChatAnswer], id: str, created: int) -> Iterator[Event]:
        [answer] = answers
        begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _write_usage(answer, 0)}
        events: list[Json] = [{"type": "message_start", "message": {**_write_head(call, id), **begun}}]
        for index, block in enumerate(_write_blocks(answer)):
            empty, deltas = _split_block(block)
            events += [
                {"type": "content_block_start", "index": index, "content_block": empty},
                *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
                {"type": "content_block_stop", "index": index},
            ]
        usage = _write_usage(answer, len(answer.tokens))
        events += [{"type": "message_delta", "delta": _write_end(answer), "usage": usage}, {"type": "message_stop"}]
        for event in events:
            yield Event(event, event["type"])

    def write_error(self, message: str, status: int, param: str | None = None) -> Json:
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        written: Json = {"type": kind, "message": message}
        if param == "thread":  # Anthropic's SDK, which runs tools in threads, goes on without them
            written["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"type": "error", "error": written}


def _read_message(fields: Fields) -> list[Json]:
    role = fields.take_one_of("role", ("user", "assistant", "system"))
    content = fields.take("content")
    if role == "system" or isinstance(content, str):
        return [{"role": role, "content": read_text(content, fields.join_path("content"))}]
    if content is None:
        fields.refuse("content", content, "a text or a list of blocks")
    blocks = fields.take_children("content", _MAX_BLOCKS)
    return [_read_turn(blocks)] if role == "assistant" else _read_user(blocks)


def _read_user(blocks: Sequence[Fields]) -> list[Json]:
    """Results of tools are messages of their own; the text between them is the user's."""
    messages: list[Json] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            messages.append({"role": "user", "content": "".join(texts)})
            texts.clear()

    for block in blocks:
        if (kind := block.take("type")) == "text":
            texts.append(_read_block_text(block, "text"))
        elif kind == "tool_result":
            end_text()
            content = read_text(block.take("content"), block.join_path("content"))
            messages.append({"role": "tool", "content": content, "tool_call_id": block.take_word("tool_use_id")})
        else:
            _refuse_block(block, kind)
    end_text()
    return messages or [{"role": "user", "content": ""}]


def _read_turn(blocks: Sequence[Fields]) -> Json:
    """The assistant's message."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for block in blocks:
        if (kind := block.take("type")) == "text":
            texts.append(_read_block_text(block, "text"))
        elif kind == "thinking":
            thoughts.append(_read_block_text(block, "thinking"))
        elif kind == "tool_use":
            calls.append(read_call(block, "id", "input"))
        elif kind != "redacted_thinking":
            _refuse_block(block, kind)
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if reasoning := "".join(thoughts):
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _read_block_text(block: Fields, name: str) -> str:
    text = block.take_text(name)
    return block.refuse(name, None, "a text") if text is None else text


def _refuse_block(block: Fields, kind: Any) -> None:
    raise DialectError(
        f"{block.place} is of type {show(kind)}, which is not supported: this model reads text; leave it out",
        block.place,
    )


def _read_tools(fields: Fields) -> tuple[list[Json], str | bool, bool]:
    """The tools that are shown, `ChatRequest.required_tool` and `ChatRequest.one_call`."""
    tools: list[Json] = []
    for tool in fields.take_children("tools", MAX_TOOLS):
        if (kind := tool.take("type")) not in (None, "custom"):
            refuse_tool(tool, kind, "no type or 'custom'")
        tools.append(read_tool(tool, "input_schema"))
    if (choice := fields.take_child("tool_choice")) is None:
        return tools, False, False
    mode = choice.take_one_of("type", ("auto", "any", "tool", "none"))
    one_call = choice.take_flag("disable_parallel_tool_use")
    required_tool = choice.take_word("name") if mode == "tool" else {"auto": False, "any": True, "none": None}[mode]
    return *choose_tools(tools, required_tool, choice.place), one_call


def _read_format(fields: Fields) -> Json | None:
    """The JSON schema of `output_config.format`, or of its older name `output_format`."""
    config, older = fields.take_child("output_config"), fields.take_child("output_format")
    form = older if config is None else config.take_child("format") or older
    if form is None:
        return None
    form.take_one_of("type", ("json_schema",))
    schema = form.take("schema")
    return schema if isinstance(schema, dict) else form.refuse("schema", schema, "a JSON schema, which is an object")


def _check_context_management(fields: Fields) -> None:
    """Thinking may be left out of a history, which the chat template says; results of tools may not."""
    if (given := fields.take_child("context_management")) is None:
        return
    for edit in given.take_children("edits", MAX_TOOLS):
        kind = edit.take("type")
        if not isinstance(kind, str) or not kind.startswith("clear_thinking"):
            edit.refuse(
                "type",
                kind,
                "clear_thinking_...; other edits are not supported, so send the history as the model should read it",
            )


def _write_head(call: ChatRequest, id: str) -> Json:
    return {"id": id, "type": "message", "role": "assistant", "model": call.model}


def _write_blocks(answer: ChatAnswer) -> list[Json]:
    """What was thought, what was said, and the calls. An answer without calls says something, if only an empty text."""
    blocks: list[Json] = []
    message, calls = answer.message, answer.message.get("tool_calls") or []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"]})
    for one in calls:
        function = one["function"]
        given = clean_arguments(function["arguments"])
        blocks.append({"type": "tool_use", "id": one["id"], "name": function["name"], "input": given})
    return blocks


def _split_block(block: Json) -> tuple[Json, list[Json]]:
    """A block as it begins in a stream, and what is added to it."""
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    kind = block["type"]
    deltas = [{"type": f"{kind}_delta", kind: block[kind]}] if block[kind] else []
    if kind == "thinking":
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    return {**block, kind: ""}, deltas


def _write_end(answer: ChatAnswer) -> Json:
    reason = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}[answer.finish]
    is_stopped = answer.finish == "stop" and answer.stop is not None
    return {
        "stop_reason": "stop_sequence" if is_stopped else reason,
        "stop_sequence": answer.stop if is_stopped else None,
    }


def _write_usage(answer: ChatAnswer, sampled: int) -> Json:
    return {
        "input_tokens": len(answer.prompt_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": sampled,
    }
