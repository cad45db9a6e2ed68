"""Answers that may not be there yet: request ids, and the clients that wait for them.

A worker thread resolves a promise; any event loop may wait for it. Finished ones are kept for a while and up to so
many bytes, because a client may ask again when a connection broke. A `pinned` promise has its only copy here (its
result is not yet in the store) and is never dropped. Exercised by tests/test_tinker_core.py.

Left out on purpose: results on disk (`store.py` has those of training requests).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlvr.service.tinker_api.errors import Gone


@dataclass(frozen=True)
class Pending:
    """Ask again. `queue_state`: `active`, `paused_capacity` or `paused_rate_limit`."""

    queue_state: str = "active"
    reason: str = ""


@dataclass(frozen=True)
class Json:
    value: dict[str, Any]


@dataclass(frozen=True)
class Proto:
    """A protobuf message, encoded."""

    body: bytes


@dataclass(frozen=True)
class Failed:
    """`category`: `user` where the request was at fault, `server` where we were."""

    error: str
    category: str


Outcome = Json | Proto | Failed


@dataclass(frozen=True)
class Lost:
    """It will not be answered, and may be sent again: asked for, it reads as `Gone`."""


@dataclass(eq=False)
class Promise:
    request_id: str
    owner: str
    group: str = ""  # of samples: the sampling session, and the client that asks
    session: str = ""
    outcome: Outcome | Lost | None = None
    finished: float = 0.0
    number: int = 0  # in its group, by the order in which they finished
    pinned: bool = False
    waiters: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    @property
    def size(self) -> int:
        body = self.outcome.body if isinstance(self.outcome, Proto) else b""
        return 1_024 + len(body)


@dataclass
class Group:
    """The finished requests of one sampling session, for clients that ask for many at once.

    `cursor` counts on from the time the group was made: a client's cursor outlives groups, and servers.
    """

    cursor: int
    finished: OrderedDict[int, str] = field(default_factory=OrderedDict[int, str])
    waiters: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])


class Promises:
    def __init__(self, keep_seconds: float, keep_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._keep_seconds, self._keep_bytes, self._clock = keep_seconds, keep_bytes, clock
        self._lock = threading.Lock()
        self._all: dict[str, Promise] = {}
        self._done: OrderedDict[str, Promise] = OrderedDict()  # by the time they finished
        self._bytes = 0
        self._groups: dict[str, Group] = {}
        self.dropped: Callable[[Promise], None] = lambda _: None  # told of samples whose results were not kept

    def open(
        self, request_id: str, owner: str, *, group: str = "", session: str = "", pinned: bool = False
    ) -> Promise | None:
        """A new promise; None where there is one by this id already, unless that is lost."""
        with self._lock:
            if known := self._all.get(request_id):
                if known.outcome != Lost():
                    return None
                self._discard(known)
            promise = self._all[request_id] = Promise(request_id, owner, group, session, pinned=pinned)
            return promise

    def find(self, request_id: str) -> Promise | None:
        """The promise; None where there is none, or it is lost."""
        with self._lock:
            promise = self._all.get(request_id)
            return None if promise is None or promise.outcome == Lost() else promise

    def samples(self) -> list[Promise]:
        """Those that are waited for."""
        with self._lock:
            return [promise for promise in self._all.values() if promise.group and promise.outcome is None]

    def resolve(self, promise: Promise, outcome: Outcome | Lost) -> None:
        """Give the answer, once: whoever comes later (a cancel, an engine that ends after all) changes nothing."""
        with self._lock:
            if promise.outcome is not None:
                return
            promise.outcome, promise.finished = outcome, self._clock()
            self._done[promise.request_id] = promise
            self._bytes += promise.size
            wake = taken(promise.waiters)
            if promise.group:
                group = self._group(promise.group)
                group.cursor += 1
                group.finished[group.cursor] = promise.request_id
                promise.number = group.cursor
                wake += taken(group.waiters)
            self._trim()
        for call in wake:
            call()

    def _group(self, name: str) -> Group:
        if name not in self._groups:
            self._groups[name] = Group(int(self._clock() * 1e6))
        return self._groups[name]

    def unpin(self, promise: Promise) -> None:
        """Its result is in the store now."""
        with self._lock:
            promise.pinned = False

    def trim(self) -> None:
        with self._lock:
            self._trim()
            for name in [n for n, group in self._groups.items() if not group.finished and not group.waiters]:
                del self._groups[name]  # there is no end of names that clients make up

    def _trim(self) -> None:
        too_old = self._clock() - self._keep_seconds
        for promise in list(self._done.values()):
            if self._bytes <= self._keep_bytes and promise.finished > too_old:
                return
            if promise.pinned:
                continue
            self._discard(promise)

    def _discard(self, promise: Promise) -> None:
        del self._done[promise.request_id], self._all[promise.request_id]
        self._bytes -= promise.size
        if promise.group:
            self.dropped(promise)
        if group := self._groups.get(promise.group):
            group.finished.pop(promise.number, None)
            if not group.finished and not group.waiters:
                del self._groups[promise.group]

    def of(self, owner: str, request_id: str) -> Promise | None:
        """The promise; None where it is not here (any more) or another owner's: nobody learns which ids there are."""
        promise = self.find(request_id)
        return promise if promise is not None and promise.owner == owner else None

    async def wait(self, promise: Promise, timeout: float) -> Outcome | Pending:
        """Its outcome, as soon as there is one; `Pending` after `timeout` seconds."""
        await self._sleep(promise.waiters, lambda: promise.outcome is not None, timeout)
        if isinstance(promise.outcome, Lost):
            raise lost(promise.request_id)
        return Pending() if promise.outcome is None else promise.outcome

    async def completions(
        self, name: str, cursor: int, retrieved: list[str], timeout: float
    ) -> tuple[int, list[tuple[str, bool, int]]]:
        """(new cursor, [(request_id, failed, bytes)]) of what finished in a group after `cursor`; waits for some."""
        for request_id in retrieved:
            if (promise := self.find(request_id)) and promise.group == name:
                with self._lock:
                    if request_id in self._done:  # the first to go; not at once, an answer can be lost on its way
                        self._done.move_to_end(request_id, last=False)
        with self._lock:
            group = self._group(name)
            for number in [n for n in group.finished if n <= cursor]:
                del group.finished[number]
        await self._sleep(group.waiters, lambda: bool(group.finished), timeout)
        with self._lock:
            done = [self._all[r] for r in group.finished.values() if r in self._all]
            return max([cursor, *group.finished]), [
                (p.request_id, isinstance(p.outcome, (Failed, Lost)), p.size) for p in done
            ]

    async def _sleep(self, waiters: list[Callable[[], None]], ready: Callable[[], bool], timeout: float) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle)

        with self._lock:
            if ready():
                return
            waiters.append(wake)
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            with self._lock:
                if wake in waiters:
                    waiters.remove(wake)


def taken(waiters: list[Callable[[], None]]) -> list[Callable[[], None]]:
    """Empty the list in place: who sleeps on it holds it too."""
    calls = list(waiters)
    waiters.clear()
    return calls


def lost(request_id: str) -> Gone:
    return Gone(
        f"request_id {request_id[:200]!r} is unknown here: its result was kept for a while and dropped, or nobody was "
        "heard of who waits for it, or the server was started again since; send the request again"
    )
