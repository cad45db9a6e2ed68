"""What many may ask for at once or for long: server-sent events, and questions that share an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

from rlvr.service.http.events import stream, written
from rlvr.service.http.runtime import Shared


async def said(*events: dict[str, Any], pause: float = 0.0) -> AsyncIterator[dict[str, Any]]:
    for event in events:
        await asyncio.sleep(pause)
        yield event


async def heard(told: AsyncIterator[bytes]) -> list[str]:
    return [piece.decode() async for piece in told]


def test_events_are_numbered_and_named_and_go_on_behind_a_number():
    events = ({"event": "status", "status": "running"}, {"event": "iteration", "iteration": 1}, {"event": "end"})
    whole = asyncio.run(heard(stream(said(*events))))
    assert whole[0] == "retry: 2000\n\n"
    assert whole[1] == 'id: 1\nevent: status\ndata: {"event": "status", "status": "running"}\n\n'
    assert [piece.split("\n")[0] for piece in whole[1:]] == ["id: 1", "id: 2", "id: 3"]
    assert asyncio.run(heard(stream(said(*events), after=2))) == [whole[0], whole[3]]


def test_what_a_model_wrote_cannot_end_or_begin_an_event():
    hostile = "x\n\nid: 99\nevent: end\rdata: {}\u2028\u0085"
    lines = written(1, {"event": "iteration", "generated_output": hostile}).decode().split("\n")
    assert [line.partition(":")[0] for line in lines] == ["id", "event", "data", "", ""]
    assert json.loads(lines[2].removeprefix("data: "))["generated_output"] == hostile
    assert lines[2].isascii() and "\r" not in lines[2]


def test_a_quiet_connection_says_that_it_stands():
    told = asyncio.run(heard(stream(said({"event": "end"}, pause=0.2), quiet_s=0.05)))
    assert told.count(": still here\n\n") >= 2 and told[-1].startswith("id: 1")


def test_a_watcher_that_leaves_ends_what_it_watched():
    closed: list[bool] = []

    async def endless() -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                yield {"event": "status"}
                await asyncio.sleep(60)
        finally:
            closed.append(True)

    async def leave() -> None:
        told = stream(endless(), quiet_s=0.01)
        for _ in range(4):  # retry, an event, and comments
            await anext(told)
        await told.aclose()  # pyright: ignore[reportAttributeAccessIssue]

    asyncio.run(leave())
    assert closed == [True]


def test_who_asks_while_a_question_is_answered_shares_the_next_answer_and_not_an_older_one():
    began: list[int] = []
    world = [0]

    async def ask() -> int:
        began.append(world[0])
        known = world[0]
        await asyncio.sleep(0.02)
        return known

    async def many() -> None:
        shared = Shared(ask)
        first = [asyncio.create_task(shared()) for _ in range(5)]
        await asyncio.sleep(0.01)
        world[0] = 1  # something was written, and only then asked for
        later = [asyncio.create_task(shared()) for _ in range(50)]
        assert await asyncio.gather(*first) == [0] * 5 and await asyncio.gather(*later) == [1] * 50
        world[0] = 2
        assert await shared() == 2

    asyncio.run(many())
    assert began == [0, 1, 2]


def test_a_question_may_be_asked_so_often_and_no_more():
    times = [0]

    async def ask() -> int:
        times[0] += 1
        return times[0]

    async def many() -> list[int]:
        shared = Shared(ask, every_s=0.1)
        told = [await shared(), await shared(), *await asyncio.gather(shared(), shared())]
        await asyncio.sleep(0.11)
        return [*told, await shared(), await shared()]

    assert asyncio.run(many()) == [1, 1, 1, 1, 2, 2]


def test_a_question_that_fails_fails_for_all_who_share_it_and_for_nobody_else():
    times = [0]

    async def ask() -> str:
        times[0] += 1
        if times[0] == 1:
            raise ValueError("away")
        return "here"

    async def many() -> None:
        shared = Shared(ask)
        told = await asyncio.gather(*(shared() for _ in range(3)), return_exceptions=True)
        assert [str(one) for one in told] == ["away"] * 3
        assert await shared() == "here"

    asyncio.run(many())
    assert times == [2]
