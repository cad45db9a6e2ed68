"""A sampling request that waits for the engine.

The engine serves its requests in order of arrival, so it is given only what it can run soon; the others wait in a
`rlvr.core.fair_queue`. Exercised by tests/test_tinker_attacks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlvr.core.messages import ModelInput, SampleResponse, SamplingParams
from rlvr.tinker_server.backend.request_futures import LiveOutcome, ResultFuture
from rlvr.tinker_server.backend.storage.server_store import Row


@dataclass(eq=False)
class QueuedSample:
    """One sampling request; `options` are those of `Engine.enqueue`. `encode` makes its outcome."""

    future: ResultFuture
    sampler: Row
    prompt: ModelInput
    count: int
    params: SamplingParams
    options: dict[str, Any]
    release_quota: Callable[[], None]
    encode: Callable[[SampleResponse], LiveOutcome]

    @property
    def owner(self) -> str:
        return self.future.owner

    @property
    def weights(self) -> tuple[Any, ...]:
        """Equal for requests that sample from the same weights."""
        return tuple(self.sampler[name] for name in ("base_model", "path", "folder", "number"))
