"""The fair queue of sampling requests: owners take turns, and so do the sessions of one owner.

The engine serves its requests in order of arrival, so it is given only what it can run soon. Thousands of requests of
one owner wait here, and another owner's single request does not wait behind them. Exercised by
tests/test_tinker_attacks.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.tinker_server.http.requested_targets import RequestedTargets
from rlvr.tinker_server.request_futures import ResultFuture
from rlvr.tinker_server.storage.server_store import Row


@dataclass(eq=False)
class QueuedSample:
    """One sampling request; `options` holds prompt_logprobs, topk_prompt and topk_sample."""

    future: ResultFuture
    sampler: Row
    prompt: ModelInput
    count: int
    params: SamplingParams
    options: dict[str, Any]
    release_quota: Callable[[], None]
    targets: RequestedTargets | None = None

    @property
    def owner(self) -> str:
        return self.future.owner

    @property
    def weights(self) -> tuple[Any, ...]:
        """Equal for requests that sample from the same weights."""
        return tuple(self.sampler[name] for name in ("base_model", "path", "folder", "number"))


class FairQueue:
    """Not thread-safe: the engine thread's lock is held around every call."""

    def __init__(self) -> None:
        self._owners: dict[
            str, dict[str, deque[QueuedSample]]
        ] = {}  # owner -> session -> requests; the next turn first

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __len__(self) -> int:
        return sum(len(requests) for sessions in self._owners.values() for requests in sessions.values())

    def add(self, sampling: QueuedSample) -> None:
        sessions = self._owners.setdefault(sampling.owner, {})
        sessions.setdefault(sampling.future.session, deque()).append(sampling)

    def pop(self, fits: Callable[[QueuedSample], bool]) -> QueuedSample | None:
        """Take the next request in turn that `fits`; owners and sessions whose next one does not fit are skipped."""
        for owner, sessions in self._owners.items():
            for session, requests in sessions.items():
                if not fits(requests[0]):
                    continue
                taken = requests.popleft()
                del sessions[session], self._owners[owner]  # moved to the end below, or removed
                if requests:
                    sessions[session] = requests
                if sessions:
                    self._owners[owner] = sessions
                return taken
        return None

    def remove(self, futures: Set[ResultFuture]) -> list[QueuedSample]:
        """Remove the requests of these futures; returns them."""
        every = [one for sessions in self._owners.values() for requests in sessions.values() for one in requests]
        self._owners = {}
        for one in every:
            if one.future not in futures:
                self.add(one)
        return [one for one in every if one.future in futures]
