"""Of every dialect, by generated examples: an answer that comes back as history is read into the equal message, a
stream says what the whole answer says, and no body gives another error than a DialectError."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.chat.dialects.forms import ChatRequest, DialectError
from rlvr.chat.dialects.registry import DIALECTS
from tests.kit.dialect_cases import (
    RESPONSES,
    USER,
    full_body,
    join_events,
    junk,
    make_body,
    messages,
    send_back,
    words,
)
from tests.kit.dialect_server import make_answer

every_dialect = pytest.mark.parametrize("path", DIALECTS)
CALL = ChatRequest("m", [USER])


def carry(value: Any) -> Any:
    """A value as it comes over HTTP."""
    return json.loads(json.dumps(value).encode())


@every_dialect
@given(said=st.lists(messages(), min_size=1, max_size=3))
def test_answers_that_come_back_are_read_into_equal_messages(path: str, said: list[Any]) -> None:
    """Also of answers one directly after the other: items of Responses name their answer."""
    dialect, history, expected = DIALECTS[path], [USER], [USER]
    for number, message in enumerate(said):
        written = dialect.write(CALL, [make_answer(message)], f"resp_{number}", 0)
        history += send_back(path, carry(written))
        expected.append(message)
    history, expected = [*history, USER], [*expected, USER]
    assert dialect.read(carry(make_body(path, history))).messages == expected


@every_dialect
@given(message=messages())
def test_a_stream_comes_back_as_the_same_message(path: str, message: Any) -> None:
    dialect = DIALECTS[path]
    events = list(dialect.write_events(CALL, [make_answer(message)], "resp_1", 0))
    history = [USER, *join_events(path, carry_events(events)), USER]
    assert dialect.read(carry(make_body(path, history))).messages == [USER, message, USER]


def carry_events(events: list[Any]) -> list[Any]:
    """The events as they are sent: each in a block of lines, which blank lines and line separators do not break."""
    for event in events:
        lines = event.encode().decode().splitlines()
        assert lines[-1] == "" and len(lines) == 2 + bool(event.name)
        assert lines[-2] == f"data: {event.data}" or json.loads(lines[-2].removeprefix("data: ")) == event.data
        assert event.name is None or lines[0] == f"event: {event.name}"
    return events


def test_items_of_responses_without_ids_are_one_message_up_to_the_next_text() -> None:
    """Programs that build items themselves: a text begins a turn, calls belong to the text before them."""
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    items = [USER, {"role": "assistant", "content": "a"}, call, call, {"role": "assistant", "content": "b"}, USER]
    read = DIALECTS[RESPONSES].read(make_body(RESPONSES, items)).messages
    assert [(m["content"], len(m.get("tool_calls", ()))) for m in read] == [("Hi", 0), ("a", 2), ("b", 0), ("Hi", 0)]


@every_dialect
@given(body=junk)
def test_junk_is_a_dialect_error(path: str, body: Any) -> None:
    try:
        DIALECTS[path].read(body)
    except DialectError as error:
        assert str(error) and error.status == 400


@every_dialect
@given(data=st.data())
def test_a_body_with_one_wrong_place_is_read_or_a_dialect_error(path: str, data: st.DataObject) -> None:
    """Any value of a full body is replaced, anywhere in it, and any field is added."""
    body = copy.deepcopy(full_body(path))
    place: Any = body
    while True:
        key: Any = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            break
        place = inner
    if isinstance(place, dict) and data.draw(st.booleans()):
        key = data.draw(words)
    place[key] = data.draw(junk)
    try:
        call = DIALECTS[path].read(body)
    except DialectError as error:
        assert str(error) and len(str(error)) < 1_000 and error.status == 400
        json.dumps(DIALECTS[path].write_error(str(error), error.status, error.param)).encode()
    else:
        check_form(call)


def check_form(call: ChatRequest) -> None:
    assert call.model and isinstance(call.count, int) and 1 <= call.count <= 128
    for message in call.messages:
        assert message["role"] in ("system", "user", "assistant", "tool") and isinstance(message["content"], str)
        for one in message.get("tool_calls", ()):
            assert isinstance(one["function"]["arguments"], dict) and isinstance(one["id"], str)
    for tool in call.tools:
        assert tool["type"] == "function" and isinstance(tool["function"]["parameters"], dict)
    assert call.required_tool is False or call.tools
    assert call.temperature is None or call.temperature >= 0
    assert call.top_p is None or 0 < call.top_p <= 1


@every_dialect
def test_a_body_that_is_large_or_deep_is_refused(path: str) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for wrong, why in (({"x": deep}, "deep"), ({"x": [0] * 1_000_001}, "more than 1,000,000 values")):
        with pytest.raises(DialectError, match=why):
            DIALECTS[path].read({**full_body(path), "metadata": wrong})
    with pytest.raises(DialectError, match="at most 10,000"):
        DIALECTS[path].read(make_body(path, [USER] * 10_001))
