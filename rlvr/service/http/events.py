"""Server-sent events of a session: numbered, so that a client which lost its connection goes on where it was.

Exercised by tests/test_service_events.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

QUIET_SECONDS = 15.0  # after which a comment says that the connection stands; proxies close silent ones


async def stream(
    told: AsyncIterator[dict[str, Any]], after: int = 0, quiet_s: float = QUIET_SECONDS
) -> AsyncIterator[bytes]:
    """The events behind number `after`. `told` begins with the session's first event, whenever it is asked."""
    yield b"retry: 2000\n\n"
    number, waiting = 0, None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(told))
            await asyncio.wait((waiting,), timeout=quiet_s)
            if not waiting.done():
                yield b": still here\n\n"
                continue
            try:
                event = waiting.result()
            except StopAsyncIteration:
                return
            waiting, number = None, number + 1
            if number > after:
                yield written(number, event)
    finally:
        if waiting is not None:
            waiting.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                await waiting
        await told.aclose()  # pyright: ignore[reportAttributeAccessIssue]


def written(number: int, event: dict[str, Any]) -> bytes:
    """One event. JSON has no line breaks outside of strings, and escapes those inside: an answer cannot end it."""
    name = str(event.get("event", "message"))
    return f"id: {number}\nevent: {name}\ndata: {json.dumps(event, allow_nan=False)}\n\n".encode()
