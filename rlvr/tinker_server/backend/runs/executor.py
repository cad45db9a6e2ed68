"""Executes the requests of training runs, one at a time, and turns exceptions into failures that the client gets.

A request that fails changes nothing and uses up its seq_id. A wrong request is a `user` failure; a full disk, a lack
of memory or a bug is a `server` failure. After a failure in the middle of an update, or one that left weights that
are not finite, the adapter is restored from its snapshot and log. Only the engine thread calls these.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from rlvr.core.files import new_folder
from rlvr.core.messages import NonFiniteError
from rlvr.tinker_server.backend.request_futures import FutureRegistry, JsonResult, Outcome, ProtoResult, RequestFailure
from rlvr.tinker_server.backend.runs import run_operations as ops
from rlvr.tinker_server.backend.runs.adapter_cache import (
    AdapterCache,
    FinishedRequest,
    QueuedRequest,
    RunQueue,
    lora_config,
)
from rlvr.tinker_server.backend.storage.checkpoints import Checkpoints, encrypt_files, parse_recipients, validate_ttl
from rlvr.tinker_server.backend.storage.custom_losses import CustomLosses
from rlvr.tinker_server.backend.storage.disk_usage import DiskAccounts, folder_size
from rlvr.tinker_server.backend.storage.paths import CheckpointPath, run_folder
from rlvr.tinker_server.backend.storage.sampling_sessions import KINDS, SamplingSessions
from rlvr.tinker_server.backend.storage.server_store import ServerStore
from rlvr.tinker_server.protocol.errors import ServerError, TinkerServerError, UserError
from rlvr.tinker_server.protocol.wire import encode_forward_backward

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine
    from rlvr.engine.loss_program import LossProgram

log = logging.getLogger(__name__)
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
MAX_ERROR_CHARS = 2_000  # an error may quote what a client sent
UNPUBLISHED_LOSS = "stable_reinforce"
CUSTOM_LOSS = "custom"  # one that the client made, by its loss_id
MAX_PROGRAMS = 64  # custom losses that stay in memory


class DivergedStep(UserError):
    """A step left weights that are not finite."""


@dataclass
class EngineCounters:
    """What an engine did since the server started. Only the engine thread writes. `requests`: number and seconds of
    each kind, without the sampling in between."""

    sampled_tokens: int = 0
    trained_tokens: int = 0
    sampling_seconds: float = 0.0
    requests: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    def add_request(self, kind: str, seconds: float) -> None:
        count, before = self.requests.get(kind, (0, 0.0))
        self.requests[kind] = (count + 1, before + seconds)


@dataclass(eq=False)
class RunExecutor:
    _engine: Engine
    _store: ServerStore
    _futures: FutureRegistry
    _adapters: AdapterCache
    _checkpoints: Checkpoints
    _sampling_sessions: SamplingSessions
    _disk: DiskAccounts
    _losses: CustomLosses
    _root: Path
    _aliases: dict[str, str]
    counters: EngineCounters = field(default_factory=EngineCounters)
    between_micro_batches: Callable[[], None] | None = None  # called during a long request
    paused_seconds: float = 0.0  # that these calls took, which the request is not charged for
    _substitutions: dict[str, str] = field(default_factory=dict[str, str])  # run -> the metric that names its alias
    _programs: dict[str, LossProgram] = field(default_factory=dict[str, "LossProgram"])  # by loss_id

    def __post_init__(self) -> None:
        self._adapters.replay = self._replay

    def run_next(self, run: RunQueue) -> None:
        """Execute the run's next request and resolve its future."""
        begun, seq, queued = time.monotonic(), run.next_seq, run.queue[run.next_seq]
        paused_before = self.paused_seconds
        self._adapters.in_use.append(run)
        operation, is_damaged = queued.operation, False
        try:
            if operation is None:
                entry = self._store.log_entry(run.model, seq)
                assert entry is not None
                operation = ops.decode(entry)
            if not isinstance(operation, ops.CreateRun):
                self._adapters.get(run)
            outcome: Outcome = self._execute(run, seq, operation)
        except Exception as error:
            outcome, is_damaged = classify_error(error)
            if is_damaged:
                log.exception("%s: request %d failed", run.model, seq)
        finally:
            self._adapters.in_use.remove(run)
        took = time.monotonic() - begun - (self.paused_seconds - paused_before)
        run.compute_seconds += took
        self._count(operation, outcome, took)
        self.finish(run, seq, queued, outcome)
        if is_damaged:
            self._adapters.drop(run)
        else:
            # A loaded checkpoint may be deleted or replaced, so the run keeps its own copy.
            is_load = isinstance(operation, (ops.CreateRun, ops.LoadWeights)) and operation.path
            if (is_load and not isinstance(outcome, RequestFailure)) or self._adapters.needs_snapshot(run):
                self._adapters.snapshot(run)

    def _count(self, operation: ops.Operation | None, outcome: Outcome, seconds: float) -> None:
        is_forward = isinstance(operation, ops.ForwardBackward) and operation.forward_only
        kind = "forward" if is_forward else "unreadable" if operation is None else ops.KIND_NAMES[type(operation)]
        self.counters.add_request(kind, seconds)
        if isinstance(operation, ops.ForwardBackward) and not isinstance(outcome, RequestFailure):
            self.counters.trained_tokens += sum(datum.model_input.length for datum in operation.data)

    def finish(self, run: RunQueue, seq: int, queued: QueuedRequest, outcome: Outcome) -> None:
        """Record a request's outcome and resolve its future; the next request may run."""
        if isinstance(outcome, RequestFailure):
            try:
                self._store.record_failure(run.model, seq, queued.digest, outcome)
            except Exception as error:  # the client gets it all the same
                log.warning("%s: the failure of request %d could not be recorded: %s", run.model, seq, error)
        with run.lock:
            run.queue.pop(seq, None)
            run.done[seq] = FinishedRequest(queued, outcome)
            run.log_bytes += queued.size + queued.future.size
            if isinstance(outcome, RequestFailure):
                run.failures[seq] = outcome
            if seq == run.next_seq:
                run.next_seq += 1
                run.skip_failures()
        queued.operation = None
        if queued.release_quota is not None:
            queued.release_quota()
        self._futures.resolve(queued.future, outcome)

    def remove_run_state(self, run: str) -> None:
        self._checkpoints.remove_run_state(run)

    def _execute(self, run: RunQueue, seq: int, operation: ops.Operation) -> Outcome:
        match operation:
            case ops.RejectedOperation():
                raise (ServerError if operation.category == "server" else UserError)(operation.reason)
            case ops.ForwardBackward():
                return ProtoResult(encode_forward_backward(self._forward_backward(run, operation)))
            case ops.OptimStep():
                assert run.policy is not None
                response = self._engine.optim_step(run.policy, operation.adam)
                if not run.policy.has_finite_weights():
                    raise DivergedStep(f"after a step with {operation.adam} a weight is not finite; it was taken back")
                run.steps += 1
                substitution = self._substitutions.get(run.model)  # recipes log the metrics of steps, not of gradients
                return JsonResult({"metrics": response.metrics | ({substitution: 1.0} if substitution else {})})
            case ops.SaveWeights():
                path = CheckpointPath(run.model, "weights", operation.name)
                self._save(run, seq, path, operation.ttl, operation.metadata, operation.overwrite)
                return JsonResult({"path": str(path), "type": "save_weights"})
            case ops.SaveForSampler() if run.policy is not None and run.policy.is_critic:
                raise UserError("this run is a critic: it has values and no tokens to sample; save its state instead")
            case ops.SaveForSampler(name=str(name)):
                path = CheckpointPath(run.model, "sampler_weights", name)
                self._save(run, seq, path, operation.ttl, operation.metadata, overwrite=True)
                return JsonResult({"path": str(path), "type": "save_weights_for_sampler"})
            case ops.SaveForSampler():
                return self._save_ephemeral(run, seq, operation)
            case ops.SaveExternal():
                recipients = parse_recipients(operation.recipients)
                path = CheckpointPath(run.model, "external_weights", operation.name)
                size = self._save(run, seq, path, operation.ttl, None, overwrite=True, recipients=recipients)
                return JsonResult({"path": str(path), "size_bytes": size, "type": "save_weights_external"})
            case ops.LoadWeights() | ops.CreateRun():
                self._replay(run, operation)
                if operation.path:
                    return JsonResult({"model_id": run.model, "type": "load_weights", "path": operation.path})
                return JsonResult({"model_id": run.model, "type": "create_model"})

    def _replay(self, run: RunQueue, operation: ops.Operation) -> None:
        """Apply an operation to the run itself: all that replaying the log needs."""
        from rlvr.engine.value_head import add_value_head

        match operation:
            case ops.ForwardBackward(forward_only=False):
                self._forward_backward(run, operation)
            case ops.OptimStep():
                assert run.policy is not None
                self._engine.optim_step(run.policy, operation.adam)
            case ops.LoadWeights():
                self._load(run, operation.path, operation.optimizer)
            case ops.CreateRun():
                choice = {k: getattr(operation, k) for k in ("alpha", "attn", "mlp", "unembed")}
                config = lora_config(self._engine, operation.rank, choice)
                policy = self._adapters.create(run, config, operation.seed)
                if operation.path:
                    try:
                        self._load(run, operation.path, operation.optimizer, as_critic=operation.critic)
                    except BaseException:
                        self._adapters.drop(run)
                        raise
                if operation.critic and not policy.is_critic:
                    add_value_head(policy, self._engine.model)
            case (
                ops.RejectedOperation() | ops.ForwardBackward() | ops.SaveWeights() | ops.SaveForSampler()
                | ops.SaveExternal()
            ):  # fmt: skip
                pass
            case _:  # an operation that is not named here would be lost at a restart
                assert_never(operation)

    def _forward_backward(self, run: RunQueue, request: ops.ForwardBackward) -> Any:
        if request.loss_fn == CUSTOM_LOSS:
            return self._compute_custom_loss(run, request)
        loss_fn, config = self.resolve_loss(request)
        assert run.policy is not None
        is_substitute = loss_fn != request.loss_fn
        if run.policy.is_critic:
            loss_fn = _find_critic_loss(loss_fn)
        output = self._engine.forward_backward(
            run.policy,
            request.data,
            loss_fn,
            config,
            backward=not request.forward_only,
            after_batch=self.between_micro_batches,
        )
        if is_substitute:
            if run.model not in self._substitutions:
                log.warning("%s: loss_fn %s is computed as %s, another loss", run.model, request.loss_fn, loss_fn)
            self._substitutions[run.model] = f"{request.loss_fn}_computed_as_{loss_fn}"
            output.metrics[f"{self._substitutions[run.model]}:max"] = 1.0
        return output

    def _compute_custom_loss(self, run: RunQueue, request: ops.ForwardBackward) -> Any:
        from rlvr.engine.loss_program import LossProgram, compute_custom_loss

        assert run.policy is not None
        if run.policy.is_critic:
            _find_critic_loss(CUSTOM_LOSS)
        match request.config:
            case {"loss_id": str(loss_id), **rest} if not rest:
                pass
            case _:
                raise UserError(
                    f"loss_fn {CUSTOM_LOSS!r}: expected its loss_id alone in loss_fn_config, got "
                    f"{', '.join(request.config) or 'nothing'}; pass the handle of create_custom_loss on"
                )
        session = run.model.rsplit(":train:", 1)[0]
        graph = self._losses.read(session, loss_id)
        if loss_id not in self._programs:
            if len(self._programs) >= MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[loss_id] = LossProgram(graph)
        return compute_custom_loss(
            self._engine,
            run.policy,
            self._programs[loss_id],
            request.data,
            backward=not request.forward_only,
            after_batch=self.between_micro_batches,
        )

    def resolve_loss(self, request: ops.ForwardBackward) -> tuple[str, dict[str, float]]:
        """The engine's loss and settings for a request."""
        from rlvr.algorithms.loss_specs import LOSS_SPECS

        config = dict(request.config)
        name = self._aliases.get(request.loss_fn, request.loss_fn)
        if name == UNPUBLISHED_LOSS:
            raise UserError(
                f"loss_fn {UNPUBLISHED_LOSS!r}: its formula is not published, so this server does not guess it. Add "
                f"`loss_fn=cispo` to the command of a recipe (the losses here: {', '.join(LOSS_SPECS)}). Or stop the "
                "server and start it with the same command and one more option, `rlvr serve engine ... --alias "
                f"{UNPUBLISHED_LOSS}=cispo`, which computes that loss in its place"
            )
        if request.loss_fn == UNPUBLISHED_LOSS and (coefficient := config.pop("kl_coeff", 0)) != 0:
            raise UserError(
                f"loss_fn_config: kl_coeff={coefficient} has no effect, because this server computes "
                f"{UNPUBLISHED_LOSS} as {name}, which has no such term. Leave it out or give 0"
            )
        if metadata_texts := [key for key, value in config.items() if isinstance(value, str)]:
            raise UserError(f"loss_fn_config: {', '.join(metadata_texts)} is a text; {name} has only numbers")
        return name, {key: float(value) for key, value in config.items()}

    def _load(self, run: RunQueue, path: str, optimizer: bool, *, as_critic: bool = False) -> None:
        """Load a checkpoint; `as_critic` into a new run, where a critic's head is expected and a policy's weights are
        what the critic begins with."""
        from rlvr.engine.checkpoint import load_policy
        from rlvr.engine.policy import VALUE_HEAD_FILE
        from rlvr.engine.value_head import add_value_head

        assert run.policy is not None
        place, row = self._checkpoints.find(run.owner, path)
        own = run.policy.lora
        assert own is not None
        if (row["base_model"], row["rank"]) != (run.base_model, own.rank):
            raise UserError(
                f"{path} is of {row['base_model']} with LoRA rank {row['rank']}, this run of {run.base_model} with "
                f"rank {own.rank}; make a run from the checkpoint (create_training_client_from_state) instead"
            )
        folder = self._checkpoints.folder(place, row["seq"])
        if as_critic and (folder / VALUE_HEAD_FILE).exists():
            add_value_head(run.policy, self._engine.model)
        elif as_critic:
            optimizer = False  # that of a policy
        try:
            load_policy(folder, run.policy, self._engine.model, optimizer=optimizer)
        except ValueError as error:
            raise UserError(str(error).replace(str(folder), path)) from error

    def _save(
        self,
        run: RunQueue,
        seq: int,
        path: CheckpointPath,
        ttl: float | None,
        metadata: Any,
        overwrite: bool,
        recipients: Sequence[Any] = (),
    ) -> int:
        """Write a named checkpoint, unless this same request did so before a restart; returns its size."""
        from rlvr.engine.checkpoint import save_policy

        assert run.policy is not None
        row = self._checkpoints.find_row(path)
        if row is not None and row["seq"] >= seq:  # a later request may have taken the name since
            return row["size"]
        if row is not None and self._checkpoints.is_alive(row) and not overwrite:
            raise UserError(f"{path} exists already: choose another name, or give overwrite=True")
        validate_ttl(ttl)
        freed = row["size"] if row is not None and self._checkpoints.is_alive(row) else 0
        with new_folder(self._checkpoints.folder(path, seq)) as folder:
            save_policy(folder, run.policy, self._engine.model, optimizer=path.kind == "weights")
            encrypt_files(folder, list(recipients))
            self._disk.check_quota(run.owner, str(path), folder_size(folder), freed)
        self._checkpoints.register(path, run.owner, seq, ttl, metadata)
        saved = self._checkpoints.find_row(path)
        assert saved is not None
        return saved["size"]

    def _save_ephemeral(self, run: RunQueue, seq: int, request: ops.SaveForSampler) -> Outcome:
        from rlvr.engine.adapter_files import write_adapter

        folder = run_folder(self._root, run.model) / "ephemeral" / str(seq)
        if request.sampling_session_seq_id is None or request.kind not in KINDS:
            raise UserError(
                f"save_weights_for_sampler without a path: kind={request.kind!r}, "
                f"sampling_session_seq_id={request.sampling_session_seq_id}; give a path, or that id and "
                f"kind {' or '.join(KINDS)}"
            )
        assert run.policy is not None
        session = run.model.rsplit(":train:", 1)[0]
        sampler = f"{session}:sample:{request.sampling_session_seq_id}"
        row = self._sampling_sessions.find(sampler)
        if row is not None and (row["model"], row["number"]) != (run.model, seq):
            raise UserError(
                f"sampling_session_seq_id {request.sampling_session_seq_id} of this session is taken already"
            )
        if row is None:
            with new_folder(folder) as new:
                write_adapter(new, run.policy, self._engine.model)
                freed = self._sampling_sessions.measure_replaced(run.model)
                self._disk.check_quota(run.owner, "this unnamed save for a sampler", folder_size(new), freed)
            self._sampling_sessions.create_from_run(
                sampler, run.model, seq, folder, request.kind, self._engine.snapshot(run.policy)
            )
            self._disk.refresh(run.model)
        return JsonResult({"sampling_session_id": sampler, "type": "save_weights_for_sampler"})


def _find_critic_loss(loss_fn: str) -> str:
    """The engine's name for the loss of a critic, which clients send as `ppo`: the SDK takes no new name."""
    from rlvr.algorithms.loss_specs import VALUE_LOSS

    if loss_fn != "ppo":
        raise UserError(
            f"loss_fn {loss_fn!r} for a critic: send its loss as ppo, with `values`, `returns` and `weights` in every "
            "datum and value_clip alone in loss_fn_config"
        )
    return VALUE_LOSS


class ClassifiedError(NamedTuple):
    failure: RequestFailure
    is_damaged: bool  # whether the error may have left the adapter half changed


def classify_error(error: Exception) -> ClassifiedError:
    """The failure that the client gets for an exception."""
    if isinstance(error, TinkerServerError):
        return ClassifiedError(RequestFailure(str(error), error.category), isinstance(error, DivergedStep))
    if isinstance(error, NonFiniteError):
        detail = f"{error}; the weights and the gradients before this request are kept"
        return ClassifiedError(RequestFailure(detail, "user"), False)
    if isinstance(error, ValueError):
        return ClassifiedError(RequestFailure(str(error)[:MAX_ERROR_CHARS], "user"), False)
    hidden = re.search(r"\(os error (\d+)\)", str(error))  # safetensors puts the system's error into its message
    if isinstance(error, OSError) or hidden:
        number = int(hidden[1]) if hidden else getattr(error, "errno", None)
        why = os.strerror(number) if number else str(error)
        is_full = number in DISK_FULL_ERRORS
        fault = "the server's disk is full" if is_full else f"the server cannot write or read its files ({why})"
        return ClassifiedError(RequestFailure(f"{fault}; nothing was saved", "server"), False)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        detail = "the server has not enough memory for this request; send fewer or shorter rows"
    else:
        detail = f"the server failed at this request: {type(error).__name__}: {error}"
    return ClassifiedError(RequestFailure(detail, "server"), True)
