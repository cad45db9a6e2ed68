"""A tool is a typed function: its schema, the check of a call, and every way in which a call can go wrong."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tools_of_tests as given

from rlvr.chat.tool_calls import ToolCallFormat, WordCallFormat
from rlvr.envs import limited_calls
from rlvr.envs.tools.tool import Tool, Toolbox, ToolOutage


def call(toolbox: Toolbox, name: str, arguments: Any, seconds: float = 5.0) -> tuple[str, bool]:
    return asyncio.run(toolbox.call(name, arguments, seconds))


FUNCTIONS = (given.add, given.shout, given.fail, given.flood, given.sleep, given.leave, given.show)
BOX = Toolbox([Tool.of(one) for one in FUNCTIONS], seconds=0.3, most_characters=100)


def test_the_schema_is_what_chat_templates_take() -> None:
    assert Tool.of(given.add).schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
            },
        },
    }
    text = Tool.of(given.shout).schema["function"]["parameters"]["properties"]["text"]
    assert text == {"type": "string", "description": "what to shout", "minLength": 1}


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", {"a": 2, "b": 3}, "5"),
        ("add", {"a": "2"}, "3"),
        ("add", ["2", "3"], "5"),
        ("shout", {"text": "hey"}, "HEY"),
        ("show", {"rows": [{"x": 1}, {"y": 2}]}, "[1, 2]"),
    ],
)
def test_a_call_gets_its_result(name: str, arguments: Any, result: str) -> None:
    assert call(BOX, name, arguments) == (result, True)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("ad", {"a": 1}, "there is no tool 'ad' (did you mean 'add'?); use add, shout"),
        ("add", {}, "add takes a, b; a: Field required"),
        ("add", {"a": "two"}, "a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 2}, "c: Extra inputs are not permitted"),
        ("add", ["1", "2", "3"], "add takes a, b; 3 arguments were given"),
        ("shout", {"text": ""}, "at least 1 character"),
        ("fail", {"what": "bread"}, "LookupError: no bread here"),
        ("sleep", {"seconds": 1.0}, "sleep took longer than 0.3 s"),
        ("leave", {}, "SystemExit: 3"),
        ("add", {"a": 10**5000}, "error: "),
    ],
)
def test_a_call_that_fails_says_why_and_ends_nothing(name: str, arguments: Any, words: str) -> None:
    text, is_good = call(BOX, name, arguments)
    assert not is_good and text.startswith("error: ") and words in text
    assert call(BOX, "add", {"a": 1}) == ("2", True)


def test_a_megabyte_is_cut_and_says_so() -> None:
    text, is_good = call(BOX, "flood", {"count": 1 << 20})
    assert is_good and text == "x" * 100 + "\n[cut: 1,048,576 characters, 100 shown]"


def test_many_calls_run_at_once_and_too_many_stuck_ones_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_at_once() -> list[tuple[str, bool]]:
        return await asyncio.gather(*(BOX.call("sleep", {"seconds": 0.1}, 5) for _ in range(40)))

    began = time.monotonic()
    assert asyncio.run(all_at_once()) == [("slept", True)] * 40
    assert time.monotonic() - began < 3
    monkeypatch.setattr(limited_calls, "_stuck", {threading.Thread() for _ in range(limited_calls.MOST_STUCK)})
    with pytest.raises(ToolOutage, match="late calls of tools have not ended"):
        call(BOX, "sleep", {"seconds": 0})


class Rude:
    def __str__(self) -> str:
        raise SystemExit(4)


def be_rude() -> Any:
    """Its result has no text."""
    return Rude()


async def leave_later() -> None:
    """A coroutine function that asks to end the process."""
    raise SystemExit(5)


async def hold_on() -> str:
    """A coroutine function that will not be cancelled and blocks its loop."""
    time.sleep(1.0)
    return "late"


def time_out() -> None:
    """The tool's own limit."""
    raise TimeoutError("the server did not answer")


def echo(what: str) -> str:
    """The same text."""
    return what


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (be_rude, {}, "error: SystemExit: 4"),
        (leave_later, {}, "error: SystemExit: 5"),
        (hold_on, {}, "error: hold_on took longer than 0.3 s"),
        (time_out, {}, "error: TimeoutError: the server did not answer"),
        (echo, {"what": "a\ud800b"}, "a?b"),
    ],
)
def test_whatever_a_tool_does_its_call_has_a_text(function: Callable[..., Any], arguments: Any, text: str) -> None:
    found, is_good = call(Toolbox([Tool.of(function)], seconds=0.3), function.__name__, arguments)
    assert (found, is_good) == (text, function is echo)


def test_arguments_come_in_the_order_of_the_function() -> None:
    assert list(Tool.of(given.add).check({"b": 1, "a": 2})) == ["a", "b"]


def test_a_tool_with_a_limit_of_its_own_is_never_late() -> None:
    box = Toolbox([Tool.of(given.sleep, has_own_limit=True)], seconds=0.1)
    assert call(box, "sleep", {"seconds": 0.4}) == ("slept", True)


def hidden(_a: int) -> int:
    """A tool."""
    return _a


def odd(a: threading.Thread) -> int:
    """A tool."""
    return 1


def untyped(a) -> str:  # type: ignore[no-untyped-def]
    """A tool."""
    return a


def starred(*a: int) -> int:
    """A tool."""
    return sum(a)


def silent(a: int) -> int:
    return a


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (untyped, "parameter 'a' has no type"),
        (hidden, "without _ before it"),
        (odd, "a type that JSON cannot write"),
        (starred, "give every argument a name"),
        (silent, "no docstring"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tool.of(function)


@pytest.mark.parametrize("tools", [[], [Tool.of(given.add), Tool.of(given.add)]])
def test_a_toolbox_has_each_name_once(tools: list[Tool]) -> None:
    with pytest.raises(ValueError, match=r"give at least one.*and each name once"):
        Toolbox(tools)


WORDS = WordCallFormat()


@pytest.mark.parametrize(
    ("said", "rest", "calls"),
    [
        ("<call> add 3 5 </call>", "", [("add", ["3", "5"])]),
        ("I add <call>add 3 5</call> now", "I add  now", [("add", ["3", "5"])]),
        ("<call> a </call> <call> b 1 </call>", "", [("a", []), ("b", ["1"])]),
        ("<call> add 3 5", "<call> add 3 5", []),
        ("<call> </call>", "<call> </call>", []),
        ("add 3 5 </call>", "add 3 5 </call>", []),
    ],
)
def test_calls_as_words(said: str, rest: str, calls: list[Any]) -> None:
    assert WORDS.split(said) == (rest, calls)


def test_no_completion_breaks_the_reading_or_the_calling() -> None:
    """500 made of pieces of calls: malformed JSON, nested calls, wrong types, huge numbers, unknown tools."""
    json_calls = ToolCallFormat("<tool_call>", "</tool_call>", "name", "arguments")
    whole = json.dumps({"name": "add", "arguments": {"a": 1}})
    pieces = ["<tool_call>", "</tool_call>", "<call>", "</call>", '{"name": "add", "arguments": {"a": ', "1", "}}"]
    pieces += [whole, "[[", '"\\ud800"', "9" * 5000, "1e999", "null", '{"name": ["add"], "arguments": 3}', "add"]
    pieces += [" ", "\n", "NaN", "\x00", "🙂"]
    draw = random.Random(7)
    for _ in range(500):
        said = "".join(draw.choice(pieces) for _ in range(draw.randrange(1, 12)))
        for form in (json_calls, WORDS):
            for name, arguments in form.split(said)[1]:
                text, _ = call(BOX, name, arguments)
                assert len(text) < 200


def test_reading_calls_is_linear_in_the_text() -> None:
    """Times of a text and of one ten times as long; read in quadratic time they differ by a hundred."""
    json_calls = ToolCallFormat("<tool_call>", "</tool_call>", "name", "arguments")
    call_text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    for piece in (call_text, "<tool_call>", "<tool_call> [[", '<tool_call>{"'):
        seconds = []
        for count in (3_000, 30_000):
            began = time.process_time()
            found = json_calls.split(piece * count)[1]
            seconds.append(time.process_time() - began)
            assert len(found) == (count if piece == call_text else 0)
        assert seconds[1] < 40 * seconds[0] + 0.5, piece


def test_a_late_call_counts_as_stuck_until_it_ends_unless_it_ends_by_itself() -> None:
    for limit, stuck in ((limited_calls.run_ending_call, 0), (limited_calls.run_in_thread, 1)):
        before, end = limited_calls.count_stuck(), threading.Event()
        with pytest.raises(TimeoutError):
            asyncio.run(limit(end.wait, 0.01))
        assert limited_calls.count_stuck() - before == stuck
        end.set()
