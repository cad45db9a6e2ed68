"""Runs the requests of training runs, one at a time, and turns what goes wrong into an answer.

A request that fails changes nothing and uses up its seq_id. What was wrong with the request is a `user` failure; a
full disk, memory or a fault of ours is a `server` failure. After one that may have struck in the middle of an update,
or that left weights which are no numbers, the adapter is brought back from its snapshot and log. Only the worker's
thread calls these. Exercised by tests/test_tinker_core.py, test_tinker_core_kill.py and test_tinker_attacks.py.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr.files import new_folder
from rlvr.messages import NonFiniteError
from rlvr.service.tinker_api.age import checked_recipients, encrypt_files
from rlvr.service.tinker_api.checkpoints import Checkpoints, checked_ttl, run_folder
from rlvr.service.tinker_api.errors import CoreError, ServerError, UserError
from rlvr.service.tinker_api.operations import (
    Broken,
    Create,
    ForwardBackward,
    LoadWeights,
    Operation,
    OptimStep,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
    decode,
)
from rlvr.service.tinker_api.paths import CheckpointPath
from rlvr.service.tinker_api.policies import Lane, Policies, Waiting, lora_config
from rlvr.service.tinker_api.promises import Failed, Json, Outcome, Promises, Proto
from rlvr.service.tinker_api.samplers import KINDS, Samplers
from rlvr.service.tinker_api.store import Store
from rlvr.service.tinker_api.wire import encode_forward_backward

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine

log = logging.getLogger(__name__)
FULL = (errno.ENOSPC, errno.EDQUOT)
TOLD = 2_000  # characters of an error: it may quote what a client sent
UNPUBLISHED = "stable_reinforce"


class Diverged(UserError):
    """A step left weights that are no numbers."""


class Training:
    def __init__(
        self,
        engine: Engine,
        store: Store,
        promises: Promises,
        policies: Policies,
        checkpoints: Checkpoints,
        samplers: Samplers,
        root: Path,
        aliases: dict[str, str],
    ) -> None:
        self._engine, self._store, self._promises, self._policies = engine, store, promises, policies
        self._checkpoints, self._samplers, self._root, self._aliases = checkpoints, samplers, root, aliases
        policies.redo = self._redo
        self.between: Callable[[], None] | None = None  # what to do between the micro-batches of a long request

    def step(self, lane: Lane) -> float:
        """Run the lane's next request and answer it; the seconds it took."""
        begun, seq, waiting = time.monotonic(), lane.next_seq, lane.queue[lane.next_seq]
        operation, unsafe = waiting.operation, False
        try:
            if operation is None:
                entry = self._store.entry(lane.model, seq)
                assert entry is not None
                operation = decode(entry.kind, entry.body, entry.encoding)
            if not isinstance(operation, Create):
                self._policies.get(lane)
            outcome: Outcome = self._run(lane, seq, operation)
        except Exception as error:
            outcome, unsafe = blamed(error)
            if unsafe:
                log.exception("%s: request %d failed", lane.model, seq)
        took = time.monotonic() - begun
        lane.busy += took
        self.finish(lane, seq, waiting, outcome)
        if unsafe:
            self._policies.drop(lane)
        elif isinstance(operation, (Create, LoadWeights)) and operation.path and not isinstance(outcome, Failed):
            # What was loaded may be deleted or replaced: from here on it is the run's own.
            self._policies.snapshot(lane)
        elif self._policies.due(lane):
            self._policies.snapshot(lane)
        return took

    def finish(self, lane: Lane, seq: int, waiting: Waiting, outcome: Outcome) -> None:
        """Give a request its outcome and let the next one go."""
        if isinstance(outcome, Failed):
            try:
                self._store.fail(lane.model, seq, waiting.digest, outcome)
            except Exception as error:  # the client is told all the same
                log.warning("%s: the failure of request %d could not be recorded: %s", lane.model, seq, error)
        with lane.lock:
            lane.queue.pop(seq, None)
            lane.done[seq] = (waiting, outcome)
            lane.bytes += waiting.size + waiting.promise.size
            if isinstance(outcome, Failed):
                lane.failures[seq] = outcome
            if seq == lane.next_seq:
                lane.next_seq += 1
                lane.skip_failures()
        waiting.operation = None
        if waiting.over is not None:
            waiting.over()
        self._promises.resolve(waiting.promise, outcome)

    def _run(self, lane: Lane, seq: int, operation: Operation) -> Outcome:
        match operation:
            case Broken():
                raise (ServerError if operation.category == "server" else UserError)(operation.reason)
            case ForwardBackward():
                return Proto(encode_forward_backward(self._forward_backward(lane, operation)))
            case OptimStep():
                assert lane.policy is not None
                response = self._engine.optim_step(lane.policy, operation.adam)
                if not lane.policy.finite():
                    raise Diverged(f"after a step with {operation.adam} a weight is not finite; it was taken back")
                lane.steps += 1
                return Json({"metrics": response.metrics})
            case SaveWeights():
                path = CheckpointPath(lane.model, "weights", operation.name)
                self._save(lane, seq, path, operation.ttl, operation.metadata, operation.overwrite)
                return Json({"path": str(path), "type": "save_weights"})
            case SaveForSampler(name=str(name)):
                path = CheckpointPath(lane.model, "sampler_weights", name)
                self._save(lane, seq, path, operation.ttl, operation.metadata, overwrite=True)
                return Json({"path": str(path), "type": "save_weights_for_sampler"})
            case SaveForSampler():
                return self._save_ephemeral(lane, seq, operation)
            case SaveExternal():
                recipients = checked_recipients(operation.recipients)
                path = CheckpointPath(lane.model, "external_weights", operation.name)
                size = self._save(lane, seq, path, operation.ttl, None, overwrite=True, recipients=recipients)
                return Json({"path": str(path), "size_bytes": size, "type": "save_weights_external"})
            case LoadWeights() | Create():
                self._redo(lane, operation)
                answer = {"model_id": lane.model, "type": "create_model"}
                return Json(
                    answer if not operation.path else {**answer, "path": operation.path, "type": "load_weights"}
                )

    def _redo(self, lane: Lane, operation: Operation) -> None:
        """What an operation does to the run itself: all there is to do when the log is run again."""
        match operation:
            case ForwardBackward(forward_only=False):
                self._forward_backward(lane, operation)
            case OptimStep():
                assert lane.policy is not None
                self._engine.optim_step(lane.policy, operation.adam)
            case LoadWeights():
                self._load(lane, operation.path, operation.optimizer)
            case Create():
                choice = {k: getattr(operation, k) for k in ("alpha", "attn", "mlp", "unembed")}
                config = lora_config(self._engine, operation.rank, choice)
                self._policies.make(lane, config, operation.seed)
                if operation.path:
                    try:
                        self._load(lane, operation.path, operation.optimizer)
                    except BaseException:
                        self._policies.drop(lane)
                        raise
            case _:
                pass

    def _forward_backward(self, lane: Lane, asked: ForwardBackward) -> Any:
        loss_fn, config = self.loss(asked)
        assert lane.policy is not None
        return self._engine.forward_backward(
            lane.policy, asked.data, loss_fn, config, backward=not asked.forward_only, between=self.between
        )

    def loss(self, asked: ForwardBackward) -> tuple[str, dict[str, float]]:
        """The engine's loss and settings for what was asked."""
        from rlvr.engine.losses import LOSSES

        config = dict(asked.config)
        name = self._aliases.get(asked.loss_fn, asked.loss_fn)
        if name == UNPUBLISHED:
            raise UserError(
                f"loss_fn {UNPUBLISHED!r}: its formula is not published, so this server does not guess it. Choose one "
                f"of {', '.join(sorted(LOSSES))} (loss_fn=cispo, say), or let whoever runs the server start it with "
                f"--alias {UNPUBLISHED}=<loss>"
            )
        if asked.loss_fn == UNPUBLISHED and (coefficient := config.pop("kl_coeff", 0)) != 0:
            raise UserError(
                f"loss_fn_config: kl_coeff={coefficient}, and this server computes {UNPUBLISHED} as {name}, which has "
                "no such term: it would have no effect. Leave it out or give 0"
            )
        if texts := [key for key, value in config.items() if isinstance(value, str)]:
            raise UserError(f"loss_fn_config: {', '.join(texts)} is a text; {name} has only numbers")
        return name, {key: float(value) for key, value in config.items()}

    def _load(self, lane: Lane, path: str, optimizer: bool) -> None:
        from rlvr.engine.checkpoint import load_policy

        assert lane.policy is not None
        place, row = self._checkpoints.find(lane.owner, path)
        own = lane.policy.lora
        assert own is not None
        if (row["base_model"], row["rank"]) != (lane.base_model, own.rank):
            raise UserError(
                f"{path} is of {row['base_model']} with LoRA rank {row['rank']}, this run of {lane.base_model} with "
                f"rank {own.rank}; make a run from the checkpoint (create_training_client_from_state) instead"
            )
        folder = self._checkpoints.folder(place, row["seq"])
        try:
            load_policy(folder, lane.policy, self._engine.model, optimizer=optimizer)
        except ValueError as error:
            raise UserError(str(error).replace(str(folder), path)) from error

    def _save(
        self,
        lane: Lane,
        seq: int,
        path: CheckpointPath,
        ttl: float | None,
        metadata: Any,
        overwrite: bool,
        recipients: Sequence[Any] = (),
    ) -> int:
        """Write a named checkpoint, unless this very request did so before a restart; its size."""
        from rlvr.engine.checkpoint import save_policy

        assert lane.policy is not None
        row = self._checkpoints.row(path)
        if row is not None and row["seq"] >= seq:  # a later request may have taken the name since
            return row["size"]
        if row is not None and self._checkpoints.alive(row) and not overwrite:
            raise UserError(f"{path} exists already: choose another name, or give overwrite=True")
        checked_ttl(ttl)
        with new_folder(self._checkpoints.folder(path, seq)) as folder:
            save_policy(folder, lane.policy, self._engine.model, optimizer=path.kind == "weights")
            encrypt_files(folder, list(recipients))
        self._checkpoints.saved(path, lane.owner, seq, ttl, metadata)
        saved = self._checkpoints.row(path)
        assert saved is not None
        return saved["size"]

    def _save_ephemeral(self, lane: Lane, seq: int, asked: SaveForSampler) -> Outcome:
        from rlvr.engine.adapter_files import write_adapter

        folder = run_folder(self._root, lane.model) / "ephemeral" / str(seq)
        if asked.sampling_session_seq_id is None or asked.kind not in KINDS:
            raise UserError(
                f"kind {asked.kind!r}, expected {' or '.join(KINDS)}, with a sampling_session_seq_id or a path"
            )
        assert lane.policy is not None
        session = lane.model.rsplit(":train:", 1)[0]
        sampler = f"{session}:sample:{asked.sampling_session_seq_id}"
        row = self._samplers.row(sampler)
        if row is not None and (row["model"], row["number"]) != (lane.model, seq):
            raise UserError(f"sampling_session_seq_id {asked.sampling_session_seq_id} of this session is taken already")
        if row is None:
            with new_folder(folder) as new:
                write_adapter(new, lane.policy, self._engine.model)
            self._samplers.publish(sampler, lane, seq, folder, asked.kind, self._engine.snapshot(lane.policy))
        return Json({"sampling_session_id": sampler, "type": "save_weights_for_sampler"})


def blamed(error: Exception) -> tuple[Failed, bool]:
    """The failure that a client is told, and whether the error may have left a policy half changed."""
    if isinstance(error, Diverged):
        return Failed(str(error), error.category), True
    if isinstance(error, CoreError):
        return Failed(str(error), error.category), False
    if isinstance(error, NonFiniteError):
        return Failed(f"{error}; the weights and the gradients before this request are kept", "user"), False
    if isinstance(error, ValueError):
        return Failed(str(error)[:TOLD], "user"), False
    hidden = re.search(r"\(os error (\d+)\)", str(error))  # where safetensors hides the system's
    if isinstance(error, OSError) or hidden:
        number = int(hidden[1]) if hidden else getattr(error, "errno", None)
        why = os.strerror(number) if number else str(error)
        told = "the server's disk is full" if number in FULL else f"the server cannot write or read its files ({why})"
        return Failed(f"{told}; nothing was saved", "server"), False
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return Failed("the server has not enough memory for this request; send fewer or shorter rows", "server"), True
    return Failed(f"the server failed at this request: {type(error).__name__}: {error}", "server"), True
