"""The operations of a training run: as objects, as entries of the log, and what each does.

A call that changes a run is a class here and its entry in `OPERATIONS`; `http/routes_training.py` makes its route. A
run's log holds all of its operations, and a restart replays them, so `replay` has to do again what `execute` does to
weights and optimizer. `digest` is of an operation's meaning, not of its bytes: a client that repeats a request may
encode it differently. A `forward_backward` is logged as it was received (`wire.py` parses it again), every other
operation as JSON, by the names of its fields.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

from rlvr.core.messages import AdamParams, Datum
from rlvr.tinker_server.backend.request_futures import JsonResult, Outcome, ProtoResult
from rlvr.tinker_server.backend.runs.adapter_cache import RunQueue
from rlvr.tinker_server.backend.runs.run_worker import RunWorker
from rlvr.tinker_server.backend.storage.checkpoints import parse_recipients
from rlvr.tinker_server.backend.storage.paths import CheckpointPath
from rlvr.tinker_server.backend.storage.server_store import LogEntry
from rlvr.tinker_server.protocol import schemas
from rlvr.tinker_server.protocol.errors import ServerError, UserError
from rlvr.tinker_server.protocol.server_limits import UNBOUNDED
from rlvr.tinker_server.protocol.wire import encode_forward_backward, parse_forward_backward


@dataclass(frozen=True)
class RunOperation(ABC):
    """An operation of a training run.

    `log_name` is the operation's name in the log. `route` is the last part of its path under `/api/v1`; "" for an
    operation whose route is written by hand. `body` is the schema of the request.
    """

    log_name: ClassVar[str]
    route: ClassVar[str] = ""
    body: ClassVar[type[schemas.RunRequest]] = schemas.RunRequest

    @classmethod
    def from_body(cls, body: Any) -> Self:
        """The operation that a request asks for; UserError if the request makes no sense, and its seq_id is used up."""
        return cls(**body.model_dump(exclude=set(schemas.RunRequest.model_fields)))

    @abstractmethod
    def execute(self, worker: RunWorker, run: RunQueue, seq: int) -> Outcome:
        """Execute the operation and return the client's answer; UserError for what cannot be done."""

    @abstractmethod
    def replay(self, worker: RunWorker, run: RunQueue) -> None:
        """Do again, after a restart, what the operation did to the weights or the optimizer of the run."""


class UnreplayedOperation(RunOperation):
    """An operation that leaves weights and optimizer as they are: it only writes files, or fails."""

    def replay(self, worker: RunWorker, run: RunQueue) -> None:
        pass


@dataclass(frozen=True)
class ForwardBackward(RunOperation):
    log_name = "forward_backward"

    data: list[Datum]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool = False
    raw: bytes = b""  # the body as received, and its Content-Encoding
    encoding: str = ""

    def execute(self, worker: RunWorker, run: RunQueue, seq: int) -> Outcome:
        return ProtoResult(encode_forward_backward(self._compute(worker, run)))

    def replay(self, worker: RunWorker, run: RunQueue) -> None:
        if not self.forward_only:
            self._compute(worker, run)

    def _compute(self, worker: RunWorker, run: RunQueue) -> Any:
        return worker.forward_backward(run, self.data, self.loss_fn, self.config, self.forward_only)


@dataclass(frozen=True)
class OptimStep(RunOperation):
    log_name = route = "optim_step"
    body = schemas.OptimStepRequest

    adam: AdamParams

    @classmethod
    def from_body(cls, body: schemas.OptimStepRequest) -> Self:
        return cls(body.adam())

    def execute(self, worker: RunWorker, run: RunQueue, seq: int) -> Outcome:
        metrics = worker.optim_step(run, self.adam)
        run.steps += 1
        return JsonResult({"metrics": metrics})

    def replay(self, worker: RunWorker, run: RunQueue) -> None:
        worker.engine.optim_step(run.loaded_policy, self.adam)


@dataclass(frozen=True)
class SaveWeights(UnreplayedOperation):
    log_name = route = "save_weights"
    body = schemas.SaveWeightsRequest

    name: str
    ttl: float | None = None
    overwrite: bool = False
    metadata: dict[str, Any] | None = None

    @classmethod
    def from_body(cls, body: schemas.SaveWeightsRequest) -> Self:
        return cls(body.path, body.ttl_seconds, body.overwrite, body.user_metadata)

    def execute(self, worker: RunWorker, run: RunQueue, seq: int) -> Outcome:
        path = CheckpointPath(run.model, "weights", self.name)
        worker.save(run, seq, path, self.ttl, self.metadata, self.overwrite)
        return JsonResult({"path": str(path), "type": "save_weights"})


@dataclass(frozen=True)
class SaveForSampler(UnreplayedOperation):
    """Named (`name`), or for one sampling session of the session that trains (`sampling_session_seq_id`)."""

    log_name = "save_for_sampler"
    route = "save_weights_for_sampler"
    body = schemas.SaveForSamplerRequest

    name: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    ttl: float | None = None
    metadata: dict[str, Any] | None = None

    @classmethod
    def from_body(cls, body: schemas.SaveForSamplerRequest) -> Self:
        return cls(body.path, body.sampling_session_seq_id, body.kind, body.ttl_seconds, body.user_metadata)

    def execute(self, worker: RunWorker, run: RunQueue, seq: int) -> Outcome:
        if run.loaded_policy.is_critic:
            raise UserError("this run is a critic: it has values and no tokens to sample; save its state instead")
        if self.name is None:
            sampler = worker.save_ephemeral(run, seq, self.kind, self.sampling_session_seq_id)
            return JsonResult({"sampling_session_id": sampler, "type": "save_weights_for_sampler"})
        path = CheckpointPath(run.model, "sampler_weights", self.name)
        worker.save(run, seq, path, self.ttl, self.metadata, overwrite=True)
        return JsonResult({"path": str(path), "type": "save_weights_for_sampler"})


@dataclass(frozen=True)
class SaveExternal(UnreplayedOperation):
    """Weights to download as files; `recipients` are age keys to encrypt them to."""

    log_name = "save_external"
    route = "save_weights_external"
    body = schemas.SaveExternalRequest

    name: str
    ttl: float | None = None
    recipients: list[str] = field(default_factory=list[str])

    @classmethod
    def from_body(cls, body: schemas.SaveExternalRequest) -> Self:
        return cls(body.path, body.ttl_seconds, body.age_encryption_recipients or [])

    def execute(self, worker: RunWorker, run: RunQueue, seq: int) -> Outcome:
        recipients = parse_recipients(self.recipients)
        path = CheckpointPath(run.model, "external_weights", self.name)
        size = worker.save(run, seq, path, self.ttl, None, overwrite=True, recipients=recipients)
        return JsonResult({"path": str(path), "size_bytes": size, "type": "save_weights_external"})


@dataclass(frozen=True)
class LoadWeights(RunOperation):
    log_name = "load_weights"

    path: str
    optimizer: bool

    def execute(self, worker: RunWorker, run: RunQueue, seq: int) -> Outcome:
        self.replay(worker, run)
        return load_result(run, self.path)

    def replay(self, worker: RunWorker, run: RunQueue) -> None:
        worker.load(run, self.path, self.optimizer)


@dataclass(frozen=True)
class RejectedOperation(UnreplayedOperation):
    """A request that could not be parsed beyond its seq_id, which it uses up, so that later ones need not wait for it.

    Or one that was refused through the server's fault; its `category` is then `server`.
    """

    log_name = "broken"

    reason: str
    category: str = "user"

    def execute(self, worker: RunWorker, run: RunQueue, seq: int) -> Outcome:
        raise (ServerError if self.category == "server" else UserError)(self.reason)


@dataclass(frozen=True)
class CreateRun(RunOperation):
    """seq_id 0 of every run: new weights from `seed`, or those at `path` with or without the optimizer.

    `critic`: it gets a value head, of zeros unless the weights at `path` have one.
    """

    log_name = "create"

    rank: int
    alpha: float
    seed: int
    attn: bool = True
    mlp: bool = True
    unembed: bool = False
    path: str | None = None
    optimizer: bool = False
    critic: bool = False

    def execute(self, worker: RunWorker, run: RunQueue, seq: int) -> Outcome:
        self.replay(worker, run)
        return load_result(run, self.path) if self.path else JsonResult({"model_id": run.model, "type": "create_model"})

    def replay(self, worker: RunWorker, run: RunQueue) -> None:
        worker.create(run, self.rank, self.seed, {k: getattr(self, k) for k in ("alpha", "attn", "mlp", "unembed")})
        if self.path:
            try:
                worker.load(run, self.path, self.optimizer, as_critic=self.critic)
            except BaseException:
                worker.drop(run)
                raise
        if self.critic:
            worker.add_value_head(run)


# By their names in the log, which stay as they are, as do the names of their fields: older logs are replayed.
OPERATIONS: dict[str, type[RunOperation]] = {
    operation.log_name: operation
    for operation in (
        CreateRun, ForwardBackward, OptimStep, SaveWeights, SaveForSampler, SaveExternal, LoadWeights,
        RejectedOperation,
    )
}  # fmt: skip


def load_result(run: RunQueue, path: str) -> JsonResult:
    return JsonResult({"model_id": run.model, "type": "load_weights", "path": path})


def encode(run: str, seq: int, operation: RunOperation) -> LogEntry:
    """The entry of an operation in the log. Its digest is equal for operations with the same meaning."""
    if isinstance(operation, ForwardBackward):
        return LogEntry(run, seq, "forward_backward", _digest_data(operation), operation.raw, operation.encoding)
    name, body = operation.log_name, json.dumps(asdict(operation)).encode()
    return LogEntry(run, seq, name, hashlib.sha256(name.encode() + body).hexdigest(), body)


def memory_bytes(operation: RunOperation) -> int:
    """About how many bytes an operation holds while it waits, as objects."""
    if not isinstance(operation, ForwardBackward):
        return 1_024
    arrays = sum(t.data.nbytes for datum in operation.data for t in datum.loss_fn_inputs.values())
    return len(operation.raw) + arrays + 32 * sum(datum.model_input.length for datum in operation.data)


def decode(entry: LogEntry) -> RunOperation:
    if entry.kind == "forward_backward":
        parsed = parse_forward_backward(entry.body, entry.encoding, UNBOUNDED)
        return ForwardBackward(
            parsed.data, parsed.loss_fn, parsed.config, parsed.forward_only, entry.body, entry.encoding
        )
    fields: dict[str, Any] = json.loads(entry.body)
    return OptimStep(AdamParams(**fields["adam"])) if entry.kind == "optim_step" else OPERATIONS[entry.kind](**fields)


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
