"""The fair queue: owners and their groups take turns, and in the sandbox no owner waits for another one's batch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from rlvr.core.cancellation import run_with
from rlvr.core.chat_client import ChatClient, Cost, Endpoint
from rlvr.core.fair_queue import FairQueue, become_owner, current_owner, run_as_owner
from rlvr.core.fair_slots import FairSlots, FairThreads
from rlvr.core.types import Outcome
from rlvr.sandbox import NoTier, Sandbox, Verdict
from tests.kit.text_endpoint import serving

ENDLESS = {"solution": "def f():\n    while True: pass\n", "tests": ["assert f() == 1"], "timeout_s": 1.0}
QUICK = {"solution": "def f(): return 1", "tests": ["assert f() == 1"]}


def test_owners_take_turns_and_so_do_the_groups_of_an_owner():
    queue = FairQueue[str]()
    for number in range(3):
        queue.add("a", "first", f"a1.{number}")
    queue.add("a", "second", "a2.0")
    queue.add("b", "only", "b.0")
    assert (len(queue), queue.count("a"), queue.count("b"), queue.count("c")) == (5, 4, 1, 0)
    assert [queue.pop() for _ in range(6)] == ["a1.0", "b.0", "a2.0", "a1.1", "a1.2", None]
    assert not queue


def test_what_does_not_fit_is_skipped_and_what_is_unwanted_goes():
    queue = FairQueue[int]()
    for owner, number in (("a", 1), ("a", 2), ("b", 3), ("b", 4)):
        queue.add(owner, owner, number)
    assert queue.pop(lambda number: number > 2) == 3
    assert queue.remove(lambda number: number % 2 == 0) == [2, 4]
    assert (queue.pop(), queue.pop()) == (1, None)


def test_the_owner_holds_for_the_work_alone():
    assert run_as_owner("me", current_owner) == "me" and current_owner() == ""


def test_an_owner_leaves_slots_to_others_and_a_cancelled_turn_gives_its_slot_back():
    async def run() -> None:
        slots, release, order = FairSlots(4), asyncio.Event(), list[str]()

        async def work(owner: str, group: str = "") -> None:
            async with slots.hold(owner, group):
                order.append(owner)
                await release.wait()

        greedy = [asyncio.create_task(work("greedy")) for _ in range(8)]
        await asyncio.sleep(0)
        other = asyncio.create_task(work("other"))
        await asyncio.sleep(0.01)
        assert order == ["greedy"] * 3 + ["other"] and slots.waiting("greedy") == 5
        greedy[0].cancel()
        greedy[-1].cancel()  # one that waits
        await asyncio.sleep(0.01)
        assert order[4:] == ["greedy"] and slots.waiting() == 3
        slots.refuse_waiting(ValueError("closed"))
        release.set()
        ended = await asyncio.gather(*greedy, other, return_exceptions=True)
        assert [type(one) for one in ended].count(ValueError) == 3
        await asyncio.wait_for(asyncio.gather(*(work("late") for _ in range(8))), 5)

    asyncio.run(run())


def test_an_owner_leaves_threads_to_others_and_work_without_an_owner_gets_all():
    release, at_once, most = threading.Event(), list[str](), 4

    def work() -> str:
        at_once.append(current_owner())
        release.wait(10)
        return current_owner()

    async def ask(owner: str) -> str:
        become_owner(owner)
        return await asyncio.to_thread(work)

    async def run(owners: list[str]) -> list[str]:
        asyncio.get_running_loop().set_default_executor(FairThreads(most, "test"))
        release.clear()
        at_once.clear()
        tasks = [asyncio.create_task(ask(owner)) for owner in owners]
        while len(at_once) < most:
            await asyncio.sleep(0.01)
        begun = sorted(at_once)
        release.set()
        await asyncio.gather(*tasks)
        return begun

    assert asyncio.run(run(["greedy"] * 12 + ["other"])) == ["greedy"] * 3 + ["other"]
    assert asyncio.run(run([""] * 12)) == [""] * 4


def test_owners_never_keep_work_without_an_owner_waiting():
    release, threads = threading.Event(), FairThreads(2, "test", unowned=1)
    busy = [run_as_owner(owner, threads.submit, release.wait, 10) for owner in ("a", "b", "c", "a")]
    try:
        assert threads.submit(lambda: "free").result(10) == "free"
        assert run_as_owner("d", threads.submit, lambda: "waits").running() is False
        assert sum(one.running() for one in busy) == 2
    finally:
        release.set()
        threads.shutdown()


def test_a_slot_is_held_until_its_call_ends_also_without_its_caller():
    async def run() -> None:
        slots, release, begun = FairSlots(1), threading.Event(), threading.Event()

        def work() -> str:
            begun.set()
            release.wait(10)
            return current_owner()

        become_owner("me")
        left = asyncio.create_task(slots.run("me", work))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        after = asyncio.create_task(slots.run("me", work))
        await asyncio.sleep(0.05)
        assert slots.waiting("me") == 1
        release.set()
        assert await after == "me"

    asyncio.run(run())


def test_a_host_name_is_looked_up_while_its_owners_threads_are_all_busy():
    """The event loop looks names up in its threads; a connection that waits for one there times out."""
    release = threading.Event()

    async def run() -> str:
        threads = FairThreads(4, "test", unowned=1)
        asyncio.get_running_loop().set_default_executor(threads)
        become_owner("me")
        for _ in range(8):
            threads.submit(release.wait, 60)
        try:
            with serving(lambda asked: "found") as server:
                url = server.chat_url.replace("127.0.0.1", "localhost")
                async with ChatClient(Endpoint(url, "m", retries=0)) as client:
                    reply = await client.ask({"messages": [{"role": "user", "content": "Say it."}]}, Cost())
                    assert current_owner() == "me"
                    return reply.text
        finally:
            release.set()

    assert asyncio.run(run()) == "found"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        made = Sandbox(workers=1)
    except NoTier as refused:
        pytest.skip(str(refused))
    with made:
        yield made


def start_batch(sandbox: Sandbox, owner: str, count: int) -> tuple[threading.Thread, threading.Event]:
    """A batch of endless programs, and the event that cancels it."""
    event = threading.Event()

    def verify() -> None:
        with pytest.raises(RuntimeError, match="cancelled"):
            run_with(event, run_as_owner, owner, sandbox.verify_many, [ENDLESS] * count)

    thread = threading.Thread(target=verify)
    thread.start()
    return thread, event


def test_another_owner_waits_for_one_program_not_for_the_batch(sandbox: Sandbox):
    sandbox.verify(**QUICK)
    thread, event = start_batch(sandbox, "greedy", 8)
    time.sleep(0.2)
    began = time.perf_counter()
    assert run_as_owner("other", lambda: sandbox.verify(**QUICK)).passed
    assert time.perf_counter() - began < 3.0, "8 programs take more than 8 s"
    event.set()
    thread.join()


def test_a_cancelled_batch_frees_the_sandbox_at_once(sandbox: Sandbox):
    thread, event = start_batch(sandbox, "gone", 30)
    time.sleep(0.3)
    began = time.perf_counter()
    event.set()
    thread.join()
    assert sandbox.verify(**QUICK).passed
    assert time.perf_counter() - began < 10, "the 30 programs would take their time limits one after another"


def test_a_cancelled_coroutine_kills_its_program(sandbox: Sandbox):
    async def leave_early() -> float:
        running = asyncio.create_task(sandbox.averify(**{**ENDLESS, "timeout_s": 20.0}))
        waiting = asyncio.create_task(sandbox.averify(**{**ENDLESS, "timeout_s": 20.0}))
        await asyncio.sleep(0.3)
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        began = time.perf_counter()
        assert (await sandbox.averify(**QUICK)).passed
        return time.perf_counter() - began

    assert asyncio.run(leave_early()) < 3.0


def test_a_sandbox_that_closes_gives_waiting_programs_an_error():
    with Sandbox(workers=1) as closing:
        verdicts: list[Verdict] = []
        thread = threading.Thread(target=lambda: verdicts.extend(closing.verify_many([ENDLESS] * 20)))
        thread.start()
        time.sleep(0.3)
        began = time.perf_counter()
    thread.join()
    assert time.perf_counter() - began < 5.0
    assert {(verdict.outcome, verdict.reason) for verdict in verdicts} == {(Outcome.ERROR, "sandbox")}
