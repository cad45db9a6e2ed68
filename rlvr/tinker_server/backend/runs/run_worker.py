"""Does the work of a training run's operations: gradients by the engine, weights to and from the disk.

`run_operations.py` calls these methods, one operation at a time, on the engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr.core.files import new_folder
from rlvr.core.messages import AdamParams, Datum
from rlvr.tinker_server.backend.runs.adapter_cache import AdapterCache, RunQueue, lora_config
from rlvr.tinker_server.backend.storage.checkpoints import Checkpoints, encrypt_files, validate_ttl
from rlvr.tinker_server.backend.storage.custom_losses import CustomLosses
from rlvr.tinker_server.backend.storage.disk_usage import DiskAccounts, folder_size
from rlvr.tinker_server.backend.storage.paths import CheckpointPath, run_folder
from rlvr.tinker_server.backend.storage.sampling_sessions import KINDS, SamplingSessions
from rlvr.tinker_server.protocol.errors import UserError

if TYPE_CHECKING:
    from rlvr.engine.engine import Engine
    from rlvr.engine.loss_program import LossProgram

log = logging.getLogger(__name__)
UNPUBLISHED_LOSS = "stable_reinforce"
CUSTOM_LOSS = "custom"  # one that the client made, by its loss_id
MAX_PROGRAMS = 64  # custom losses that stay in memory


class DivergedStep(UserError):
    """A step left weights that are not finite."""


@dataclass(eq=False)
class RunWorker:
    """The engine and the disk, as the operations of training runs use them."""

    engine: Engine
    _adapters: AdapterCache
    _checkpoints: Checkpoints
    _sampling_sessions: SamplingSessions
    _disk: DiskAccounts
    _losses: CustomLosses
    _root: Path
    _aliases: dict[str, str]
    between_micro_batches: Callable[[], None] | None = None  # called during a long request
    _substitutions: dict[str, str] = field(default_factory=dict[str, str])  # run -> the metric that names its alias
    _programs: dict[str, LossProgram] = field(default_factory=dict[str, "LossProgram"])  # by loss_id

    def create(self, run: RunQueue, rank: int, seed: int, choice: dict[str, Any]) -> None:
        """Make the adapter of a new run; `choice` has its alpha, and which layers it has."""
        self._adapters.create(run, lora_config(self.engine, rank, choice), seed)

    def drop(self, run: RunQueue) -> None:
        self._adapters.drop(run)

    def optim_step(self, run: RunQueue, adam: AdamParams) -> dict[str, float]:
        """One step; its metrics. Recipes log those of steps, not of gradients, so an alias is named here."""
        response = self.engine.optim_step(run.loaded_policy, adam)
        if not run.loaded_policy.has_finite_weights():
            raise DivergedStep(f"after a step with {adam} a weight is not finite; it was taken back")
        substitution = self._substitutions.get(run.model)
        return response.metrics | ({substitution: 1.0} if substitution else {})

    def add_value_head(self, run: RunQueue) -> None:
        """Make the run a critic, unless it is one."""
        from rlvr.engine.value_head import add_value_head

        if not run.loaded_policy.is_critic:
            add_value_head(run.loaded_policy, self.engine.model)

    def forward_backward(
        self, run: RunQueue, data: list[Datum], loss_fn: str, config: dict[str, float | str], forward_only: bool
    ) -> Any:
        """The engine's output for a request; the gradient is added to the run's unless `forward_only`."""
        if loss_fn == CUSTOM_LOSS:
            return self._compute_custom_loss(run, data, config, forward_only)
        requested, (loss_fn, numbers) = loss_fn, self.resolve_loss(loss_fn, config)
        is_substitute = loss_fn != requested
        if run.loaded_policy.is_critic:
            loss_fn = _find_critic_loss(loss_fn)
        output = self.engine.forward_backward(
            run.loaded_policy,
            data,
            loss_fn,
            numbers,
            backward=not forward_only,
            after_batch=self.between_micro_batches,
        )
        if is_substitute:
            if run.model not in self._substitutions:
                log.warning("%s: loss_fn %s is computed as %s, another loss", run.model, requested, loss_fn)
            self._substitutions[run.model] = f"{requested}_computed_as_{loss_fn}"
            output.metrics[f"{self._substitutions[run.model]}:max"] = 1.0
        return output

    def _compute_custom_loss(
        self, run: RunQueue, data: list[Datum], config: dict[str, float | str], forward_only: bool
    ) -> Any:
        from rlvr.engine.loss_program import LossProgram, compute_custom_loss

        if run.loaded_policy.is_critic:
            _find_critic_loss(CUSTOM_LOSS)
        match config:
            case {"loss_id": str(loss_id), **rest} if not rest:
                pass
            case _:
                raise UserError(
                    f"loss_fn {CUSTOM_LOSS!r}: expected its loss_id alone in loss_fn_config, got "
                    f"{', '.join(config) or 'nothing'}; pass the handle of create_custom_loss on"
                )
        session = run.model.rsplit(":train:", 1)[0]
        graph = self._losses.read(session, loss_id)
        if loss_id not in self._programs:
            if len(self._programs) >= MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[loss_id] = LossProgram(graph)
        return compute_custom_loss(
            self.engine,
            run.loaded_policy,
            self._programs[loss_id],
            data,
            backward=not forward_only,
            after_batch=self.between_micro_batches,
        )

    def resolve_loss(self, loss_fn: str, given: Mapping[str, float | str]) -> tuple[str, dict[str, float]]:
        """The engine's loss and settings for those of a request."""
        from rlvr.algorithms.loss_specs import LOSS_SPECS

        config = dict(given)
        name = self._aliases.get(loss_fn, loss_fn)
        if name == UNPUBLISHED_LOSS:
            raise UserError(
                f"loss_fn {UNPUBLISHED_LOSS!r}: its formula is not published, so this server does not guess it. Add "
                f"`loss_fn=cispo` to the command of a recipe (the losses here: {', '.join(LOSS_SPECS)}). Or stop the "
                "server and start it with the same command and one more option, `rlvr serve engine ... --alias "
                f"{UNPUBLISHED_LOSS}=cispo`, which computes that loss in its place"
            )
        if loss_fn == UNPUBLISHED_LOSS and (coefficient := config.pop("kl_coeff", 0)) != 0:
            raise UserError(
                f"loss_fn_config: kl_coeff={coefficient} has no effect, because this server computes "
                f"{UNPUBLISHED_LOSS} as {name}, which has no such term. Leave it out or give 0"
            )
        if metadata_texts := [key for key, value in config.items() if isinstance(value, str)]:
            raise UserError(f"loss_fn_config: {', '.join(metadata_texts)} is a text; {name} has only numbers")
        return name, {key: float(value) for key, value in config.items()}

    def load(self, run: RunQueue, path: str, optimizer: bool, *, as_critic: bool = False) -> None:
        """Load a checkpoint; `as_critic` into a new run, where a critic's head is expected and a policy's weights are
        what the critic begins with."""
        from rlvr.engine.checkpoint import load_policy
        from rlvr.engine.policy import VALUE_HEAD_FILE
        from rlvr.engine.value_head import add_value_head

        place, row = self._checkpoints.find(run.owner, path)
        own = run.loaded_policy.lora
        assert own is not None  # runs of this server train adapters
        if (row["base_model"], row["rank"]) != (run.base_model, own.rank):
            raise UserError(
                f"{path} is of {row['base_model']} with LoRA rank {row['rank']}, this run of {run.base_model} with "
                f"rank {own.rank}; make a run from the checkpoint (create_training_client_from_state) instead"
            )
        folder = self._checkpoints.folder(place, row["seq"])
        if as_critic and (folder / VALUE_HEAD_FILE).exists():
            add_value_head(run.loaded_policy, self.engine.model)
        elif as_critic:
            optimizer = False  # that of a policy
        try:
            load_policy(folder, run.loaded_policy, self.engine.model, optimizer=optimizer)
        except ValueError as error:
            raise UserError(str(error).replace(str(folder), path)) from error

    def save(
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

        row = self._checkpoints.find_row(path)
        if row is not None and row["seq"] >= seq:  # a later request may have taken the name since
            return row["size"]
        if row is not None and self._checkpoints.is_alive(row) and not overwrite:
            raise UserError(f"{path} exists already: choose another name, or give overwrite=True")
        validate_ttl(ttl)
        freed = row["size"] if row is not None and self._checkpoints.is_alive(row) else 0
        with new_folder(self._checkpoints.folder(path, seq)) as folder:
            save_policy(folder, run.loaded_policy, self.engine.model, optimizer=path.kind == "weights")
            encrypt_files(folder, list(recipients))
            self._disk.check_quota(run.owner, str(path), folder_size(folder), freed)
        return self._checkpoints.register(path, run.owner, seq, ttl, metadata)

    def save_ephemeral(self, run: RunQueue, seq: int, kind: str, session_seq: int | None) -> str:
        """Keep the weights for one sampling session of the session that trains; returns its id."""
        from rlvr.engine.adapter_files import write_adapter

        folder = run_folder(self._root, run.model) / "ephemeral" / str(seq)
        if session_seq is None or kind not in KINDS:
            raise UserError(
                f"save_weights_for_sampler without a path: kind={kind!r}, "
                f"sampling_session_seq_id={session_seq}; give a path, or that id and "
                f"kind {' or '.join(KINDS)}"
            )
        session = run.model.rsplit(":train:", 1)[0]
        sampler = f"{session}:sample:{session_seq}"
        row = self._sampling_sessions.find(sampler)
        if row is not None and (row["model"], row["number"]) != (run.model, seq):
            raise UserError(f"sampling_session_seq_id {session_seq} of this session is taken already")
        if row is None:
            with new_folder(folder) as new:
                write_adapter(new, run.loaded_policy, self.engine.model)
                freed = self._sampling_sessions.measure_replaced(run.model)
                self._disk.check_quota(run.owner, "this unnamed save for a sampler", folder_size(new), freed)
            self._sampling_sessions.create_from_run(
                sampler, run.model, seq, folder, kind, self.engine.snapshot(run.loaded_policy)
            )
            self._disk.refresh(run.model)
        return sampler


def _find_critic_loss(loss_fn: str) -> str:
    """The engine's name for the loss of a critic, which clients send as `ppo`: the SDK takes no new name."""
    from rlvr.algorithms.loss_specs import VALUE_LOSS

    if loss_fn != "ppo":
        raise UserError(
            f"loss_fn {loss_fn!r} for a critic: send its loss as ppo, with `values`, `returns` and `weights` in every "
            "datum and value_clip alone in loss_fn_config"
        )
    return VALUE_LOSS
