"""The running service: what every route is given, and its two ways to run blocking calls."""

from __future__ import annotations

import asyncio
import math
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from fastapi import Depends, Request

from rlvr.core.fair_queue import become_owner, current_owner
from rlvr.core.fair_slots import FairSlots, LoopTurns
from rlvr.core.files import lock_file
from rlvr.service.http.grading import GradingQueue
from rlvr.service.http.pattern_report import describe_patterns
from rlvr.service.http.readiness import Readiness
from rlvr.service.session_problems import NO_GENERATOR, stopping, store_unavailable
from rlvr.service.settings import Settings
from rlvr.store import ExperienceStore, StoreDown
from rlvr.store.records import Status
from rlvr.web.auth import ApiKeys
from rlvr.web.errors import HttpProblem

if TYPE_CHECKING:
    from rlvr.service.models.local_judge import LocalJudge
    from rlvr.service.sessions.sessions import Sessions

T = TypeVar("T")
MOST_TASKS = 1_000  # in the JSON of the metrics: it is written on the event loop
PATTERNS_S = 10.0  # the most often that the patterns over all tasks are computed: they read every answer
PROBE_S = 1.5  # how long health and metrics wait for the database: their callers give up after a few seconds
CALLS, SHARE = 16, 4  # of the database at once: of all keys, and of one key; every busy thread slows the event loop
LOAD_WAIT_S, LOAD_POLL_S = 600.0, 0.2  # how long a request waits for a model that loads, and how often it looks


class CoalescedQuery(Generic[T]):
    """Runs one query at a time for any number of callers. A call during a running query shares the next result, so no
    result is older than its call. With `every_s` the query runs at most that often, and results may be that old."""

    def __init__(self, query: Callable[[], Coroutine[Any, Any, T]], every_s: float = 0.0) -> None:
        self._query, self._every_s, self._last = query, every_s, -math.inf
        self._current: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._current is not None and time.monotonic() - self._last < self._every_s:
            return await asyncio.shield(self._current)
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._current))
            # Its callers may all have left when it fails: asyncio would log that as an error.
            self._next.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._next)

    async def _after(self, before: asyncio.Task[T] | None) -> T:
        become_owner("")  # of all its callers: none of their turns
        if before is not None:
            await asyncio.wait((before,))
        self._current, self._next, self._last = self._next, None, time.monotonic()
        return await self._query()


@dataclass
class Service:
    """One process of the service. `instance` identifies it among those that share its database; `name_lock` holds that
    name."""

    settings: Settings
    store: ExperienceStore
    sessions: Sessions
    generator: Any
    keys: ApiKeys
    instance: str
    judge: LocalJudge | None = None
    name_lock: IO[str] | None = None
    waiting_to_load: int = 0
    started: float = field(default_factory=time.time)
    loop: asyncio.AbstractEventLoop | None = None
    stopping: asyncio.Task[None] | None = None
    slots: FairSlots = field(default_factory=lambda: FairSlots(CALLS, SHARE))
    turns: LoopTurns = field(default_factory=LoopTurns)  # of those who watch sessions
    grading: GradingQueue = field(default_factory=GradingQueue)
    on_stop: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])  # what ends with the service

    def __post_init__(self) -> None:
        store = self.store
        self.readiness = Readiness(store, self.generator, self._run_once)
        self.counts = CoalescedQuery(lambda: self._run_once(store.count_sessions))
        self.aggregates = CoalescedQuery(lambda: self.run_blocking(store.aggregates, MOST_TASKS))
        self.totals = CoalescedQuery(lambda: self.run_blocking(lambda: (store.buffer(), store.global_stats())))
        self.patterns = CoalescedQuery(lambda: self.run_blocking(describe_patterns, store), PATTERNS_S)
        self._measured = CoalescedQuery(lambda: self.run_blocking(self.sessions.verifier_accuracy))
        self._accuracy: tuple[tuple[int, ...], float | None] | None = None

    async def run_blocking(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Run a call of the store, or another that blocks, in a thread; wait while the database restarts."""
        try:
            return await self.sessions.wait_out(lambda: self._run_once(method, *args, **named))
        except StoreDown as error:
            raise store_unavailable(error) from error

    async def _run_once(self, method: Callable[..., T], *args: Any, **named: Any) -> T:
        return await self.slots.run(current_owner(), partial(method, *args, **named))

    async def probe_database(self) -> dict[Status, int]:
        """The numbers of sessions by status; StoreDown unless the database answers within `PROBE_S`."""
        try:
            return await asyncio.wait_for(self.counts(), PROBE_S)
        except TimeoutError:
            raise StoreDown(f"{self.store.where}: no answer within {PROBE_S:g} s") from None

    async def learning(self) -> dict[str, Any]:
        """A summary of what was learned so far, by this instance and by those that share its database."""
        await self.run_blocking(self.generator.refresh)
        return self.generator.learning()

    async def accuracy(self) -> float | None:
        """The verifiers' accuracy: the same at every instance. It reads hundreds of sessions, so it is computed again
        only when their numbers have changed."""
        counts = tuple((await self.counts()).values())
        if self._accuracy is None or self._accuracy[0] != counts:
            self._accuracy = counts, await self._measured()
        return self._accuracy[1]

    def begin_stop(self) -> None:
        """End the sessions, so that requests waiting for one get a response. Runs once, on the event loop."""
        if self.stopping is None:
            self.stopping = asyncio.create_task(self._stop())

    async def stop(self) -> None:
        self.begin_stop()
        assert self.stopping is not None
        await self.stopping

    async def _stop(self) -> None:
        for end in self.on_stop:
            end()
        await self.sessions.close(self.settings.limits.grace_seconds)
        self.grading.close()
        await self.generator.close()
        if self.judge is not None:
            await self.judge.close()
        if self.name_lock is not None:
            self.name_lock.close()

    def require_running(self) -> None:
        if self.stopping is not None:
            raise stopping()

    async def wait_for_generator(self) -> None:
        """Wait while the model loads or, with --demo, is trained; HttpProblem with the remedy if no session can run."""
        limits, end = self.settings.limits, time.monotonic() + LOAD_WAIT_S
        if self.waiting_to_load >= limits.sessions + limits.queue:
            raise HttpProblem(429, "busy", "too many requests wait for the model; see /health", retry_after=5)
        self.waiting_to_load += 1
        try:
            while True:
                self.require_running()
                health = self.generator.health()
                if health["state"] == "absent":
                    raise HttpProblem(503, "no_generator", NO_GENERATOR)
                if health["state"] != "loading":
                    return
                if time.monotonic() > end:
                    message = "the model is not ready yet; GET /health has its progress"
                    raise HttpProblem(503, "generator_loading", message, retry_after=5)
                await asyncio.sleep(LOAD_POLL_S)
        finally:
            self.waiting_to_load -= 1


def claim_instance_name(state: Path, port: int) -> tuple[str, IO[str] | None]:
    """Return the instance's name and the lock that holds it.

    The name is stored in the service's folder and survives a restart, at another port too, so that a service finds the
    sessions that its predecessor left. Of two services on one folder the second gets another name: it must not treat
    the first one's sessions as lost.
    """
    fallback = f"{socket.gethostname()}:{port}"
    try:
        file = lock_file(state / "instance")
    except OSError:
        file = None
    if file is None:
        return fallback, None
    file.seek(0)
    name = file.read().strip()
    if not name:
        name = f"{socket.gethostname()}:{uuid.uuid4().hex[:8]}"
        file.write(name)
        file.flush()
    return name, file


async def _service(request: Request) -> Service:
    return request.app.state.service


async def _owner(request: Request) -> str:
    return request.state.owner


ServiceDep = Annotated[Service, Depends(_service)]
OwnerDep = Annotated[str, Depends(_owner)]
