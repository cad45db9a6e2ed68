"""Who asks, and the server that is asked: what every route is given.

Exercised by tests/test_tinker_http.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from rlvr.service.tinker_api.waiting import Waiting

if TYPE_CHECKING:
    from rlvr.service.tinker_api.core import Core


@dataclass(frozen=True)
class Caller:
    """Who asks, and the server that is asked."""

    core: Core
    owner: str
    waiting: Waiting
    request: Request

    async def ask(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """A method of `core` for this owner, on a thread: some of them wait for the disk."""
        return await run_in_threadpool(method, self.owner, *args, **kwargs)


async def _caller(request: Request) -> Caller:
    state = request.app.state
    return Caller(state.core, request.state.owner, state.waiting, request)


Asks = Annotated[Caller, Depends(_caller)]
