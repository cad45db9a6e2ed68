"""Failures around a session end it with a code and keep its answers: endpoints, judges, databases, kills."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rlvr.clients.endpoint import text_endpoint
from rlvr.core.fair_queue import run_as_owner
from rlvr.service.generators.endpoint_generator import EndpointGenerator
from rlvr.service.service_options import SessionRequest
from rlvr.service.sessions.live_session import LiveSession
from rlvr.service.sessions.session_writer import SessionWriter
from rlvr.service.sessions.verification import build_verifiable_task
from rlvr.service.settings import Settings, TextEndpoint
from rlvr.store import StoreDown, open_store
from rlvr.store.records import Session, Status
from tests.kit.rlvr_service import RlvrService
from tests.kit.session_fixtures import CODE, RIGHT, open_sessions, run_session, settings_of
from tests.kit.text_endpoint import EndpointReply, EndpointRequest, Script, serving, unused_port

WRONG = "def double(x):\n    return x\n"
BODY = {"task_id": "double", "prompt": CODE.prompt, "tests": list(CODE.tests), "max_iterations": 4}


def first_then(*later: EndpointReply) -> Script:
    """A wrong answer, then something worse."""
    return lambda asked: WRONG if asked.number == 0 else later[min(asked.number - 1, len(later) - 1)]


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (first_then(EndpointReply(status=500)), "endpoint_unreachable"),
        (first_then(EndpointReply(status=429, headers={"retry-after": "0"})), "endpoint_rate_limited"),
        (first_then(EndpointReply(raw="<html>no JSON</html>")), "endpoint_bad_reply"),
        (first_then(EndpointReply("")), "empty_answer"),
        (first_then(EndpointReply(status=401)), "endpoint_refused"),
        (first_then(EndpointReply(close="within")), "endpoint_unreachable"),
    ],
)
def test_a_failing_endpoint_ends_the_session_with_its_code_and_keeps_the_answers(
    tmp_path: Path, script: Script, code: str
):
    async def run() -> None:
        with serving(script) as server:
            session, answer, kept = await against(settings_of(tmp_path, server.plain_url), server.plain_url)
        assert session.status is Status.FAILED
        assert session.error is not None and session.error["code"] == code
        assert "log says why" in session.error["message"] and "127.0.0.1" not in session.error["message"]
        assert [e["generated_output"] for e in answer["training_data"]] == [WRONG] == kept
        assert (answer["final_solution"], answer["confidence"], answer["iterations"]) == (WRONG, 0.0, 1)

    asyncio.run(run())


async def against(settings: Settings, url: str, timeout_s: float = 5.0):
    with closing(open_store(settings.database_url)) as store:
        endpoint = text_endpoint(url, retries=1, timeout_s=timeout_s)
        generator = EndpointGenerator(endpoint, store, settings.training, max_tokens=64)
        async with open_sessions(settings, store=store, generator=generator) as sessions:
            session, answer = await run_session(sessions)
            kept = [e.generated_output for e in store.experiences(session_id=session.id)]
            stored = store.session(session.id)
        assert stored is not None and stored.error == session.error and stored.status is session.status
        return session, answer, kept


def test_a_missing_or_slow_endpoint_is_reported_by_session_and_health(tmp_path: Path):
    async def run() -> None:
        url = f"http://127.0.0.1:{unused_port()}/generate"
        session, _, kept = await against(settings_of(tmp_path, url), url)
        assert session.error is not None and session.error["code"] == "endpoint_unreachable" and kept == []
        with serving(lambda asked: EndpointReply(RIGHT, delay=3)) as server:
            session, _, _ = await against(settings_of(tmp_path, server.plain_url), server.plain_url, timeout_s=0.2)
        assert session.error is not None and session.error["code"] == "endpoint_timeout"
        async with open_sessions(settings_of(tmp_path, url)) as sessions:
            while sessions.generator.health()["state"] != "down":
                await asyncio.sleep(0.02)
            assert "127.0.0.1" in sessions.generator.health()["detail"]

    asyncio.run(run())


def test_a_malformed_verdict_is_a_failure_of_the_judge_and_not_of_the_answer(tmp_path: Path):
    def script(asked: EndpointRequest) -> str:
        return "I rather like it: 10 out of 10!" if "careful examiner" in asked.prompt else "Because of the air."

    async def run() -> None:
        with serving(script) as server:
            judge = TextEndpoint(server.chat_url, "judge")
            settings = settings_of(tmp_path, server.plain_url, judge=judge)
            async with open_sessions(settings) as sessions:
                request = SessionRequest("why", "Why is the sky blue?", verifiers=(("judge", 1.0, {}),))
                session, answer = await run_session(sessions, request)
        assert session.status is Status.FAILED and session.error is not None
        assert session.error["code"] == "judge_failed" and "judge_out_of_form" in session.error["message"]
        assert answer["confidence"] is None and answer["final_solution"] == "Because of the air."

    asyncio.run(run())


@contextmanager
def lock_database(path: Path) -> Iterator[Callable[[], None]]:
    """Lock the database as another program would; yields the function that unlocks it."""
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield lambda: connection.execute("ROLLBACK").close() if connection.in_transaction else None
    finally:
        connection.close()


def test_a_session_waits_for_a_database_that_is_down(tmp_path: Path):
    path = tmp_path / "busy.sqlite"
    asked_twice = threading.Event()

    def script(asked: EndpointRequest) -> str:
        asked_twice.set()
        return WRONG if asked.number == 0 else RIGHT

    async def run() -> None:
        with serving(script) as server:
            settings = settings_of(tmp_path, server.plain_url, database=f"sqlite:///{path}?timeout=0.05")
            async with open_sessions(settings) as sessions:
                begun = await sessions.start(CODE, "me")
                await asyncio.to_thread(asked_twice.wait)
                with lock_database(path) as release:
                    await asyncio.sleep(1.0)
                    seen = len(server.asked)
                    release()
                session = await sessions.wait(begun.id)
                rows = sessions.store.experiences(session_id=begun.id)
        assert seen == 1  # the second iteration waited until the first was written down
        assert session.status is Status.DONE and [e.iteration for e in rows] == [1, 2]

    asyncio.run(run())


def test_a_database_that_stays_down_fails_the_session_and_gets_pending_writes_later(tmp_path: Path):
    path = tmp_path / "busy.sqlite"

    async def run() -> None:
        with serving(lambda asked: EndpointReply(WRONG, delay=0.3)) as server:
            settings = settings_of(tmp_path, server.plain_url, database=f"sqlite:///{path}?timeout=0.05")
            async with open_sessions(settings, patience_s=0.5) as sessions:
                begun = await sessions.start(CODE, "me")
                while not server.asked:
                    await asyncio.sleep(0.01)
                with lock_database(path):
                    session = await sessions.wait(begun.id)
                    during = sessions.store.session(begun.id)
            # Closing paid: the experience and how it ended are there.
        with closing(open_store(path)) as store:
            after, rows = store.session(begun.id), store.experiences(session_id=begun.id)
        assert session.status is Status.FAILED and session.error is not None and session.error["code"] == "store_down"
        assert during is not None and during.status is Status.RUNNING
        assert after is not None and after.status is Status.FAILED and after.final_solution == WRONG
        assert [e.generated_output for e in rows] == [WRONG]

    asyncio.run(run())


def test_two_threads_write_what_is_pending_once(tmp_path: Path):
    """The last heartbeat may still write when the service ends."""
    path = tmp_path / "busy.sqlite"
    with closing(open_store(path)) as store:
        session = Session(id="late", task_id="double", prompt="Write it.", status=Status.RUNNING)
        assert store.add_session(session)
        writer = SessionWriter(store, "here")
        live = LiveSession(session, build_verifiable_task(CODE))
        session.status = Status.FAILED
        writer.closing.set()
        with lock_database(path) as release, ThreadPoolExecutor(2) as threads:
            store._patience_s = 0.0  # type: ignore[attr-defined]
            writer.finish(live)
            both = [threads.submit(writer.write_pending) for _ in range(2)]
            release()
            assert [one.result(30) for one in both] == [None, None]
        after = store.session("late")
    assert after is not None and after.status is Status.FAILED


def test_a_write_that_nobody_needs_any_more_is_not_repeated(tmp_path: Path):
    """Patience is for sessions that go on: one that ended has its last row written elsewhere."""
    calls = list[int]()

    def write() -> None:
        calls.append(len(calls))
        raise StoreDown("connection refused")

    with closing(open_store(tmp_path / "store.sqlite")) as store:
        writer = SessionWriter(store, "here", patience_s=60.0)
        with pytest.raises(StoreDown):
            writer.write(write, is_needless=lambda: len(calls) == 2)
    assert calls == [0, 1]


def test_a_session_is_cancelled_while_verifiers_hold_all_threads_of_its_owner(tmp_path: Path):
    release = threading.Event()

    async def run() -> Status:
        with serving(lambda asked: EndpointReply(WRONG, delay=60)) as server:
            async with open_sessions(settings_of(tmp_path, server.plain_url)) as sessions:
                begun = await sessions.start(CODE, "me")
                while not server.asked:
                    await asyncio.sleep(0.01)
                for _ in range(100):
                    run_as_owner("me", sessions.threads.submit, release.wait, 60)
                try:
                    await asyncio.wait_for(sessions.cancel(begun.id), 20)
                    return (await sessions.wait(begun.id)).status
                finally:
                    release.set()

    assert asyncio.run(run()) is Status.CANCELLED


def test_a_stop_finishes_the_current_iteration_and_marks_the_rest(tmp_path: Path):
    async def run() -> None:
        with serving(lambda asked: EndpointReply(WRONG, delay=0.4)) as server:
            settings = settings_of(tmp_path, server.plain_url)
            settings = replace(settings, limits=replace(settings.limits, sessions=1))
            async with open_sessions(settings) as sessions:
                running = await sessions.start(CODE, "me")
                waiting = await sessions.start(CODE, "me")
                while not server.asked:
                    await asyncio.sleep(0.01)
        with closing(open_store(settings.database_url)) as store:
            first, second = store.session(running.id), store.session(waiting.id)
            rows = store.experiences(session_id=running.id)
        assert first is not None and second is not None
        assert (first.status, second.status) == (Status.INTERRUPTED, Status.INTERRUPTED)
        assert first.final_solution == WRONG and len(rows) == 1 == len(server.asked)

    asyncio.run(run())


def test_a_session_that_is_starting_when_the_service_stops_is_marked(tmp_path: Path):
    path = tmp_path / "busy.sqlite"

    async def run() -> None:
        with serving(lambda asked: EndpointReply(WRONG, delay=0.5)) as server:
            settings = settings_of(tmp_path, server.plain_url, database=f"sqlite:///{path}?timeout=5")
            async with open_sessions(settings) as sessions:
                with lock_database(path) as release:
                    starting = asyncio.create_task(sessions.start(CODE, "me"))
                    while not sessions._live:  # pyright: ignore[reportPrivateUsage]  # then its row waits
                        await asyncio.sleep(0.01)
                    closing_ = asyncio.create_task(sessions.close(5.0))
                    await asyncio.sleep(0.1)
                    release()
                    await closing_
                begun = await starting
                stored = sessions.store.session(begun.id)
        assert stored is not None and stored.status is Status.INTERRUPTED

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_after_kill_9_a_session_is_interrupted_with_its_experiences_and_its_best_answer(tmp_path: Path):
    with serving(lambda asked: WRONG if asked.number == 0 else EndpointReply(RIGHT, delay=60)) as server:
        service = RlvrService(tmp_path / "state", LLM_ENDPOINT=server.plain_url)
        service._port = unused_port()  # pyright: ignore[reportPrivateUsage]  # a service is told from others by its port
        with service:
            begun = service.post("/train?background=true", BODY).json()["session_id"]
            while len(server.asked) < 2:  # the second iteration is under way: the first one is on disk
                threading.Event().wait(0.02)
            service.kill()
            service.start()
            told = service.get(f"/sessions/{begun}").json()
            rows = service.get("/experiences/double").json()["experiences"]
        assert (told["status"], told["error"]["code"]) == ("interrupted", "interrupted")
        assert told["answer"]["final_solution"] == WRONG and told["iterations"] == 1
        assert [row["generated_output"] for row in rows] == [WRONG]
