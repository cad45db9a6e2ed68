"""What clients may ask and hold: the limits of a server, and of one request.

They are of queues, memory, time and disk, and never change a result, only whether and when it comes. Left out on
purpose: what the protocol or the SDK fixes (`schemas.py`), and the bounds of a request's head (`rlvr.web.server`),
which both servers share.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True)
class ServerLimits:
    """The limits of a server. Bytes are of messages as they are kept in memory or in the log; an owner is a key.

    Training: `lane_requests` of one run may wait, `owner_bytes` of one owner's requests; `parsed_bytes` of these are
    kept as objects, the others are read from the log. A request waits `gap_seconds` for a missing earlier seq_id.

    Sampling: `owner_samples` requests of one owner at once, `max_samples` completions of one request, `max_topk`
    likeliest tokens of one position. A request may ask for `request_logprobs` log-probs, over all positions and
    completions; an answer of the open endpoints, which is text, has at most `answer_logprobs`. (Their earlier names,
    `max_cells` and `answer_cells`, are read too.) Samples are cancelled after `session_seconds` without a heartbeat.
    While training requests wait, sampling takes `sampling_seconds` at a stretch at most. `owner_share` is the part of
    the rows and of the weights in memory that one owner may use. The KV cache takes `cache_share` of the memory that is
    free when the models are loaded, 0 for what a run's takes (as much as it needs, on a GPU 0.7 of what is free);
    `engine.cache_tokens` overrides it.

    Adapters: `live_policies` are in memory, per model, of at most `live_bytes` with their optimizers (null is
    `live_share` of the memory that is free when the models are loaded); one that is unused for `idle_seconds` is
    written to disk. A snapshot is written after `snapshot_steps` optimizer steps, once that takes at most
    `snapshot_share` of the time, or after `snapshot_bytes` of log and results.

    Results are kept for `result_seconds`, and `result_bytes` of them in memory. Of sampling sessions,
    `ephemeral_samplers` unnamed weights are kept per run, `replaced_samplers` earlier ones of a name while sessions
    sample from them, and `loaded_samplers` in memory.

    Disk and runs: one owner may have `owner_runs` training runs that are not deleted, and `owner_disk_bytes` of
    checkpoints and runs; null is `owner_disk_share` of the disk that has the state folder. `owner_loss_bytes` of custom
    losses may be kept.

    HTTP: one owner may have `owner_requests` that are not answered yet, and at most half of the connections that the
    server takes. A body must be complete after `body_seconds`, and later only if it arrives at `body_rate` bytes a
    second or faster. A body of `max_body` bytes for `forward_backward` and `max_json` for other calls; one owner may be
    sending `arriving_bodies` of the largest size at once, and have `owner_threads` of them read. A poll is held for
    `poll_seconds` (the SDK waits 45), and so is a request while the models are loaded. A result of more than
    `inline_bytes` is announced first if the client asks for that. An address to download weights is valid for
    `url_seconds`. A server that stops waits `stop_seconds` for its requests.

    Agents: the address of a rollout answers for `rollout_seconds`. One owner may have `owner_rollouts` open, and
    `owner_recorded_bytes` of recordings.
    """

    lane_requests: Count = 4_096
    owner_bytes: Count = 1 << 30
    parsed_bytes: Count = 256 << 20
    gap_seconds: Positive = 300.0
    max_rank: Count = 256
    owner_samples: Count = 8_192
    max_samples: Count = 1_024
    max_topk: Count = 128
    request_logprobs: Count = 4 << 20
    answer_logprobs: Count = 1 << 20
    session_seconds: Positive = 120.0
    sampling_seconds: Positive = 1.0
    owner_share: Share = 0.75
    cache_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    live_policies: Count = 64
    live_bytes: Annotated[int | None, Field(gt=0)] = None
    live_share: Share = 0.25
    idle_seconds: Positive = 900.0
    snapshot_steps: Count = 16
    snapshot_share: Positive = 0.05
    snapshot_bytes: Count = 64 << 20
    result_seconds: Positive = 3_600.0
    result_bytes: Count = 1 << 30
    ephemeral_samplers: Count = 16
    replaced_samplers: Count = 16
    loaded_samplers: Count = 32
    owner_runs: Count = 1_000
    owner_disk_bytes: Annotated[int | None, Field(gt=0)] = None
    owner_disk_share: Share = 0.5
    owner_loss_bytes: Count = 64 << 20
    owner_requests: Count = 8_192
    body_seconds: Positive = 60.0
    body_rate: Positive = 16_384.0
    max_body: Count = 64 << 20
    max_json: Count = 4 << 20
    arriving_bodies: Count = 8
    owner_threads: Count = 8
    poll_seconds: Annotated[float, Field(gt=0, le=40)] = 25.0
    inline_bytes: Count = 1 << 20
    url_seconds: Positive = 3_600.0
    stop_seconds: Positive = 10.0
    rollout_seconds: Positive = 86_400.0
    owner_rollouts: Count = 1_000
    owner_recorded_bytes: Count = 1 << 30


@dataclass(frozen=True)
class WireLimits:
    """Limits of one `forward_backward`: `body_bytes` unpacked, `datum_bytes` of each datum, `datums`, `tokens`, and
    `elements` of all tensors as dense ones.

    `fields` are the chunks and tensors of all datums: each costs microseconds and hundreds of bytes, even if empty.
    """

    body_bytes: Count = 64 << 20
    datum_bytes: Count = 16 << 20
    datums: Count = 8_192
    fields: Count = 131_072
    tokens: Count = 4 << 20
    elements: Count = 16 << 20


UNBOUNDED = WireLimits(*(sys.maxsize for _ in fields(WireLimits)))  # for what was accepted before
