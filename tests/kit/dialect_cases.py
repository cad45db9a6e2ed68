"""Conversations and answers for the tests of the dialects: what clients send back, and bodies of any kind."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from rlvr.chat.dialects.forms import Event, Json

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: Json = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
TOOLS: dict[str, list[Json]] = {
    CHAT: [ADD],
    RESPONSES: [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": True}],
    ANTHROPIC: [{"name": "add", "description": "Add.", "input_schema": SCHEMA}],
}
USER: Json = {"role": "user", "content": "Hi"}

texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(["add", "look_up", "a.b-c", ""])
calls = st.lists(st.tuples(names, st.dictionaries(texts, values, max_size=3)), max_size=3)


@st.composite
def messages(draw: st.DrawFn) -> Json:
    """What a policy said: text, thoughts, calls of tools, or several of them."""
    message: Json = {"role": "assistant", "content": draw(texts | st.sampled_from(["", " ", "\n a \u2028\n"]))}
    if thoughts := draw(st.just("") | texts):
        message["reasoning_content"] = thoughts
    if made := draw(calls):
        message["tool_calls"] = [
            {"id": f"call{n:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(made)
        ]
    return message


# Anything that JSON can hold, with the names that dialects read.
_WORDS = """
model messages input content role type text tools tool_choice function name arguments tool_calls tool_call_id call_id id
instructions system stop stop_sequences max_tokens max_completion_tokens max_output_tokens temperature top_p top_k min_p
seed n stream stream_options include_usage response_format json_schema schema format output_config output_format
logprobs top_logprobs include previous_response_id parallel_tool_calls mode allowed_tools reasoning_content summary
output input_schema parameters description tool_use_id disable_parallel_tool_use context_management edits
logit_bias thinking user assistant tool developer message function_call function_call_output reasoning item_reference
input_text output_text tool_use tool_result custom auto any none required image_url refusal return_token_ids json_object
"""
words = st.sampled_from(_WORDS.split())
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 0, 1, -1])
    | st.floats()
    | words
    | st.text(max_size=5)
    | st.sampled_from(['{"a": 1}', "[" * 2_000, "{", '{"a": NaN}', "1" * 5_000, "\ud800"])
)
junk = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=3), inner, max_size=5),
    max_leaves=20,
)


def full_body(path: str) -> Json:
    """A body with most of what a dialect reads, for tests that change parts of it."""
    options: Json = {"model": "m", "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stream": True}
    tools = {"tools": TOOLS[path], "metadata": {"a": "b"}}
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    if path == CHAT:
        history = [
            {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "1"}]},
        ]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
        chosen = {"tool_choice": {"type": "function", "function": {"name": "add"}}, "parallel_tool_calls": False}
        more = {"n": 2, "stop": ["x"], "max_completion_tokens": 5, "stream_options": {"include_usage": True}}
        return {**options, **tools, **chosen, **more, "messages": history, "response_format": form, "logprobs": True}
    if path == RESPONSES:
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "1"}]},
        ]
        form = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "low"}
        more = {"max_output_tokens": 5, "include": ["message.output_text.logprobs"], "previous_response_id": "r"}
        chosen = {"tool_choice": {"type": "function", "name": "add"}, "parallel_tool_calls": False}
        return {**options, **tools, **chosen, **more, "instructions": "Be short.", "input": items, "text": form}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "1"}]},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    chosen = {"tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True}}
    more = {"max_tokens": 5, "stop_sequences": ["x"], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    form = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    return {
        **options,
        **tools,
        **chosen,
        **more,
        **form,
        "system": [{"type": "text", "text": "Be short."}],
        "messages": turns,
    }


def send_back(path: str, answer: Json) -> list[Json]:
    """The answer as a client sends it with its next call."""
    answer = copy.deepcopy(answer)
    if path == CHAT:
        return [answer["choices"][0]["message"]]
    if path == RESPONSES:
        return answer["output"]
    return [{"role": "assistant", "content": answer["content"]}]


def make_body(path: str, history: Sequence[Any]) -> Json:
    return {"model": "m", "input" if path == RESPONSES else "messages": list(history)}


def join_events(path: str, events: Sequence[Event]) -> list[Json]:
    """What a client sends back of a stream."""
    parts: list[Any] = [event.data for event in events]
    if path == RESPONSES:
        return send_back(path, parts[-1]["response"])
    if path == CHAT:
        return [_join_chunks(parts)]
    blocks: list[Json] = []
    texts: dict[int, str] = {}
    for part in parts:
        if part["type"] == "content_block_start":
            assert part["index"] == len(blocks)
            blocks.append(copy.deepcopy(part["content_block"]))
        elif part["type"] == "content_block_delta":
            block, delta = blocks[part["index"]], part["delta"]
            if delta["type"] == "input_json_delta":
                texts[part["index"]] = texts.get(part["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
    for index, text in texts.items():
        blocks[index]["input"] = json.loads(text)
    return [{"role": "assistant", "content": blocks}]


def _join_chunks(parts: Sequence[Any]) -> Json:
    message: Json = {"role": "assistant"}
    made: list[Json] = []
    assert parts[-1] == "[DONE]"
    for part in parts[:-1]:
        for choice in part["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = message.get(name, "") + delta[name]
            for one in delta.get("tool_calls", ()):
                if one["index"] == len(made):
                    made.append(copy.deepcopy(one))
                else:
                    made[one["index"]]["function"]["arguments"] += one["function"]["arguments"]
    return {**message, **({"tool_calls": made} if made else {})}
