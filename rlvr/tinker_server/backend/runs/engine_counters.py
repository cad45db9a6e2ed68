"""What an engine did since the server started, for its metrics. Exercised by tests/test_tinker_metrics.py."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineCounters:
    """Only the engine thread writes. `requests`: number and seconds of each kind, without the sampling in between."""

    sampled_tokens: int = 0
    trained_tokens: int = 0
    sampling_seconds: float = 0.0
    requests: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    def add_request(self, kind: str, seconds: float) -> None:
        count, before = self.requests.get(kind, (0, 0.0))
        self.requests[kind] = (count + 1, before + seconds)


@dataclass(frozen=True)
class EngineState:
    """An engine at one moment; `model` is what it serves, by the names that clients use."""

    model: str
    alive: bool
    queued_training: int
    queued_samples: int
    running_samples: int
    adapters: int
    counters: EngineCounters
