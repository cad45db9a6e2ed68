"""The running service: what every route is given, and the two ways in which a route asks for what takes time.

Exercised by tests/test_service_http.py.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import socket
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

from rlvr.service.keys import Keys
from rlvr.service.problems import NO_GENERATOR, Problem
from rlvr.service.settings import Settings
from rlvr.store import Store, StoreDown

if TYPE_CHECKING:
    from rlvr.service.loop.local_judge import LocalJudge
    from rlvr.service.loop.sessions import Sessions

T = TypeVar("T")
ACCURACY_S = 2.0  # how old the verifiers' accuracy may be: it is measured on hundreds of sessions
THREADS = 16  # that wait for the database at a time
GRADES = 4  # requests to /grade that are worked on at a time: each may take minutes
GRADES_WAIT = 64  # more of them; they keep their texts in memory


class Shared(Generic[T]):
    """A question that many ask at once: one that comes while it is being answered shares the next answer, not this one,
    so nobody is told how things were before they asked. However many ask, the database answers one at a time, and
    where `every_s` is given, at most so often: then an answer may be older by that."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], every_s: float = 0.0) -> None:
        self._ask, self._every_s, self._last = ask, every_s, -math.inf
        self._now: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._now is not None and time.monotonic() - self._last < self._every_s:
            return await asyncio.shield(self._now)
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._now))
        return await asyncio.shield(self._next)

    async def _after(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait((before,))
        self._now, self._next, self._last = self._next, None, time.monotonic()
        return await self._ask()


@dataclass
class Service:
    """One process of the service. `instance` tells it from others that share its database."""

    settings: Settings
    store: Store
    sessions: Sessions
    generator: Any
    keys: Keys
    instance: str
    judge: LocalJudge | None = None
    holds: IO[str] | None = None  # its name
    started: float = field(default_factory=time.time)
    loop: asyncio.AbstractEventLoop | None = None
    stopping: asyncio.Task[None] | None = None
    threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(THREADS))
    graders: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(GRADES))

    def __post_init__(self) -> None:
        store = self.store
        self.counts = Shared(lambda: self.ask(store.count_sessions))
        self.aggregates = Shared(lambda: self.ask(store.aggregates))
        self.totals = Shared(lambda: self.ask(lambda: (store.buffer(), store.global_stats())))
        self.accuracy = Shared(lambda: self.ask(self.sessions.verifier_accuracy), ACCURACY_S)

    async def ask(self, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """A call of the store, or another that blocks, on a thread."""
        try:
            return await to_thread.run_sync(partial(method, *args, **named), limiter=self.threads)
        except StoreDown as error:
            raise away(error) from error

    async def work(self, method: Callable[..., T], *args: Any) -> T:
        """A call that may take minutes, on a thread apart from those of the store, which everybody needs."""
        if self.graders.statistics().tasks_waiting >= GRADES_WAIT:
            raise Problem(429, "busy", "too many requests to grade wait already; try again later", retry_after=10)

        def worked() -> T:
            if self.stopping is not None:  # meanwhile
                raise Problem(503, "stopping", "the service is stopping; try again when it is back", retry_after=10)
            return method(*args)

        return await to_thread.run_sync(worked, limiter=self.graders)

    def begin_stop(self) -> None:
        """Sessions end, so that whoever waits for one is answered. Once, on the event loop."""
        if self.stopping is None:
            self.stopping = asyncio.create_task(self._stop())

    async def stop(self) -> None:
        self.begin_stop()
        assert self.stopping is not None
        await self.stopping

    async def _stop(self) -> None:
        await self.sessions.close(self.settings.limits.grace_seconds)
        await self.generator.close()
        if self.judge is not None:
            await self.judge.close()
        if self.holds is not None:
            self.holds.close()

    def generator_ready(self) -> None:
        """A Problem that says what to do where no session can be run now."""
        if self.stopping is not None:
            raise Problem(503, "stopping", "the service is stopping; try again when it is back", retry_after=10)
        health = self.generator.health()
        if health["state"] == "absent":
            raise Problem(503, "no_generator", NO_GENERATOR)
        if health["state"] == "loading":
            told = f"the model is not ready yet: {health.get('detail') or 'loading'}; see /health"
            raise Problem(503, "generator_loading", told, retry_after=5)


def away(error: Exception) -> Problem:
    told = f"the database is away or full, nothing was half written: {error}; try again"
    return Problem(503, "store_down", told, retry_after=5)


def instance_name(state: Path, port: int) -> tuple[str, IO[str] | None]:
    """The same after a restart, at another port too, so that a service finds what its former life left; and what holds
    the name, until it is closed. It is kept in the service's folder, and of two that run on one folder the first has
    it: the second must not take the sessions of the first for lost ones.
    """
    otherwise = f"{socket.gethostname()}:{port}"
    try:
        file = open(state / "instance", "a+", encoding="utf-8")  # noqa: SIM115 (the lock is the caller's)
    except OSError:
        return otherwise, None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return otherwise, None
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


Asked = Annotated[Service, Depends(_service)]
Owner = Annotated[str, Depends(_owner)]
