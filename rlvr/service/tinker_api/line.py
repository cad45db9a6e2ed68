"""Requests to sample that the engine does not have yet: owners take turns, and so do the clients of one owner.

The engine works off what it has in order of arrival, so it is given no more than it can run soon: what thousands of
requests of one owner ask for waits here, where another owner's single request does not wait behind it. Exercised by
tests/test_tinker_attacks.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from rlvr.messages import ModelInput, SamplingParams
from rlvr.service.tinker_api.promises import Promise
from rlvr.service.tinker_api.store import Row


@dataclass(eq=False)
class Sampling:
    """One request to sample; `wants` holds prompt_logprobs, topk_prompt and topk_sample."""

    promise: Promise
    sampler: Row
    prompt: ModelInput
    count: int
    params: SamplingParams
    wants: dict[str, Any]
    over: Callable[[], None]  # gives back what it holds of its owner's quota

    @property
    def owner(self) -> str:
        return self.promise.owner

    @property
    def weights(self) -> tuple[Any, ...]:
        """Equal for two requests that sample from the same weights."""
        return tuple(self.sampler[name] for name in ("base_model", "path", "folder", "number"))


class Line:
    """Not thread-safe: the worker's lock is held around every call."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, deque[Sampling]]] = {}  # owner -> session -> requests; next in turn first

    def __bool__(self) -> bool:
        return bool(self._owners)

    def add(self, sampling: Sampling) -> None:
        sessions = self._owners.setdefault(sampling.owner, {})
        sessions.setdefault(sampling.promise.session, deque()).append(sampling)

    def take(self, fits: Callable[[Sampling], bool]) -> Sampling | None:
        """The next in turn that fits; an owner or a session whose next one does not is passed over this time."""
        for owner, sessions in self._owners.items():
            for session, requests in sessions.items():
                if not fits(requests[0]):
                    continue
                taken = requests.popleft()
                del sessions[session], self._owners[owner]  # to the end of their lines, or out of them
                if requests:
                    sessions[session] = requests
                if sessions:
                    self._owners[owner] = sessions
                return taken
        return None

    def remove(self, promises: Set[Promise]) -> list[Sampling]:
        """Take these out, wherever they stand."""
        every = [one for sessions in self._owners.values() for requests in sessions.values() for one in requests]
        self._owners = {}
        for one in every:
            if one.promise not in promises:
                self.add(one)
        return [one for one in every if one.promise in promises]
