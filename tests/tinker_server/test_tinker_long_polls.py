"""Thousands of polls and of results of one owner: what they cost others in the moment in which they end."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

from rlvr.tinker_server.backend.request_futures import FutureRegistry, JsonResult, LostRequest, Pending, ResultFuture
from rlvr.tinker_server.http.tinker_middleware import LongPolls


@pytest.mark.parametrize("ends_by", ["result", "timeout"])
def test_polls_that_end_in_one_moment_do_not_stand_before_another_owners(ends_by: str) -> None:
    events: list[str] = []

    async def run() -> None:
        polls, futures = LongPolls(5.0), FutureRegistry(60.0, 1 << 20)
        future = futures.create("anna:1", "anna")
        assert future is not None

        async def poll(owner: str, wait: Any) -> None:
            await polls.hold(owner, wait)
            events.append(owner)

        async def begin_with_the_first() -> None:
            while not events:
                await asyncio.sleep(0)
            await poll("bob", asyncio.sleep(0))

        seconds = 60.0 if ends_by == "result" else 0.05
        tasks = [asyncio.create_task(poll("anna", futures.wait(future, seconds))) for _ in range(100)]
        tasks.append(asyncio.create_task(begin_with_the_first()))
        await asyncio.sleep(0.01)
        if ends_by == "result":
            futures.resolve(future, JsonResult({}))
        else:
            time.sleep(0.1)  # their time is over in the same round of the loop
        await asyncio.gather(*tasks)
        assert events.index("bob") < 20 and events.count("anna") == 100
        assert not future.waiters

    asyncio.run(run())


def test_a_poll_that_waits_for_its_turn_ends_when_the_server_stops() -> None:
    async def run() -> None:
        polls, ended = LongPolls(5.0), asyncio.Event()

        async def poll() -> bool | None:
            return await polls.hold("anna", ended.wait())

        tasks = [asyncio.create_task(poll()) for _ in range(5)]
        await asyncio.sleep(0)
        ended.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        polls.close()
        found = await asyncio.gather(*tasks)
        assert set(found) <= {True, None} and not polls._polls

    asyncio.run(run())


class CountedDict(OrderedDict[str, ResultFuture]):
    """Counts the values that are looked at."""

    looked_at = 0

    def values(self) -> Any:
        for value in super().values():
            self.looked_at += 1
            yield value


def test_a_new_result_looks_at_no_result_that_stays() -> None:
    futures = FutureRegistry(60.0, 1 << 30)
    futures._done = done = CountedDict()
    for number in range(200):
        future = futures.create(f"s:{number}", "anna", group="s/0", session="s")
        assert future is not None
        futures.resolve(future, JsonResult({}))
    assert done.looked_at <= 200 and len(done) == 200 and not futures.unfinished_samples()


def test_results_of_too_many_bytes_go_the_oldest_first_and_pinned_ones_stay() -> None:
    now = [0.0]
    futures = FutureRegistry(60.0, 3 * 1_024, lambda: now[0])
    made = [futures.create(f"s:{number}", "anna", pinned=number == 0) for number in range(5)]
    for future in made:
        assert future is not None
        futures.resolve(future, JsonResult({}))
    assert [futures.find(f"s:{number}") is not None for number in range(5)] == [True, False, False, True, True]
    now[0] = 61.0
    futures.trim()
    assert [futures.find(f"s:{number}") is not None for number in range(5)] == [True, False, False, False, False]


def test_unfinished_samples_are_those_without_an_outcome() -> None:
    async def run() -> None:
        futures = FutureRegistry(60.0, 1 << 30)
        first, second = (futures.create(f"s:{number}", "anna", group="s/0", session="s") for number in range(2))
        assert first is not None and second is not None and futures.create("train:1", "anna") is not None
        futures.resolve(first, JsonResult({}))
        assert futures.unfinished_samples() == [second]
        assert await futures.wait(second, 0.01) == Pending() and not second.waiters

    asyncio.run(run())


def test_the_first_outcome_of_a_request_stays() -> None:
    futures = FutureRegistry(60.0, 1 << 30)
    future = futures.create("s:0", "anna", group="s/0", session="s")
    assert future is not None
    futures.resolve(future, JsonResult({"first": 1}))
    futures.resolve(future, LostRequest())
    assert futures.find("s:0") is future and future.outcome == JsonResult({"first": 1})


def finish(futures: FutureRegistry, name: str) -> None:
    future = futures.create(name, "anna", group="s/0", session="s")
    assert future is not None
    futures.resolve(future, JsonResult({}))


def test_a_poll_for_many_goes_on_when_the_time_of_day_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's cursor outlives its group, whose first number is the time of day."""

    async def run() -> None:
        futures, now = FutureRegistry(60.0, 1 << 30), time.time()
        monkeypatch.setattr(time, "time", lambda: now)
        finish(futures, "a")
        cursor = (await futures.wait_for_group("s/0", 0, [], 1.0)).cursor
        assert (await futures.wait_for_group("s/0", cursor, ["a"], 0.01)).samples == []
        futures.trim()
        now -= 3_600
        for names in (["b", "c"], ["d"]):
            for name in names:
                finish(futures, name)
            found = await futures.wait_for_group("s/0", cursor, [], 1.0)
            assert [sample.request_id for sample in found.samples] == names and found.cursor > cursor
            cursor = found.cursor
        assert (await futures.wait_for_group("s/0", cursor, [], 0.01)).samples == []

    asyncio.run(run())


def test_results_stay_when_the_time_of_day_is_set_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    futures, now = FutureRegistry(60.0, 1 << 30), time.time()
    finish(futures, "a")
    monkeypatch.setattr(time, "time", lambda: now + 86_400)
    futures.trim()
    finish(futures, "b")
    assert futures.find("a") is not None and futures.find("b") is not None
