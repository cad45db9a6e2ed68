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

if TYPE_CHECKING:
    from rlvr.tinker_server.backend import TinkerBackend


THREADS_PER_OWNER = 8  # at once for one owner, so that one owner cannot use up those of others


@dataclass(frozen=True)
class Caller:
    backend: TinkerBackend
    owner: str
    polls: LongPolls
    request: Request
    threads: CapacityLimiter

    async def call(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the backend for this owner, on a thread: some of them wait for the disk."""
        return await to_thread.run_sync(partial(method, self.owner, *args, **kwargs), limiter=self.threads)


async def _caller(request: Request) -> Caller:
    state = request.app.state
    owner = request.state.owner
    if (threads := state.threads.get(owner)) is None:
        threads = state.threads[owner] = CapacityLimiter(THREADS_PER_OWNER)
    return Caller(state.backend, owner, state.polls, request, threads)


CallerDep = Annotated[Caller, Depends(_caller)]
