"""What each dialect reads, refuses by name, and writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlvr.chat.dialects.forms import ChatRequest, DialectError, Json
from rlvr.chat.dialects.registry import DIALECTS
from tests.kit.dialect_cases import ADD, ANTHROPIC, CHAT, RESPONSES, SCHEMA, TOOLS, USER, full_body, make_body
from tests.kit.dialect_server import make_answer, say, use_tools

every_dialect = pytest.mark.parametrize("path", DIALECTS)
SYSTEM = {"role": "system", "content": "Be short."}
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
HISTORY = [
    SYSTEM,
    USER,
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALLED]},
    {"role": "tool", "content": "1", "tool_call_id": "c1"},
]


def read(path: str, **fields: Any) -> ChatRequest:
    return DIALECTS[path].read({**make_body(path, [USER]), **fields})


@every_dialect
def test_a_full_body_is_read_into_the_one_form(path: str) -> None:
    call = DIALECTS[path].read(full_body(path))
    assert call.messages == [*HISTORY, *([{"role": "user", "content": "And now?"}] if path == ANTHROPIC else [])]
    assert call.tools == [ADD] and call.required_tool == "add" and call.one_call
    assert (call.model, call.temperature, call.top_p, call.top_k, call.seed) == ("m", 0.5, 0.9, 3, 1)
    assert call.max_tokens == 5 and call.stream and call.schema == SCHEMA
    assert call.stop == (() if path == RESPONSES else ("x",))
    assert call.count == (2 if path == CHAT else 1) and call.with_usage == (path == CHAT)
    assert call.with_logprobs == (path != ANTHROPIC) and not call.with_token_ids
    assert call.previous == ("r" if path == RESPONSES else None) and call.has_instructions == (path == RESPONSES)


@every_dialect
def test_a_small_body_gives_no_option(path: str) -> None:
    assert read(path) == ChatRequest("m", [USER])


CHOICES: dict[str, dict[str, Any]] = {
    CHAT: {
        "none": "none",
        "must": "required",
        "named": {"type": "function", "function": {"name": "add"}},
        "unknown": {"type": "function", "function": {"name": "subtract"}},
    },
    RESPONSES: {
        "none": "none",
        "must": "required",
        "named": {"type": "function", "name": "add"},
        "unknown": {"type": "function", "name": "subtract"},
    },
    ANTHROPIC: {
        "none": {"type": "none"},
        "must": {"type": "any"},
        "named": {"type": "tool", "name": "add"},
        "unknown": {"type": "tool", "name": "subtract"},
    },
}


@every_dialect
def test_the_choice_of_tools(path: str) -> None:
    choices, tools = CHOICES[path], TOOLS[path]
    assert (call := read(path, tools=tools)).tools == [ADD] and call.required_tool is False
    assert (call := read(path, tools=tools, tool_choice=choices["none"])).tools == [] and call.required_tool is False
    assert read(path, tools=tools, tool_choice=choices["must"]).required_tool is True
    assert read(path, tools=tools, tool_choice=choices["named"]).required_tool == "add"
    for choice, given in (("unknown", tools), ("must", [])):
        with pytest.raises(DialectError, match="tool_choice") as error:
            read(path, tools=given, tool_choice=choices[choice])
        assert error.value.param == "tool_choice"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_allowed_tools_are_the_ones_that_are_shown(path: str) -> None:
    other = json.loads(json.dumps(TOOLS[path][0]).replace('"add"', '"other"'))
    allowed = {"mode": "required", "tools": [other]}
    choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if path == CHAT else allowed)}
    call = read(path, tools=[*TOOLS[path], other], tool_choice=choice)
    assert [tool["function"]["name"] for tool in call.tools] == ["other"] and call.required_tool is True


PNG = "data:image/png;base64,AA=="
REFUSED: list[tuple[str, Json, str]] = [
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
    (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty"),
    (CHAT, {"presence_penalty": -1}, "presence_penalty"),
    (CHAT, {"repetition_penalty": 1.1}, "repetition_penalty"),
    (CHAT, {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT, {"best_of": 2}, "best_of"),
    (CHAT, {"min_tokens": 3}, "min_tokens"),
    (CHAT, {"ignore_eos": True}, "ignore_eos"),
    (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    (CHAT, {"structured_outputs": {"json": {}}}, "structured_outputs"),
    (CHAT, {"functions": [{"name": "add"}]}, "functions"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    (CHAT, {"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
    (CHAT, {"max_token": 5}, "max_token"),
    (CHAT, {"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
    (CHAT, {"n": 0}, "n"),
    (CHAT, {"n": True}, "n"),
    (CHAT, {"temperature": -1}, "temperature"),
    (CHAT, {"temperature": "1"}, "temperature"),
    (CHAT, {"temperature": 10**400}, "temperature"),
    (CHAT, {"top_p": 0}, "top_p"),
    (CHAT, {"min_p": 1}, "min_p"),
    (CHAT, {"max_tokens": 0}, "max_tokens"),
    (CHAT, {"max_completion_tokens": 1.5}, "max_completion_tokens"),
    (CHAT, {"stop": ["a", ""]}, "stop"),
    (CHAT, {"stop": ["a"] * 65}, "stop"),
    (CHAT, {"stream": 1}, "stream"),
    (CHAT, {"model": ""}, "model"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "function", "content": ""}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "1"}]}, "messages[0].tool_call_id"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]},
        "messages[0].content[0]",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}}]},
        "messages[0].function_call",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "["}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {}}]}]},
        "messages[0].tool_calls[0].type",
    ),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    (CHAT, {"tool_choice": "always"}, "tool_choice"),
    (CHAT, {"response_format": {"type": "grammar"}}, "response_format.type"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0]"),
    (RESPONSES, {"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0]"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
    (RESPONSES, {"input": None}, "input"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    (RESPONSES, {"input": [{"type": "web_search_call", "id": "x"}]}, "input[0]"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}]},
        "input[0].content[0]",
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0]",
    ),
    (RESPONSES, {"include": "message.output_text.logprobs"}, "include"),
    (RESPONSES, {"return_token_ids": True}, "return_token_ids"),
    (ANTHROPIC, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    (ANTHROPIC, {"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    (ANTHROPIC, {"container": "c"}, "container"),
    (ANTHROPIC, {"thread": {"type": "create"}}, "thread"),
    (ANTHROPIC, {"messages": [USER, {"role": "assistant", "content": "The answer is"}]}, "messages"),
    (
        ANTHROPIC,
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0]",
    ),
    (
        ANTHROPIC,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}],
                }
            ]
        },
        "messages[0].content[0].content[0]",
    ),
    (
        ANTHROPIC,
        {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
        "messages[0].content[0]",
    ),
    (
        ANTHROPIC,
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits[0].type",
    ),
    (ANTHROPIC, {"output_config": {"format": {"type": "regex"}}}, "output_config.format.type"),
    (ANTHROPIC, {"system": [{"type": "image"}]}, "system[0]"),
]


@pytest.mark.parametrize(
    ("path", "fields", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_wrong_or_not_supported_is_refused_by_its_field(path: str, fields: Json, param: str) -> None:
    with pytest.raises(DialectError) as error:
        read(path, **fields)
    assert error.value.param == param and param in str(error.value) and error.value.status == 400


WITHOUT_EFFECT: list[tuple[str, Json]] = [
    (CHAT, {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "reasoning_effort": "high"}),
    (
        CHAT,
        {"logit_bias": {}, "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "best_of": 1},
    ),
    (CHAT, {"modalities": ["text"], "functions": [], "function_call": "auto", "response_format": {"type": "text"}}),
    (
        CHAT,
        {"skip_special_tokens": True, "min_tokens": 0, "audio": None, "tools": [], "prediction": {"type": "content"}},
    ),
    (RESPONSES, {"store": False, "truncation": "auto", "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}),
    (RESPONSES, {"include": ["reasoning.encrypted_content"], "background": False, "conversation": None}),
    (
        ANTHROPIC,
        {"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}, "betas": ["x"], "mcp_servers": []},
    ),
    (ANTHROPIC, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "system": ""}),
    (ANTHROPIC, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
]


@pytest.mark.parametrize(("path", "fields"), WITHOUT_EFFECT)
def test_fields_without_effect_here_are_ignored(path: str, fields: Json) -> None:
    assert read(path, **fields) == ChatRequest("m", [USER])


def test_a_misspelt_field_has_its_name_said() -> None:
    with pytest.raises(DialectError, match="did you mean 'max_completion_tokens'"):
        read(CHAT, max_completion_token=5)


def test_the_arguments_of_calls_are_objects() -> None:
    def arguments(given: Any) -> Any:
        called = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": given}}]}
        return read(CHAT, messages=[called]).messages[0]["tool_calls"][0]["function"]["arguments"]

    assert arguments("") == arguments(None) == arguments("{}") == {}
    assert arguments('{"a": [1, 2.5, null]}') == arguments({"a": [1, 2.5, None]}) == {"a": [1, 2.5, None]}
    for wrong, why in (
        ("[1]", "expected a JSON object"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": 1e999}', "finite"),
        ('{"a": ' + "1" * 5_000 + "}", "not JSON"),
        ('{"a": ' + "[" * 100_000, "not JSON"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "64 deep"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "characters"),
        (5, "expected a JSON object"),
    ):
        with pytest.raises(DialectError, match=why):
            arguments(wrong)


@every_dialect
def test_numbers_that_json_does_not_have_are_written_as_null(path: str) -> None:
    answer = use_tools(("add", {"a": float("nan"), "b": [float("inf"), 1.5]}))
    written = DIALECTS[path].write(ChatRequest("m", [USER]), [answer], "r", 0)
    text = json.dumps(written, allow_nan=False).replace("\\", "")
    assert '"a": null' in text and "[null, 1.5]" in text


ENDS = [
    (say("a"), "stop", "end_turn", "completed"),
    (say("a", stop="x"), "stop", "stop_sequence", "completed"),
    (say("a", "length"), "length", "max_tokens", "incomplete"),
    (use_tools(("add", {})), "tool_calls", "tool_use", "completed"),
]


@pytest.mark.parametrize(("answer", "chat", "anthropic", "responses"), ENDS)
def test_how_an_answer_ended_in_each_dialect_s_words(answer: Any, chat: str, anthropic: str, responses: str) -> None:
    call = ChatRequest("m", [USER])
    written = {path: DIALECTS[path].write(call, [answer], "r", 7) for path in DIALECTS}
    events: dict[str, list[Any]] = {
        path: [e.data for e in DIALECTS[path].write_events(call, [answer], "r", 7)] for path in DIALECTS
    }
    assert (
        written[CHAT]["choices"][0]["finish_reason"] == chat and events[CHAT][-2]["choices"][0]["finish_reason"] == chat
    )
    assert written[CHAT]["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert written[ANTHROPIC]["stop_reason"] == events[ANTHROPIC][-2]["delta"]["stop_reason"] == anthropic
    assert written[ANTHROPIC]["stop_sequence"] == answer.stop
    assert (written[ANTHROPIC]["usage"]["input_tokens"], written[ANTHROPIC]["usage"]["output_tokens"]) == (4, 3)
    assert written[RESPONSES]["status"] == responses and events[RESPONSES][-1]["type"] == f"response.{responses}"
    reason = {"reason": "max_output_tokens"} if responses == "incomplete" else None
    assert (
        written[RESPONSES]["incomplete_details"] == reason and events[RESPONSES][-1]["response"] == written[RESPONSES]
    )
    assert written[RESPONSES]["usage"]["total_tokens"] == 7 and written[RESPONSES]["created_at"] == 7


def test_token_ids_and_logprobs_as_vllm_gives_them() -> None:
    call = read(CHAT, return_token_ids=True, logprobs=True, top_logprobs=1, n=2, stream_options={"include_usage": True})
    answers = [say("a"), say("b")]
    written = DIALECTS[CHAT].write(call, answers, "r", 0)
    assert written["prompt_token_ids"] == [1, 2, 3, 4]
    assert [choice["token_ids"] for choice in written["choices"]] == [[5, 6, 7], [5, 6, 7]]
    [first, second, _] = written["choices"][1]["logprobs"]["content"]
    assert (first["token"], first["logprob"]) == ("a", -0.5) and second["bytes"] == [0xC3, 0xA9]
    chunks: list[Any] = [event.data for event in DIALECTS[CHAT].write_events(call, answers, "r", 0)]
    assert chunks[0]["prompt_token_ids"] == [1, 2, 3, 4]
    ids = [(c["index"], c["token_ids"]) for chunk in chunks[:-1] for c in chunk["choices"] if "token_ids" in c]
    assert ids == [(0, [5, 6, 7]), (1, [5, 6, 7])]
    assert chunks[-2]["choices"] == [] and chunks[-2]["usage"] == written["usage"]
    plain = DIALECTS[CHAT].write(ChatRequest("m", [USER]), answers, "r", 0)
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


EVENTS = {
    CHAT: [None] * 6,
    RESPONSES: [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ],
    ANTHROPIC: [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        "message_delta",
        "message_stop",
    ],
}


@every_dialect
def test_the_sequence_of_events(path: str) -> None:
    events = list(DIALECTS[path].write_events(ChatRequest("m", [USER]), [use_tools(("add", {}), text="Wait.")], "r", 0))
    assert [event.name for event in events] == EVENTS[path]
    assert all(
        event.name is None or (isinstance(event.data, dict) and event.data["type"] == event.name) for event in events
    )
    if path == RESPONSES:
        assert [event.data["sequence_number"] for event in events if isinstance(event.data, dict)] == list(range(13))
    if path == CHAT:
        assert events[-1].data == "[DONE]"


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        (CHAT, 400, "invalid_request_error"),
        (RESPONSES, 404, "not_found_error"),
        (CHAT, 500, "server_error"),
        (ANTHROPIC, 400, "invalid_request_error"),
        (ANTHROPIC, 401, "authentication_error"),
        (ANTHROPIC, 503, "api_error"),
    ],
)
def test_errors_in_each_dialect_s_form(path: str, status: int, kind: str) -> None:
    written = DIALECTS[path].write_error("It is wrong.", status, "model")
    assert written["error"]["message"] == "It is wrong." and written["error"]["type"] == kind
    if path == ANTHROPIC:
        assert written["type"] == "error" and set(written["error"]) == {"type", "message"}
    else:
        assert written["error"]["param"] == "model" and written["error"]["code"] is None


def test_a_call_goes_on_from_an_earlier_one() -> None:
    """The instructions of a call hold for it alone."""
    first = read(RESPONSES, instructions="Be short.")
    second = read(RESPONSES, instructions="Be long.", previous_response_id="r1", input="More.")
    said = make_answer({"role": "assistant", "content": "a"}).message
    joined = second.continue_from(first, said)
    more = {"role": "user", "content": "More."}
    assert joined.messages == [{"role": "system", "content": "Be long."}, USER, said, more] and joined.previous == "r1"
    third = read(RESPONSES, previous_response_id="r2", input="And?").continue_from(joined, said)
    assert third.messages == [USER, said, more, said, {"role": "user", "content": "And?"}]
