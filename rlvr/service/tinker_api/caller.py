"""Who asks, and the server that is asked: what every route is given.

Exercised by tests/test_tinker_http.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Request

from rlvr.service.tinker_api.waiting import Waiting

if TYPE_CHECKING:
    from rlvr.service.tinker_api.core import Core


THREADS = 8  # at once for one owner: whoever sends much keeps none that another needs


@dataclass(frozen=True)
class Caller:
    """Who asks, and the server that is asked."""

    core: Core
    owner: str
    waiting: Waiting
    request: Request
    threads: CapacityLimiter

    async def ask(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """A method of `core` for this owner, on a thread: some of them wait for the disk."""
        return await to_thread.run_sync(partial(method, self.owner, *args, **kwargs), limiter=self.threads)


async def _caller(request: Request) -> Caller:
    state = request.app.state
    owner = request.state.owner
    if (threads := state.threads.get(owner)) is None:
        threads = state.threads[owner] = CapacityLimiter(THREADS)
    return Caller(state.core, owner, state.waiting, request, threads)


Asks = Annotated[Caller, Depends(_caller)]
