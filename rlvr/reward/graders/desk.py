"""What graders work with while a batch is graded: connections to models, and the sandbox.

`python -m pytest tests/test_graders_models.py tests/test_graders_python.py` exercises it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from rlvr.http_line import Endpoint, Line
from rlvr.reward.code.reward import opened
from rlvr.sandbox import Sandbox

SHARED_SECONDS = 10.0  # of wall time, of which a busy machine gives a program a part


class Desk:
    """Opened for a batch, on the event loop that grades it; an endpoint that is down is asked once."""

    def __init__(self, sandbox: Sandbox | Mapping[str, Any] | None, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        # The shared sandbox has limits of its own, on processor time: who asks for more gets another.
        own = sandbox is None and timeout_s > SHARED_SECONDS
        self._sandbox = {"limits": {"timeout_s": timeout_s}} if own else sandbox
        self._lines: dict[int, Line] = {}
        self._stack = AsyncExitStack()
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Desk:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def line(self, endpoint: Endpoint) -> Line:
        if id(endpoint) not in self._lines:
            self._lines[id(endpoint)] = line = Line(endpoint)
            await self._stack.enter_async_context(line)
        return self._lines[id(endpoint)]

    async def sandbox(self) -> Sandbox:
        """The one asked for; OSError, RuntimeError or ValueError where none works here."""
        async with self._starting:
            return await asyncio.to_thread(opened, self._sandbox)
