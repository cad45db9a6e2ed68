"""Server-sent events of a session, numbered so that a client that lost its connection can resume.

Exercised by tests/test_service_events.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from rlvr.core.fair_queue import current_owner
from rlvr.core.fair_slots import LoopTurns

QUIET_SECONDS = 15.0  # after which a comment keeps the connection open: proxies close silent ones


async def stream_events(
    events: AsyncIterator[dict[str, Any]],
    after: int = 0,
    quiet_s: float = QUIET_SECONDS,
    turns: LoopTurns | None = None,
) -> AsyncIterator[bytes]:
    """Encode the events after number `after`. `events` always starts with the session's first event. `turns`: an event
    may have thousands of watchers, and each encodes an answer; those of one owner go on one by one."""
    yield b"retry: 2000\n\n"
    number, waiting = 0, None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(events))
            await asyncio.wait((waiting,), timeout=quiet_s)
            if not waiting.done():
                yield b": still here\n\n"
                continue
            try:
                event = waiting.result()
            except StopAsyncIteration:
                return
            waiting, number = None, number + 1
            if turns is not None:
                await turns.take(current_owner())
            if number > after:
                yield encode_event(number, event)
    finally:
        if waiting is not None:
            waiting.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                await waiting
        await events.aclose()  # pyright: ignore[reportAttributeAccessIssue]


def encode_event(number: int, event: dict[str, Any]) -> bytes:
    """Encode one event. JSON escapes line breaks in strings, so an answer cannot end the event."""
    name = str(event.get("event", "message"))
    return f"id: {number}\nevent: {name}\ndata: {json.dumps(event, allow_nan=False)}\n\n".encode()
