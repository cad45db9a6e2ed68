"""The harness `rlvr_chat` of verifiers: its own harness `null`, a chat with tools, without a new process per episode.

`null` starts a Python for each turn that a user or a game answers, and prepares its packages by `uv`. Here the same
conversation is held in the process of the environments. Each call goes to the interception server, as the contract of a
harness wants it. Needs verifiers; imports nothing of rlvr.
"""

from __future__ import annotations

import functools
import json
import ssl
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import certifi
import httpx
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null.harness import NullHarness
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.core import gate_tool_call
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

__all__ = ["RlvrChat"]


@functools.cache
def _load_certificates() -> ssl.SSLContext:
    """Once: it takes longer than the rest of a short episode."""
    return ssl.create_default_context(cafile=certifi.where())


class RlvrChat(NullHarness):
    async def setup(self, runtime: Any) -> None:
        return

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages += (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        )
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                httpx.AsyncClient(timeout=None, trust_env=False, verify=_load_certificates())
            )
            tools, dispatch, servers = [], {}, {}
            if mcp_urls:
                named = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
                tools, dispatch, servers = await connect_mcp({"mcpServers": named}, stack)
            while (answer := await self._ask(client, endpoint, secret, ctx.model, messages, tools)) is not None:
                trace.info.setdefault("rlvr_answers", []).append(answer["id"])
                message = {name: value for name, value in answer["choices"][0]["message"].items() if value is not None}
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    content = await self._run_tool(client, call, dispatch, servers, tool_interception_url, secret)
                    named = {"tool_call_id": call["id"], "name": call["function"]["name"], "content": content}
                    messages.append(bound_tool_message({"role": "tool", **named}))
        return ProgramResult(0, "", "")

    async def _ask(
        self, client: Any, endpoint: str, secret: str, model: str, messages: list[Any], tools: list[Any]
    ) -> dict[str, Any] | None:
        """The policy's answer; None if the conversation fits into its context no more."""
        body = {"model": model, "messages": messages, **({"tools": tools} if tools else {})}
        answer = await client.post(
            f"{endpoint}/chat/completions", json=body, headers={"authorization": f"Bearer {secret}"}
        )
        if answer.status_code == 400 and "context_length_exceeded" in answer.text:
            return None
        if answer.is_error:
            raise RuntimeError(f"the model's address answered {answer.status_code}: {answer.text:.500}")
        return answer.json()

    async def _run_tool(
        self, client: Any, call: dict[str, Any], dispatch: Any, servers: Any, gate: str | None, secret: str
    ) -> Any:
        """What a call of a tool gives; a mistake of the policy is told to it."""
        name, written = call["function"]["name"], call["function"].get("arguments") or "{}"
        if gate:
            function = SimpleNamespace(name=name, arguments=written)
            decision = await gate_tool_call(client, gate, secret, SimpleNamespace(id=call["id"], function=function))
            if decision["action"] == "deny":
                return decision["message"].get("content", "")
        try:
            arguments = json.loads(written)
        except ValueError as error:
            return f"error: the arguments are not JSON ({error}); send the call again with JSON"
        if not isinstance(arguments, dict):
            return f"error: the arguments are a JSON {type(arguments).__name__}; send an object"
        if name not in dispatch:
            return f"error: there is no tool {name!r}; the tools are {', '.join(dispatch) or 'none'}"
        return await call_mcp(servers, dispatch, name, arguments)
