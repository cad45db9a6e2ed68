"""Futures of requests: results that may not exist yet, by request id, and the clients that wait for them.

The engine thread resolves a future; any event loop may wait for it. Finished futures are kept for some time and up to
some number of bytes, because a client asks again when a connection broke. A `pinned` future holds the only copy of its
result (not yet in the store) and is never dropped.

Left out on purpose: results on disk (`server_store.py` has those of training requests).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Any, NamedTuple

from rlvr.core.messages import SampleResponse
from rlvr.tinker_server.protocol.errors import GoneError

MOST_FINISHED = 4_096  # samples that one poll reports; the next poll reports those after its cursor


@dataclass(frozen=True)
class Pending:
    """No result yet, ask again. `queue_state`: `active`, `paused_capacity` or `paused_rate_limit`."""

    queue_state: str = "active"
    reason: str = ""


@dataclass(frozen=True)
class JsonResult:
    value: dict[str, Any]


@dataclass(frozen=True)
class ProtoResult:
    """An encoded protobuf message."""

    body: bytes


@dataclass(frozen=True)
class RequestFailure:
    """A failed request. `category`: `user` if the request was at fault, `server` if this server was."""

    error: str
    category: str


@dataclass(frozen=True)
class SampleResult:
    """Completions for a route of this process; they are not encoded."""

    response: SampleResponse


Waiters = dict[Callable[[], None], None]  # in order; of thousands, one that times out is removed at once
Outcome = JsonResult | ProtoResult | RequestFailure  # what can be stored and sent
LiveOutcome = Outcome | SampleResult


@dataclass(frozen=True)
class LostRequest:
    """The request gets no result and may be sent again; waiting for it raises `GoneError`."""


@dataclass(eq=False)
class ResultFuture:
    request_id: str
    owner: str
    group: str = ""  # of samples: sampling session and number of the client's copy
    session: str = ""
    outcome: LiveOutcome | LostRequest | None = None
    finished: float = 0.0
    number: int = 0  # its place among the finished ones of its group
    pinned: bool = False
    waiters: Waiters = field(default_factory=dict[Callable[[], None], None])

    @property
    def size(self) -> int:
        body = self.outcome.body if isinstance(self.outcome, ProtoResult) else b""
        return 1_024 + len(body)


class FinishedSample(NamedTuple):
    request_id: str
    is_failed: bool
    size: int  # bytes


class FinishedSamples(NamedTuple):
    """What a group finished since an earlier cursor; the client sends `cursor` the next time."""

    cursor: int
    samples: list[FinishedSample]


@dataclass
class FutureGroup:
    """The finished requests of one sampling session, for clients that wait for many at once.

    `cursor` starts at the time the group was made, because a client's cursor outlives groups and servers.
    """

    cursor: int
    finished: OrderedDict[int, str] = field(default_factory=OrderedDict[int, str])
    waiters: Waiters = field(default_factory=dict[Callable[[], None], None])


class FutureRegistry:
    def __init__(self, keep_seconds: float, keep_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` does not jump as the time of day may: results would be dropped before they are read."""
        self._keep_seconds, self._keep_bytes, self._clock = keep_seconds, keep_bytes, clock
        self._lock = threading.Lock()
        self._all: dict[str, ResultFuture] = {}
        self._unfinished_samples: dict[str, ResultFuture] = {}
        self._done: OrderedDict[str, ResultFuture] = OrderedDict()  # the oldest first
        self._bytes = 0
        self._groups: dict[str, FutureGroup] = {}
        self.on_discard: Callable[[ResultFuture], None] = lambda _: None  # called with samples whose result is dropped

    def create(
        self, request_id: str, owner: str, *, group: str = "", session: str = "", pinned: bool = False
    ) -> ResultFuture | None:
        """Make a future; None if there is one with this id already, unless that is lost."""
        with self._lock:
            if known := self._all.get(request_id):
                if known.outcome != LostRequest():
                    return None
                self._discard(known)
            future = self._all[request_id] = ResultFuture(request_id, owner, group, session, pinned=pinned)
            if group:
                self._unfinished_samples[request_id] = future
            return future

    def find(self, request_id: str) -> ResultFuture | None:
        """The future; None if there is none or it is lost."""
        with self._lock:
            future = self._all.get(request_id)
            return None if future is None or future.outcome == LostRequest() else future

    def unfinished_samples(self) -> list[ResultFuture]:
        with self._lock:
            return list(self._unfinished_samples.values())

    def resolve(self, future: ResultFuture, outcome: LiveOutcome | LostRequest) -> None:
        """Set the outcome, once: a later call (a cancel, an engine that finishes after it) changes nothing."""
        with self._lock:
            if future.outcome is not None:
                return
            future.outcome, future.finished = outcome, self._clock()
            self._unfinished_samples.pop(future.request_id, None)
            self._done[future.request_id] = future
            self._bytes += future.size
            wake = pop_all(future.waiters)
            if future.group:
                group = self._group(future.group)
                group.cursor += 1
                group.finished[group.cursor] = future.request_id
                future.number = group.cursor
                wake += pop_all(group.waiters)
            self._trim()
        for call in wake:
            call()

    def _group(self, name: str) -> FutureGroup:
        if name not in self._groups:
            self._groups[name] = FutureGroup(int(time.time() * 1e6))
        return self._groups[name]

    def discard(self, future: ResultFuture) -> None:
        """Drop a finished future whose result was read and is not asked for again."""
        with self._lock:
            if future.request_id in self._done:
                self._discard(future)

    def unpin(self, future: ResultFuture) -> None:
        """Let the future be dropped: its result is in the store now."""
        with self._lock:
            future.pinned = False

    def trim(self) -> None:
        with self._lock:
            self._trim()
            for name in [n for n, group in self._groups.items() if not group.finished and not group.waiters]:
                del self._groups[name]  # clients may invent any number of names

    def _trim(self) -> None:
        too_old = self._clock() - self._keep_seconds
        unwanted: list[ResultFuture] = []
        size = self._bytes
        for future in self._done.values():  # of a hundred thousand, only those that go and the first that stays
            if size <= self._keep_bytes and future.finished > too_old:
                break
            if not future.pinned:
                unwanted.append(future)
                size -= future.size
        for future in unwanted:
            self._discard(future)

    def _discard(self, future: ResultFuture) -> None:
        del self._done[future.request_id], self._all[future.request_id]
        self._bytes -= future.size
        if future.group:
            self.on_discard(future)
        if group := self._groups.get(future.group):
            group.finished.pop(future.number, None)
            if not group.finished and not group.waiters:
                del self._groups[future.group]

    def find_owned(self, owner: str, request_id: str) -> ResultFuture | None:
        """The future; None if it is unknown or another owner's, who must not learn that the id exists."""
        future = self.find(request_id)
        return future if future is not None and future.owner == owner else None

    async def wait(self, future: ResultFuture, timeout: float) -> LiveOutcome | Pending:
        """The outcome as soon as there is one; `Pending` after `timeout` seconds."""
        await self._wait_until(future.waiters, lambda: future.outcome is not None, timeout)
        if isinstance(future.outcome, LostRequest):
            raise lost_error(future.request_id)
        return Pending() if future.outcome is None else future.outcome

    async def wait_for_group(self, name: str, cursor: int, retrieved: list[str], timeout: float) -> FinishedSamples:
        """Wait for samples of a group that finished after `cursor`. Those `retrieved` already are dropped first."""
        for request_id in retrieved:
            if (future := self.find(request_id)) and future.group == name:
                with self._lock:
                    if request_id in self._done:  # not dropped at once: the response may have been lost
                        self._done.move_to_end(request_id, last=False)
        with self._lock:
            group = self._group(name)
            if cursor > group.cursor:
                self._renumber(group, cursor)
            for number in [*takewhile(lambda n: n <= cursor, group.finished)]:
                del group.finished[number]
        await self._wait_until(group.waiters, lambda: bool(group.finished), timeout)
        with self._lock:
            found = dict(islice(group.finished.items(), MOST_FINISHED))
            done = [self._all[request_id] for request_id in found.values() if request_id in self._all]
            samples = [
                FinishedSample(
                    future.request_id, isinstance(future.outcome, (RequestFailure, LostRequest)), future.size
                )
                for future in done
            ]
            return FinishedSamples(max([cursor, *found]), samples)

    def _renumber(self, group: FutureGroup, cursor: int) -> None:
        """Number what a group finished, and will finish, after a client's cursor, which an earlier group of that name
        gave out when the time of day was ahead: the client would wait for ever."""
        shift = cursor + 1 - next(iter(group.finished), group.cursor + 1)
        group.cursor += shift
        group.finished = OrderedDict((number + shift, request_id) for number, request_id in group.finished.items())
        for number, request_id in group.finished.items():
            if future := self._all.get(request_id):
                future.number = number

    async def _wait_until(self, waiters: Waiters, ready: Callable[[], bool], timeout: float) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish)

        with self._lock:
            if ready():
                return
            waiters[wake] = None
        try:
            await asyncio.wait([future], timeout=timeout)
        finally:
            with self._lock:
                waiters.pop(wake, None)


def pop_all(waiters: Waiters) -> list[Callable[[], None]]:
    """Empty them in place, because waiting tasks hold it too."""
    calls = list(waiters)
    waiters.clear()
    return calls


def lost_error(request_id: str) -> GoneError:
    return GoneError(
        f"request_id {request_id[:200]!r} is unknown here: its result was dropped after a while, its client sent no "
        "heartbeat, no sampling server answered, or the server was restarted; send the request again"
    )
