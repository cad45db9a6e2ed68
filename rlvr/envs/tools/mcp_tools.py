"""Tools of a server of the Model Context Protocol, which runs here as a child process and is spoken to over its pipes.

    env: {name: tools, kwargs: {inner: gsm8k, tools: [{name: mcp, kwargs: {command: python, args: [server.py]}}]}}

One server answers the calls of all episodes, many at a time, so its tools must keep no state between calls. It checks
their arguments. It is stopped when its tools are no longer used. Left out on purpose: servers at an address, resources
and prompts, and questions of a server to its client.
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple

from pydantic import BaseModel

from rlvr.core.registry import did_you_mean
from rlvr.envs.tools.tool import ServerTool, Tool, ToolOutage, ToolProblem
from rlvr.reward.reward_options import check_number

EXTRA = "pip install 'rlvr[mcp]'"
START_SECONDS = 60.0


class _Connection(NamedTuple):
    client: Any
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    tools: list[Any]


class McpServer:
    """A running server. It stops when nothing holds this object, and with the process."""

    def __init__(self, command: str, args: Sequence[str], env: Mapping[str, str] | None, seconds: float) -> None:
        from mcp import StdioServerParameters

        self.name, self._seconds = " ".join([command, *args]), seconds
        parameters = StdioServerParameters(command=command, args=list(args), env=dict(env or {}))
        started: Future[_Connection] = Future()
        thread = threading.Thread(target=lambda: asyncio.run(_connect(parameters, started)), name="mcp", daemon=True)
        thread.start()
        try:
            self._connection = started.result()
        except Exception as error:
            raise ValueError(f"tool mcp: {self.name}: the server did not start ({_describe(error)})") from error
        weakref.finalize(self, _stop, self._connection, thread)

    @property
    def tools(self) -> list[ServerTool]:
        return [
            ServerTool(
                one.name,
                one.description or one.name,
                self._make_function(one.name),
                BaseModel,
                ends_late_calls=True,  # by the limit of a request
                parameters=one.input_schema,
            )
            for one in self._connection.tools
        ]

    def _make_function(self, name: str) -> Callable[..., str]:
        def call(**arguments: Any) -> str:
            from mcp import MCPError
            from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

            client, loop = self._connection.client, self._connection.loop
            calling = client.call_tool(name, arguments, read_timeout_seconds=self._seconds)
            try:
                result = asyncio.run_coroutine_threadsafe(calling, loop).result()
            except MCPError as error:
                if error.code == CONNECTION_CLOSED and self._has_ended():
                    raise ToolOutage(f"tool {name}: the server {self.name} has ended") from error
                if error.code == REQUEST_TIMEOUT:
                    raise ToolProblem(f"{name} took longer than {self._seconds:g} s") from None
                raise ToolProblem(error.message) from None
            text = read_result(result)
            if result.is_error:
                raise ToolProblem(text)
            return text

        return call

    def _has_ended(self) -> bool:
        """Whether the server is gone. The code for it is also one that a server may give to a call."""
        from mcp import MCPError

        asking = self._connection.client.list_tools(cache_mode="bypass")
        try:
            asyncio.run_coroutine_threadsafe(asking, self._connection.loop).result()
        except MCPError:
            return True
        return False


async def _connect(parameters: Any, started: Future[_Connection]) -> None:
    """Hold the connection open on this thread until it is to stop."""
    from mcp import Client

    try:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(START_SECONDS):
                client = await stack.enter_async_context(Client(parameters, read_timeout_seconds=START_SECONDS))
                page = await client.list_tools()
                tools = list(page.tools)
                while page.next_cursor:
                    page = await client.list_tools(cursor=page.next_cursor)
                    tools += page.tools
            stop = asyncio.Event()
            started.set_result(_Connection(client, asyncio.get_running_loop(), stop, tools))
            await stop.wait()
    except BaseException as error:
        if not started.done():
            started.set_exception(error)


def _stop(connection: _Connection, thread: threading.Thread) -> None:
    with suppress(RuntimeError):  # its loop has ended
        connection.loop.call_soon_threadsafe(connection.stop.set)
    if thread is not threading.current_thread():
        thread.join(10)


def read_result(result: Any) -> str:
    """The text of a `CallToolResult`: its parts, or its structured content where it has no parts."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(map(_read_part, result.content))


def _read_part(part: Any) -> str:
    if part.type == "resource":
        part = part.resource
        return getattr(part, "text", f"[resource {part.uri}]")
    return part.text if part.type == "text" else f"[{part.type}]"


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"it did not list its tools in {START_SECONDS:g} s"
    return f"{type(error).__name__}: {error}"


def mcp_tools(
    command: str,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    only: Sequence[str] | None = None,
    seconds: float = 10.0,
) -> list[Tool]:
    """The tools of the server that `command` starts, or those in `only`. A request is given up after `seconds`."""
    check_number("tool mcp: seconds", seconds, 0, above=True)
    try:
        tools = McpServer(command, args, env, seconds).tools
    except ModuleNotFoundError as error:
        raise ValueError(f"tool mcp: {error.name} is not installed; it needs the extra: {EXTRA}") from error
    by_name: dict[str, Tool] = {}
    for one in tools:
        if one.name in by_name:
            raise ValueError(f"tool mcp: {command} has two tools named {one.name!r}; each name has to be given once")
        by_name[one.name] = one
    for name in only or ():
        if name not in by_name:
            raise ValueError(
                f"tool mcp: only: {command} has no tool {name!r}{did_you_mean(name, by_name)}; it has "
                f"{', '.join(by_name)}"
            )
    return [by_name[name] for name in only or by_name]
