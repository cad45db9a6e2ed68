"""The limits of one server: queues, memory, time, disk. They never change a result, only whether and when it comes.

    rlvr serve engine --model ... --limit session_seconds=600 --limit live_policies=8

Exercised by tests/test_tinker_backend.py and tests/test_tinker_serve.py. Not here: the sizes of bodies and tensors
(`http/wire.py`) and the engine's own limits (`rlvr.engine.engine_options.EngineLimits`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class ServerLimits:
    """Bytes are of messages as they are kept in memory or in the log."""

    # Training
    lane_requests: Count = 4_096  # of one run that may wait
    owner_bytes: Count = 1 << 30  # of one owner's requests that may wait
    parsed_bytes: Count = 256 << 20  # of these that are kept as objects; the others are read from the log
    gap_seconds: Positive = 300.0  # that a request waits for a missing earlier seq_id
    max_rank: Count = 256  # of an adapter
    # Sampling
    owner_samples: Count = 8_192  # requests of one owner at once
    max_samples: Count = 1_024  # completions of one request
    max_topk: Count = 128  # likeliest tokens of one position
    max_cells: Count = 4 << 20  # likeliest tokens of one request
    session_seconds: Positive = 120.0  # without a heartbeat, after which a session's samples are cancelled
    # Adapters in memory, per base model
    live_policies: Count = 64
    idle_seconds: Positive = 900.0  # after which an unused one is written to disk
    # Snapshots: after so many optimizer steps, once writing takes at most this share of the time; or after so many
    # bytes of log and results
    snapshot_steps: Count = 16
    snapshot_share: Positive = 0.05
    snapshot_bytes: Count = 64 << 20
    # Results
    result_seconds: Positive = 3_600.0  # that they are kept
    result_bytes: Count = 1 << 30  # of them in memory
    # Weights of sampling sessions
    ephemeral_samplers: Count = 16  # unnamed ones kept, per run
    replaced_samplers: Count = 16  # earlier ones of a name kept while sessions sample from them
    loaded_samplers: Count = 32  # in memory


def parse_limits(texts: Iterable[str]) -> ServerLimits:
    """The limits of `name=value` texts; ValueError names a wrong one."""
    pairs = {name: value for name, _, value in (text.partition("=") for text in texts)}
    names = list(ServerLimits.__dataclass_fields__)
    for name in pairs:
        if name not in names:
            raise ValueError(f"--limit {name}: unknown; expected NAME=VALUE with one of {', '.join(names)}")
    try:
        return TypeAdapter(ServerLimits).validate_python(pairs)
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"--limit {fault['loc'][0]}={fault['input']}: {fault['msg']}") from error
