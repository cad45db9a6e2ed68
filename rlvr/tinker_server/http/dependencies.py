"""The dependency of every route: the caller, and the backend it calls.

Exercised by tests/test_tinker_http.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

from rlvr.tinker_server.http.long_poll import LongPolls
from rlvr.tinker_server.server_limits import ServerLimits, WireLimits

if TYPE_CHECKING:
    from rlvr.tinker_server.backend import TinkerBackend


@dataclass(frozen=True)
class Caller:
    backend: TinkerBackend
    owner: str
    polls: LongPolls
    limits: ServerLimits
    wire: WireLimits
    request: Request
    threads: CapacityLimiter

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the backend for this owner, on a thread: some of them wait for the disk."""
        return await to_thread.run_sync(partial(method, self.owner, *args, **kwargs), limiter=self.threads)


async def _caller(request: Request) -> Caller:
    """One owner gets `owner_threads` threads, so that it cannot use up those of others."""
    state = request.app.state
    owner, middleware = request.state.owner, state.middleware
    if (threads := state.threads.get(owner)) is None:
        threads = state.threads[owner] = CapacityLimiter(middleware.limits.owner_threads)
    return Caller(state.backend, owner, middleware.polls, middleware.limits, middleware.wire, request, threads)


CallerDep = Annotated[Caller, Depends(_caller)]
