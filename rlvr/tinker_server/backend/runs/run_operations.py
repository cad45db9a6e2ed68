"""The operations of a training run: as objects, and as entries of the log.

`digest` is of an operation's meaning, not of its bytes: a client that repeats a request may encode it differently. A
`forward_backward` is logged as it was received (`wire.py` parses it again), every other operation as JSON.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rlvr.core.messages import AdamParams, Datum
from rlvr.tinker_server.backend.storage.server_store import LogEntry
from rlvr.tinker_server.protocol.server_limits import UNBOUNDED
from rlvr.tinker_server.protocol.wire import parse_forward_backward


@dataclass(frozen=True)
class ForwardBackward:
    data: list[Datum]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool = False
    raw: bytes = b""  # the body as received, and its Content-Encoding
    encoding: str = ""


@dataclass(frozen=True)
class OptimStep:
    adam: AdamParams


@dataclass(frozen=True)
class SaveWeights:
    name: str
    ttl: float | None = None
    overwrite: bool = False
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class SaveForSampler:
    """Named (`name`), or for one sampling session of the session that trains (`sampling_session_seq_id`)."""

    name: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    ttl: float | None = None
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class SaveExternal:
    """Weights to download as files; `recipients` are age keys to encrypt them to."""

    name: str
    ttl: float | None = None
    recipients: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class LoadWeights:
    path: str
    optimizer: bool


@dataclass(frozen=True)
class RejectedOperation:
    """A request that could not be parsed beyond its seq_id, which it uses up, so that later ones need not wait for it.

    Or one that was refused through the server's fault; its `category` is then `server`.
    """

    reason: str
    category: str = "user"


@dataclass(frozen=True)
class CreateRun:
    """seq_id 0 of every run: new weights from `seed`, or those at `path` with or without the optimizer.

    `critic`: it gets a value head, of zeros unless the weights at `path` have one.
    """

    rank: int
    alpha: float
    seed: int
    attn: bool = True
    mlp: bool = True
    unembed: bool = False
    path: str | None = None
    optimizer: bool = False
    critic: bool = False


Operation = (
    ForwardBackward | OptimStep | SaveWeights | SaveForSampler | SaveExternal | LoadWeights | RejectedOperation
    | CreateRun
)  # fmt: skip
KINDS: dict[str, Any] = {
    "forward_backward": ForwardBackward, "optim_step": OptimStep, "save_weights": SaveWeights,
    "save_for_sampler": SaveForSampler, "save_external": SaveExternal, "load_weights": LoadWeights,
    "broken": RejectedOperation, "create": CreateRun,
}  # fmt: skip
KIND_NAMES = {kind: name for name, kind in KINDS.items()}


def encode(run: str, seq: int, operation: Operation) -> LogEntry:
    """The entry of an operation in the log. Its digest is equal for operations with the same meaning."""
    if isinstance(operation, ForwardBackward):
        return LogEntry(run, seq, "forward_backward", _digest_data(operation), operation.raw, operation.encoding)
    kind, body = KIND_NAMES[type(operation)], json.dumps(asdict(operation)).encode()
    return LogEntry(run, seq, kind, hashlib.sha256(kind.encode() + body).hexdigest(), body)


def memory_bytes(operation: Operation) -> int:
    """About how many bytes an operation holds while it waits, as objects."""
    if not isinstance(operation, ForwardBackward):
        return 1_024
    arrays = sum(t.data.nbytes for datum in operation.data for t in datum.loss_fn_inputs.values())
    return len(operation.raw) + arrays + 32 * sum(datum.model_input.length for datum in operation.data)


def decode(entry: LogEntry) -> Operation:
    if entry.kind == "forward_backward":
        parsed = parse_forward_backward(entry.body, entry.encoding, UNBOUNDED)
        return ForwardBackward(
            parsed.data, parsed.loss_fn, parsed.config, parsed.forward_only, entry.body, entry.encoding
        )
    fields: dict[str, Any] = json.loads(entry.body)
    return OptimStep(AdamParams(**fields["adam"])) if entry.kind == "optim_step" else KINDS[entry.kind](**fields)


def _digest_data(operation: ForwardBackward) -> str:
    settings = [operation.loss_fn, operation.forward_only, sorted(operation.config.items())]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for datum in operation.data:
        digest.update(f"{datum.model_input.to_ints()};".encode())
        for name in sorted(datum.loss_fn_inputs):
            array = datum.loss_fn_inputs[name].data
            digest.update(f"{name}{array.dtype}{array.shape}".encode())
            digest.update(array.tobytes())
    return digest.hexdigest()
