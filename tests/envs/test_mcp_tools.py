"""Tools of a real server of the Model Context Protocol, over its pipes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.envs.limited_calls import count_stuck
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.registry import resolve_environment
from rlvr.envs.tools.builtin_tools import resolve_tools
from rlvr.envs.tools.tool import Toolbox, ToolOutage
from rlvr.rollout import open_groups, rollout
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE
from tests.kit.packages import need_package

need_package("mcp", "the extra [mcp] is not installed")

SERVER = {"command": sys.executable, "args": [str(Path(__file__).parents[1] / "kit" / "mcp_server_of_tests.py")]}


def tools(**kwargs: Any) -> list[Any]:
    return resolve_tools({"name": "mcp", "kwargs": {**SERVER, **kwargs}})


@pytest.fixture(scope="module")
def box() -> Toolbox:
    return Toolbox(tools())


def call(box: Toolbox, name: str, arguments: Any = None, seconds: float = 60.0) -> tuple[str, bool]:
    return asyncio.run(box.call(name, arguments if arguments is not None else {}, seconds))


def test_a_tool_has_the_words_of_its_server(box: Toolbox) -> None:
    schema = next(tool.schema for tool in box.tools if tool.name == "multiply")["function"]
    assert schema["description"] == "The product of two numbers."
    assert schema["parameters"]["required"] == ["a"]
    assert {name: field["type"] for name, field in schema["parameters"]["properties"].items()} == {
        "a": "integer",
        "b": "integer",
    }


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("multiply", {"a": 6, "b": 7}, ("42", True)),
        ("multiply", {"a": 6}, ("12", True)),
        ("multiply", ["6", "7"], ("42", True)),
        ("draw", {}, ("[image]\ndrawn", True)),
    ],
)
def test_a_call_is_answered_by_the_server(box: Toolbox, name: str, arguments: Any, expected: tuple[str, bool]) -> None:
    assert call(box, name, arguments) == expected


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("multiply", {"a": "six"}, "valid integer"),
        ("multiply", {}, "Field required"),
        ("multiply", ["1", "2", "3"], "multiply takes a, b; 3 arguments were given"),
        ("fail", {"what": "hope"}, "Error executing tool fail"),
        ("multipli", {"a": 6}, "did you mean 'multiply'"),
    ],
)
def test_what_goes_wrong_is_a_result(box: Toolbox, name: str, arguments: Any, words: str) -> None:
    text, is_good = call(box, name, arguments)
    assert words in text and text.startswith("error: ") and not is_good


def test_every_part_of_a_result_is_read() -> None:
    from mcp_types import BlobResourceContents, CallToolResult, EmbeddedResource, TextContent, TextResourceContents

    from rlvr.envs.tools.mcp_tools import read_result

    page = TextResourceContents(uri="file:///page", text="of a page")
    data = BlobResourceContents(uri="file:///data", blob="AAAA")
    parts = [TextContent(text="first"), *(EmbeddedResource(resource=one) for one in (page, data))]
    assert read_result(CallToolResult(content=parts)) == "first\nof a page\n[resource file:///data]"
    assert read_result(CallToolResult(content=[], structured_content={"é": [1]})) == '{"é": [1]}'
    assert read_result(CallToolResult(content=[], structured_content=False)) == "false"
    assert read_result(CallToolResult(content=[])) == ""


def test_two_tools_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlvr.envs.tools.mcp_tools import McpServer

    given = McpServer.tools.fget(McpServer(**SERVER, env=None, seconds=10.0))
    monkeypatch.setattr(McpServer, "tools", property(lambda self: [*given, given[0]]))
    with pytest.raises(ValueError, match=f"has two tools named '{given[0].name}'"):
        tools()


def test_a_tool_without_parameters_has_none() -> None:
    from rlvr.envs.tools.tool import ServerTool

    def nothing() -> str:
        return ""

    for schema in ({}, {"properties": None}, {"properties": {}}):
        assert ServerTool("a", "b", nothing, dict, parameters=schema).names == []


def test_limits_hold_and_the_server_goes_on(box: Toolbox) -> None:
    text, is_good = call(box, "flood")
    assert is_good and text == "x" * 4_000 + "\n[cut: 1,048,576 characters, 4,000 shown]"
    began = time.monotonic()
    assert call(box, "sleep", {"seconds": 3.0}, 0.3) == ("error: sleep took longer than 0.3 s", False)
    assert time.monotonic() - began < 2.5 and call(box, "multiply", {"a": 6})[0] == "12"


def test_calls_run_at_once(box: Toolbox) -> None:
    async def gather() -> list[tuple[str, bool]]:
        return await asyncio.gather(*(box.call("multiply", {"a": n}, 60.0) for n in range(20)))

    assert asyncio.run(gather()) == [(str(2 * n), True) for n in range(20)]


def test_a_server_that_ended_ends_the_run() -> None:
    box = Toolbox(tools(only=["die", "multiply"]))
    for _ in range(2):
        with pytest.raises(ToolOutage, match="has ended"):
            call(box, "die")


def test_a_request_that_is_given_up_frees_its_thread() -> None:

    box = Toolbox(tools(only=["sleep"], seconds=0.5))
    assert call(box, "sleep", {"seconds": 2.0}, 60.0) == ("error: sleep took longer than 0.5 s", False)
    assert not count_stuck()


def test_late_requests_end_by_themselves_and_are_no_outage() -> None:
    box = Toolbox(tools(only=["sleep"], seconds=1.0), seconds=0.1)

    async def gather() -> list[tuple[str, bool]]:
        return await asyncio.gather(*(box.call("sleep", {"seconds": 2.0}, 60.0) for _ in range(20)))

    # Where the machine is busy, the request's own limit of a second can be noticed before the call's.
    late = {(f"error: sleep took longer than {seconds} s", False) for seconds in ("0.1", "1")}
    for _ in range(2):
        assert set(asyncio.run(gather())) <= late


def test_an_error_with_the_code_of_an_ended_server_is_a_result(box: Toolbox) -> None:
    text, is_good = call(box, "close")
    assert "so it seems" in text and not is_good and call(box, "multiply", {"a": 6})[0] == "12"


def test_the_server_ends_with_its_tools() -> None:
    made = tools(only=["environment", "process"], env={"PLACE": "here"})
    assert call(Toolbox(made), "environment", {"name": "PLACE"}) == ("here", True)
    process = int(call(Toolbox(made), "process")[0])
    os.kill(process, 0)
    del made
    gc.collect()
    deadline = time.monotonic() + 30  # the thread of the last call may hold the tools for a moment
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{process}").exists()


def test_an_episode_with_a_server(tmp_path: Path) -> None:
    text = chat_tokenizer()
    text.chat_template = TOOLS_TEMPLATE
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n} x 6?", "answer": "42"}}\n' for n in "789"))
    inner = {"path": str(tmp_path / "rows.jsonl"), "reward": "exact_match"}
    given = [{"name": "mcp", "kwargs": {**SERVER, "only": ["multiply", "inject"]}}]
    made = apply_prompt_options(
        resolve_environment("tools", inner="dataset", inner_kwargs=inner, tools=given), text, PromptOptions()
    )

    def use(name: str, **arguments: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    turns = iter([use("multiply", a=7, b=6) + use("inject"), "42"])
    sampler = ScriptedSamplingClient(
        text, lambda i: [*text.encode(next(turns), add_special_tokens=False), text.eos_token_id]
    )
    groups = open_groups(made, [made.train(0, 0, "")], 1, text, "g")
    (t,) = rollout(groups, sampler, SamplingParams(max_tokens=900), seed=1)
    added = [token for token, mask in zip(t.response_tokens, t.action_mask, strict=True) if not mask]
    assert "<|im_start|>tool\n42<|im_end|>" in text.decode(added) and t.answer == "42"
    assert text.decode(added).count("<|im_start|>") == 3, "of the template, two results and the next turn"
    assert "The product of two numbers." in text.decode(t.prompt_tokens)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"command": "no-such-command"}, "no-such-command.*did not start"),
        ({"args": ["-c", "raise SystemExit(3)"]}, "did not start"),
        ({"only": ["multipli"]}, "no tool 'multipli' .did you mean 'multiply'"),
        ({"seconds": 0}, "seconds"),
        ({"comand": "python"}, "comand"),
    ],
)
def test_what_is_no_server_is_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tools(**kwargs)
