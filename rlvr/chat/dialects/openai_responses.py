"""OpenAI's Responses.

Left out on purpose: parts that are not text, tools that are not functions, conversations and prompts that are kept at
the provider (`previous_response_id` is read), answers in the background.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlvr.chat.dialects.forms import ChatAnswer, ChatRequest, DialectError, Event, Json
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
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    read_body,
    read_call,
    read_sampling,
    read_text,
    read_tool,
    show,
)

# `include` is read; what it names beside log-probs belongs to tools of the provider. `truncation` would shorten a
# conversation that is too long, which is an error here. `max_tool_calls` counts calls of the provider's tools.
_WITHOUT_EFFECT = WITHOUT_EFFECT | {"truncation", "max_tool_calls", "stream_options"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_REASONING, _SAID, _CALLED = range(3)  # the parts of an assistant's turn, in their order


class OpenaiResponses:
    """The dialect of OpenAI's `/v1/responses`."""

    name = "responses"
    path = "/v1/responses"

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        fields = read_body(body)
        previous, instructions = fields.take_text("previous_response_id"), fields.take_text("instructions")
        messages = _read_input(fields)
        if not messages and previous is None:
            fields.refuse("input", fields.take("input"), "a text or at least one item")
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
        given = [read_tool(take_function(one)) for one in fields.take_children("tools", MAX_TOOLS)]
        tools, required_tool = choose_openai_tools(fields, given)
        text, include = fields.take_child("text"), fields.take("include")
        if include is not None and not isinstance(include, list):
            fields.refuse("include", include, "a list of texts")
        check_top_logprobs(fields)
        call = ChatRequest(
            model=fields.take_word("model"),
            messages=messages,
            tools=tools,
            max_tokens=fields.take_whole("max_output_tokens", 1),
            one_call=not fields.take_flag("parallel_tool_calls", True),
            required_tool=required_tool,
            schema=None if text is None else read_format(text.take_child("format")),
            previous=previous or None,
            is_kept=True,
            has_instructions=bool(instructions),
            with_logprobs="message.output_text.logprobs" in (include or ()),
            **read_sampling(fields, "stop"),
        )
        fields.refuse_others(_WITHOUT_EFFECT)
        return call

    def write(self, call: ChatRequest, answers: Sequence[ChatAnswer], id: str, created: int) -> Json:
        [answer] = answers
        is_cut = answer.finish == "length"
        status = "incomplete" if is_cut else "completed"
        prompt, sampled = len(answer.prompt_tokens), len(answer.tokens)
        return {
            **_write_head(call, id, created),
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _write_items(call, answer, id, status),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }

    def write_events(self, call: ChatRequest, answers: Sequence[ChatAnswer], id: str, created: int) -> Iterator[Event]:
        whole = self.write(call, answers, id, created)
        begun = {**_write_head(call, id, created), "status": "in_progress", "output": [], "usage": None}
        events: list[Json] = [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
        for index, item in enumerate(whole["output"]):
            write = _write_call_events if item["type"] == "function_call" else _write_text_events
            place = {"output_index": index}
            events += [
                {"type": "response.output_item.added", **place, "item": _begin_item(item)},
                *write(item, {"item_id": item["id"], **place}),
                {"type": "response.output_item.done", **place, "item": item},
            ]
        events.append({"type": f"response.{whole['status']}", "response": whole})
        for number, event in enumerate(events):
            yield Event({**event, "sequence_number": number}, event["type"])

    def write_error(self, message: str, status: int, param: str | None = None) -> Json:
        return write_openai_error(message, status, param)


class _History:
    """Messages made of items. What an assistant said in one turn are several items: they become one message."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._stage = _CALLED + 1  # the last part of the assistant's turn that the next item may belong to
        self._turn = ""
        self._thoughts: dict[int, list[str]] = {}  # by the place of their message

    def add(self, message: Json) -> None:
        self.messages.append(message)
        self._stage = _CALLED + 1

    def continue_turn(self, stage: int, item_id: Any) -> Json:
        """The assistant's message that an item belongs to. The ids that this dialect gives to items name the answer."""
        turn = item_id.partition("_")[2].rpartition("_")[0] if isinstance(item_id, str) else ""
        is_other = bool(turn and self._turn and turn != self._turn)
        if is_other or self._stage > stage or self._stage == stage == _SAID:
            self.add({"role": "assistant", "content": ""})
        self._stage, self._turn = stage, turn
        return self.messages[-1]

    def add_thought(self, text: str, item_id: Any) -> None:
        self.continue_turn(_REASONING, item_id)
        self._thoughts.setdefault(len(self.messages) - 1, []).append(text)

    def finish(self) -> list[Json]:
        for place, texts in self._thoughts.items():
            self.messages[place]["reasoning_content"] = "".join(texts)
        return self.messages


def _read_input(fields: Fields) -> list[Json]:
    if isinstance(text := fields.take("input"), str):
        return [{"role": "user", "content": text}]
    history = _History()
    for item in fields.take_children("input", MAX_MESSAGES):
        kind = item.take("type")
        if kind == "message" or (kind is None and item.take("role") is not None):
            _read_message(item, history)
        elif kind == "function_call":
            message = history.continue_turn(_CALLED, item.take("id"))
            message.setdefault("tool_calls", []).append(read_call(item, "call_id", "arguments"))
        elif kind == "function_call_output":
            content = read_text(item.take("output"), item.join_path("output"), _TEXTS)
            history.add({"role": "tool", "content": content, "tool_call_id": item.take_word("call_id")})
        elif kind == "reasoning":
            if text := _read_reasoning(item):
                history.add_thought(text, item.take("id"))
        else:
            remedy = "give the item itself" if kind == "item_reference" else "leave it out"
            raise DialectError(
                f"{item.place} is an item of type {show(kind)}, which is not supported; {remedy}", item.place
            )
    return history.finish()


def _read_message(item: Fields, history: _History) -> None:
    role = _ROLES[item.take_one_of("role", _ROLES)]
    if (content := item.take("content")) is None:
        item.refuse("content", content, "a text or a list of parts")
    kinds = (*_TEXTS, "refusal") if role == "assistant" else _TEXTS
    text = read_text(content, item.join_path("content"), kinds)
    if role == "assistant":
        history.continue_turn(_SAID, item.take("id"))["content"] = text
    else:
        history.add({"role": role, "content": text})


def _read_reasoning(item: Fields) -> str:
    """What was thought, or else its summary; "" if it is encrypted."""
    text = read_text(item.take("content"), item.join_path("content"), ("reasoning_text", "text"))
    return text or read_text(item.take("summary"), item.join_path("summary"), ("summary_text",))


def _write_head(call: ChatRequest, id: str, created: int) -> Json:
    choice: Any = call.required_tool
    if isinstance(choice, str):
        choice = {"type": "function", "name": choice}
    form: Json = {"type": "text"}
    if call.schema is not None:
        form = {"type": "json_schema", "name": "answer", "schema": call.schema, "strict": False}
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "error": None,
        "incomplete_details": None,
        "instructions": call.messages[0]["content"] if call.has_instructions else None,
        "max_output_tokens": call.max_tokens,
        "metadata": {},
        "model": call.model,
        "parallel_tool_calls": not call.one_call,
        "previous_response_id": call.previous,
        "temperature": call.temperature,
        "text": {"format": form},
        "tool_choice": "required" if choice is True else choice or "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in call.tools],
        "top_p": call.top_p,
        "truncation": "disabled",
    }


def _write_items(call: ChatRequest, answer: ChatAnswer, id: str, status: str) -> list[Json]:
    """What was thought, what was said, and the calls. An answer without calls says something, if only an empty text."""
    items: list[Json] = []
    message, calls = answer.message, answer.message.get("tool_calls") or []
    if reasoning := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{id}_0", "summary": [], "content": content, "status": status})
    if message["content"] or not calls:
        part: Json = {"type": "output_text", "text": message["content"], "annotations": []}
        part["logprobs"] = write_logprobs(answer) if call.with_logprobs else []
        items.append({"type": "message", "id": f"msg_{id}_0", "role": "assistant", "content": [part], "status": status})
    for number, one in enumerate(calls):
        named = {"call_id": one["id"], "name": one["function"]["name"], "arguments": write_arguments(one)}
        items.append({"type": "function_call", "id": f"fc_{id}_{number}", **named, "status": status})
    return items


def _begin_item(item: Json) -> Json:
    """An item as it is when it is added to a stream."""
    gap: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **gap, "status": "in_progress"}


def _write_text_events(item: Json, place: Json) -> list[Json]:
    """Of a message, and of what was thought."""
    [part] = item["content"]
    kind, place = f"response.{part['type']}", {**place, "content_index": 0}
    gap = {"text": ""} | ({"logprobs": []} if "logprobs" in part else {})
    more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    events: list[Json] = [{"type": "response.content_part.added", **place, "part": {**part, **gap}}]
    if part["text"]:
        events.append({"type": f"{kind}.delta", **place, "delta": part["text"], **more})
    events.append({"type": f"{kind}.done", **place, "text": part["text"], **more})
    return [*events, {"type": "response.content_part.done", **place, "part": part}]


def _write_call_events(item: Json, place: Json) -> list[Json]:
    arguments = item["arguments"]
    return [
        {"type": "response.function_call_arguments.delta", **place, "delta": arguments},
        {"type": "response.function_call_arguments.done", **place, "name": item["name"], "arguments": arguments},
    ]
