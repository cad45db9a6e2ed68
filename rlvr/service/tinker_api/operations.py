"""What a client may ask of one training run, in order of its seq_ids: as objects, and as entries of the log.

`digest` is of what is asked, not of the bytes: a client that sends the same request again may encode it in another
way. A `forward_backward` is logged as it was received (`wire.py` reads it again), everything else as JSON.
Exercised by tests/test_tinker_core.py.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rlvr.messages import AdamParams, Datum
from rlvr.service.tinker_api.wire import parse_forward_backward


@dataclass(frozen=True)
class ForwardBackward:
    data: list[Datum]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool = False
    raw: bytes = b""  # the body as it was received, and its Content-Encoding
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
    """Weights to be taken away as files; `recipients` are age keys to encrypt them to."""

    name: str
    ttl: float | None = None
    recipients: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class LoadWeights:
    path: str
    optimizer: bool


@dataclass(frozen=True)
class Broken:
    """A request that could not be read beyond its seq_id, which it uses up: those after it need not wait for it.

    Or one that was refused by fault of the `server`, which is then its `category`.
    """

    reason: str
    category: str = "user"


@dataclass(frozen=True)
class Create:
    """seq_id 0 of every run: fresh weights from `seed`, or those at `path` with or without the optimizer."""

    rank: int
    alpha: float
    seed: int
    attn: bool = True
    mlp: bool = True
    unembed: bool = False
    path: str | None = None
    optimizer: bool = False


Operation = ForwardBackward | OptimStep | SaveWeights | SaveForSampler | SaveExternal | LoadWeights | Broken | Create
KINDS: dict[str, Any] = {
    "forward_backward": ForwardBackward,
    "optim_step": OptimStep,
    "save_weights": SaveWeights,
    "save_for_sampler": SaveForSampler,
    "save_external": SaveExternal,
    "load_weights": LoadWeights,
    "broken": Broken,
    "create": Create,
}
NAMES = {made: name for name, made in KINDS.items()}


def encode(operation: Operation) -> tuple[str, bytes, str]:
    """(kind, body, encoding) for the log."""
    if isinstance(operation, ForwardBackward):
        return "forward_backward", operation.raw, operation.encoding
    return NAMES[type(operation)], json.dumps(asdict(operation)).encode(), ""


def weight(operation: Operation) -> int:
    """About how many bytes it holds while it waits, as objects."""
    if not isinstance(operation, ForwardBackward):
        return 1_024
    arrays = sum(t.data.nbytes for datum in operation.data for t in datum.loss_fn_inputs.values())
    return len(operation.raw) + arrays + 32 * sum(datum.model_input.length for datum in operation.data)


def decode(kind: str, body: bytes, encoding: str) -> Operation:
    if kind == "forward_backward":
        request = parse_forward_backward(body, encoding)
        return ForwardBackward(request.data, request.loss_fn, request.config, request.forward_only, body, encoding)
    fields: dict[str, Any] = json.loads(body)
    return OptimStep(AdamParams(**fields["adam"])) if kind == "optim_step" else KINDS[kind](**fields)


def digest(operation: Operation) -> str:
    """Equal for two requests that ask the same."""
    if not isinstance(operation, ForwardBackward):
        kind, body, _ = encode(operation)
        return hashlib.sha256(kind.encode() + body).hexdigest()
    settings = [operation.loss_fn, operation.forward_only, sorted(operation.config.items())]
    asked = hashlib.sha256(json.dumps(settings).encode())
    for datum in operation.data:
        asked.update(f"{datum.model_input.to_ints()};".encode())
        for name in sorted(datum.loss_fn_inputs):
            array = datum.loss_fn_inputs[name].data
            asked.update(f"{name}{array.dtype}{array.shape}".encode())
            asked.update(array.tobytes())
    return asked.hexdigest()
