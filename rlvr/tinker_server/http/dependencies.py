"""The dependency of every route: the caller, and the backend it calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

from rlvr.core.gc_pause import CollectionPause
from rlvr.tinker_server.http.tinker_middleware import LongPolls
from rlvr.tinker_server.protocol.server_limits import ServerLimits, WireLimits

if TYPE_CHECKING:
    from rlvr.tinker_server.backend.tinker_backend import TinkerBackend

T = TypeVar("T")
COMPUTATIONS = 2  # at once
_COLLECTION_PAUSE = CollectionPause()


@dataclass(frozen=True)
class Caller:
    backend: TinkerBackend
    owner: str
    polls: LongPolls
    limits: ServerLimits
    wire: WireLimits
    request: Request
    threads: CapacityLimiter
    computations: CapacityLimiter
    all_computations: CapacityLimiter

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the backend for this owner, on a thread: some of them wait for the disk."""
        return await to_thread.run_sync(partial(method, self.owner, *args, **kwargs), limiter=self.threads)

    async def compute(self, work: Callable[..., T], *args: Any) -> T:
        """Return `work(*args)`, computed on a thread: long bodies, texts and answers. One owner has one at a time, and
        all together two, because every thread that computes slows the event loop."""

        def run() -> T:
            with _COLLECTION_PAUSE:
                return work(*args)

        async with self.computations:
            return await to_thread.run_sync(run, limiter=self.all_computations)


async def _caller(request: Request) -> Caller:
    """One owner gets `owner_threads` threads, so that it cannot use up those of others."""
    state = request.app.state
    owner, middleware = request.state.owner, state.middleware
    if (threads := state.threads.get(owner)) is None:
        threads = state.threads[owner] = CapacityLimiter(middleware.limits.owner_threads)
        state.computations[owner] = CapacityLimiter(1)
    return Caller(
        state.backend, owner, middleware.polls, middleware.limits, middleware.wire, request, threads,
        state.computations[owner], state.all_computations,
    )  # fmt: skip


CallerDep = Annotated[Caller, Depends(_caller)]
