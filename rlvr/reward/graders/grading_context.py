"""What graders share while a batch is graded: connections to models, and the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from rlvr.core.chat_client import ChatClient, Endpoint
from rlvr.reward.code.code_reward import get_sandbox
from rlvr.sandbox import Sandbox

SHARED_SECONDS = 10.0  # of wall time, of which a busy machine gives a program a part


class GradingContext:
    """The sandbox and the endpoints' clients for grading one batch.

    The items share the clients, so an endpoint that is down is tried once. Open it on the event loop that grades.
    """

    def __init__(self, sandbox: Sandbox | Mapping[str, Any] | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        # The shared sandbox limits processor time: a longer timeout needs another one.
        own = sandbox is None and timeout_s > SHARED_SECONDS
        self._sandbox = {"limits": {"timeout_s": timeout_s}} if own else sandbox
        self._clients: dict[int, ChatClient] = {}
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> GradingContext:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def client(self, endpoint: Endpoint) -> ChatClient:
        if id(endpoint) not in self._clients:
            self._clients[id(endpoint)] = client = ChatClient(endpoint)
            await self._stack.enter_async_context(client)
        return self._clients[id(endpoint)]

    async def sandbox(self) -> Sandbox:
        """The configured sandbox; OSError, RuntimeError or ValueError where none works here."""
        async with self._starting:
            return await asyncio.to_thread(get_sandbox, self._sandbox)
