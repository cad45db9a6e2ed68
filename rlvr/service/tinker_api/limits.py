"""What one server allows: queues, memory, time, disk. None of these changes a result, only whether and when it comes.

Exercised by tests/test_tinker_core.py. Not here: the sizes of bodies and tensors, which `wire.py` checks while it
reads, and the engine's own limits (`rlvr.engine.options.EngineLimits`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """Bytes are of the messages as they are kept in memory or in the log.

    Training: `lane_requests` and `owner_bytes` bound what may wait (`parsed_bytes` of it as objects, the rest in
    the log), `gap_seconds` how long a request waits for a missing seq_id before it, `max_rank` an adapter.
    Sampling: `owner_samples` requests at once, `max_samples` completions each, with the `max_topk` likeliest tokens
    of each place and `max_cells` of these in all; given up when nobody was heard of in their session for
    `session_seconds`. Policies: `live_policies` adapters in memory per base model, idle ones put on disk after
    `idle_seconds`; a snapshot after `snapshot_steps` optimizer steps, as soon as it takes at most `snapshot_share`
    of the time since the last one, and after `snapshot_bytes` of log and results. Results: kept for
    `result_seconds`, in memory at most `result_bytes`. `ephemeral_samplers`: unnamed sampler weights kept per
    training run; `replaced_samplers`: named ones, by name, that were saved again while sessions sample from them.
    `loaded_samplers`: those kept in memory.
    """

    lane_requests: int = 4_096
    owner_bytes: int = 1 << 30
    parsed_bytes: int = 256 << 20
    gap_seconds: float = 300.0
    owner_samples: int = 8_192
    max_samples: int = 1_024
    max_topk: int = 128
    max_cells: int = 4 << 20
    session_seconds: float = 120.0
    max_rank: int = 256
    live_policies: int = 64
    idle_seconds: float = 900.0
    snapshot_steps: int = 16
    snapshot_share: float = 0.05
    snapshot_bytes: int = 64 << 20
    result_seconds: float = 3_600.0
    result_bytes: int = 1 << 30
    ephemeral_samplers: int = 16
    replaced_samplers: int = 16
    loaded_samplers: int = 32

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"limits: {name}={value!r}, expected more than 0")
