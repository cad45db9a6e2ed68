"""Server-sent events, and queries that share a result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

from rlvr.service.http.routes_sessions import encode_event, stream_events
from rlvr.service.http.runtime import CoalescedQuery


async def emit(*events: dict[str, Any], pause: float = 0.0) -> AsyncIterator[dict[str, Any]]:
    for event in events:
        await asyncio.sleep(pause)
        yield event


async def collect(chunks: AsyncIterator[bytes]) -> list[str]:
    return [piece.decode() async for piece in chunks]


def test_events_are_numbered_and_resume_after_a_number():
    events = ({"event": "status", "status": "running"}, {"event": "iteration", "iteration": 1}, {"event": "end"})
    whole = asyncio.run(collect(stream_events(emit(*events))))
    assert whole[0] == "retry: 2000\n\n"
    assert whole[1] == 'id: 1\nevent: status\ndata: {"event": "status", "status": "running"}\n\n'
    assert [piece.split("\n")[0] for piece in whole[1:]] == ["id: 1", "id: 2", "id: 3"]
    assert asyncio.run(collect(stream_events(emit(*events), after=2))) == [whole[0], whole[3]]


def test_model_output_cannot_end_or_start_an_event():
    hostile = "x\n\nid: 99\nevent: end\rdata: {}\u2028\u0085"
    lines = encode_event(1, {"event": "iteration", "generated_output": hostile}).decode().split("\n")
    assert [line.partition(":")[0] for line in lines] == ["id", "event", "data", "", ""]
    assert json.loads(lines[2].removeprefix("data: "))["generated_output"] == hostile
    assert lines[2].isascii() and "\r" not in lines[2]


def test_a_quiet_connection_gets_keepalive_comments():
    chunks = asyncio.run(collect(stream_events(emit({"event": "end"}, pause=0.2), quiet_s=0.05)))
    assert chunks.count(": still here\n\n") >= 2 and chunks[-1].startswith("id: 1")


def test_a_watcher_that_disconnects_closes_its_source():
    closed: list[bool] = []

    async def endless() -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                yield {"event": "status"}
                await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def leave() -> None:
        chunks = stream_events(endless(), quiet_s=0.01)
        for _ in range(4):  # retry, an event, and comments
            await anext(chunks)
        await chunks.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    asyncio.run(leave())
    assert closed == [True]


def test_a_call_during_a_query_shares_the_next_result():
    began: list[int] = []
    world = [0]

    async def ask() -> int:
        began.append(world[0])
        known = world[0]
        await asyncio.sleep(0.02)
        return known

    async def many() -> None:
        shared = CoalescedQuery(ask)
        first = [asyncio.create_task(shared()) for _ in range(5)]
        await asyncio.sleep(0.01)
        world[0] = 1  # something was written, and only then asked for
        later = [asyncio.create_task(shared()) for _ in range(50)]
        assert await asyncio.gather(*first) == [0] * 5 and await asyncio.gather(*later) == [1] * 50
        world[0] = 2
        assert await shared() == 2

    asyncio.run(many())
    assert began == [0, 1, 2]


def test_a_failed_query_fails_only_its_callers():
    times = [0]

    async def ask() -> str:
        times[0] += 1
        if times[0] == 1:
            raise ValueError("away")
        return "here"

    async def many() -> None:
        shared = CoalescedQuery(ask)
        chunks = await asyncio.gather(*(shared() for _ in range(3)), return_exceptions=True)
        assert [str(one) for one in chunks] == ["away"] * 3
        assert await shared() == "here"

    asyncio.run(many())
    assert times == [2]
