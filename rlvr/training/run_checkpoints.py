"""Saves the state of a run at safe points, and restores the newest whole one.

A checkpoint is the weights, what is in flight, and a line of the journal with all other state. An evaluation changes no
weights, so the checkpoint after it is the one before it, with a new line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlvr.core.files import find_damage
from rlvr.core.futures import Future
from rlvr.core.messages import SaveWeightsResponse
from rlvr.training.best_checkpoint import is_final_name, name_final
from rlvr.training.curriculum import Curriculum
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.journal import (
    Checkpoint,
    Journal,
    Position,
    critic_of,
    describe_mismatch,
    store_remote_path,
    weights_path,
)
from rlvr.training.schedules.base import Schedule
from rlvr.training.training_job import TrainingJob

CALLBACKS = "callbacks"  # their part of a checkpoint's state, if they have any: what is in it is theirs
REFERENCE = "reference"  # the checkpoint that a KL or a preference loss compares with


class RunCheckpoints:
    """The checkpoints of one attempt at a job. `phases` are the phases of the run in order, with their steps."""

    def __init__(
        self,
        job: TrainingJob,
        journal: Journal,
        phases: Mapping[str, int],
        sft_curriculum: Curriculum,
        schedule: Schedule,
    ) -> None:
        self.job, self.journal = job, journal
        self.phases, self.steps = [*phases, "done"], [*phases.values(), 0]
        self.final = ""  # the checkpoint after the last step of training, once it is made
        self.sft_curriculum, self.schedule = sft_curriculum, schedule
        self._present = ""  # the checkpoint with the weights that the client has now
        self._began = time.perf_counter()
        self._seconds_before = 0.0

    @property
    def seconds(self) -> float:
        """Working time of the run: this attempt, and earlier ones up to the checkpoint they left."""
        return self._seconds_before + time.perf_counter() - self._began

    def restore(self, note: Callable[[str], None], warn: Callable[[str], None]) -> Position:
        """Restore the newest whole checkpoint; the position to go on from."""
        checkpoint = self.journal.last_good(warn)
        position = checkpoint.position if checkpoint else Position()
        if checkpoint:
            self._check(checkpoint)
            self._present = Path(checkpoint.path).name
            self.final = self._present if self._is_over(position) else ""
            self.reload()
            self.sft_curriculum.restore(checkpoint.state["sft"])
            self.job.trainer.restore(checkpoint.state["rl"])
            self._seconds_before = checkpoint.state["seconds"]
            self.job.callbacks.restore(checkpoint.state.get(CALLBACKS, {}), warn)
            note(f"resuming: {self.phases[position.phase]}, {position.step} steps done")
        self.schedule.restore(checkpoint, self.rl_steps(position))
        return position

    def reload(self) -> None:
        """Give the client the weights and the optimizer of the checkpoint that was saved or restored last."""
        weights = weights_path(self.journal.resolve(f"checkpoints/{self._present}"))
        self.job.parts.client.load_state_with_optimizer(weights).result()

    def save(self, position: Position, made: int = 0) -> None:
        """Save at a position. If no step of training follows it, `made` is how many the last phase has made."""
        if self._is_over(position) and not self.final:
            self.final = name_final(made)
        name = self._name(position)
        inflight = self.schedule.store_inflight(name) if position.step else ""
        if name != self._present:
            if self.job.trainer.critic is not None:
                self._write(critic_of(name), self.job.trainer.critic.save_state)
            self._write(name, self.job.parts.client.save_state)
            self._present = name
        has_critic = self.job.trainer.critic is not None
        own = self.job.callbacks.state()
        state = {**self._state(), CALLBACKS: own} if own else self._state()
        checkpoint = Checkpoint(position, f"checkpoints/{name}", state, inflight, has_critic)
        self.journal.checkpoint(checkpoint, self.job.options.keep_checkpoints)
        self.schedule.delete_before(min(self.kept_steps()))

    def kept_steps(self) -> list[int]:
        """The steps of reinforcement learning that are done at each checkpoint that a resume may go on from."""
        return [self.rl_steps(position) for position in self.journal.resumable_positions] or [0]

    def save_weights(self, name: str) -> None:
        """Save the weights without the optimizer; at a server, which can only load a whole state, with it."""
        client = self.job.parts.client
        self._write(name, client.save_state if client.capabilities.is_remote else client.save_weights_for_sampler)

    def _write(self, name: str, save: Callable[[str], Future[SaveWeightsResponse]]) -> None:
        """Save weights as the checkpoint `name`; for weights at a server its folder holds their path."""
        path = save(name).result().path
        if "://" in path:
            store_remote_path(self.job.folder / "checkpoints" / name, path)

    def save_reference(self, first: int) -> None:
        """Save the policy before step 0 of RL if the algorithm compares with it.

        A resumed run (`first` > 0) reads it back.
        """
        job, client = self.job, self.job.parts.client
        if not job.parts.algorithm.needs_reference:
            return
        folder = job.folder / "checkpoints" / REFERENCE
        if first and (damage := find_damage(folder)):
            raise TrainingStoppedError(
                f"{folder}, the policy that the algorithm compares with, is damaged or missing ({damage}); put it "
                "back: it cannot be made again from later weights. Or start anew under another run.name"
            )
        if not folder.exists():
            self._write(REFERENCE, client.save_weights_for_sampler)
        job.trainer.reference = client.create_sampling_client(weights_path(folder))

    def prepare_critic(self, first: int) -> None:
        """Give the trainer its critic, if the algorithm has one: a new one, or that of the checkpoint resumed from."""
        if not self.job.parts.algorithm.advantage.takes_critic:
            return
        critic = self.job.trainer.critic = self.job.parts.client.create_critic()
        if first:
            folder = self.journal.resolve(critic_of(f"checkpoints/{self._present}"))
            critic.load_state_with_optimizer(weights_path(folder)).result()

    def _name(self, position: Position) -> str:
        """The checkpoint of a position: at the end of a phase, of the next one that changes weights."""
        phase = self._next_phase(position)
        return self.final if self._is_over(position) else f"{self.phases[phase]}-{position.step:06d}"

    def _next_phase(self, position: Position) -> int:
        """The phase of a position, or the next one that changes weights."""
        phase = position.phase
        while phase < len(self.phases) - 1 and self.steps[phase] == 0:
            phase += 1
        return phase

    def _is_over(self, position: Position) -> bool:
        """Whether no step of training follows."""
        return self._next_phase(position) == len(self.phases) - 1

    def _state(self) -> dict[str, Any]:
        """What a checkpoint stores beside the weights, without the state of callbacks."""
        state = {"sft": self.sft_curriculum.state(), "rl": self.job.trainer.state(), "seconds": self.seconds}
        scheduled = self.schedule.state()
        return {**state, "pipeline": scheduled} if scheduled else state

    def _check(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError for a checkpoint in the journal that no run of this job can have written."""
        at, name = checkpoint.position, Path(checkpoint.path).name
        stored = {name: value for name, value in checkpoint.state.items() if name != CALLBACKS}
        problem = describe_mismatch(stored, self._state())
        if at.phase >= len(self.phases) or at.step > self.steps[at.phase] or not self._may_be_named(at, name):
            problem = f"phase {at.phase}, step {at.step} is not where this run saved {name[:80]}"
        if problem:
            raise ValueError(
                f"{self.journal.folder / 'journal.jsonl'}, line {checkpoint.line}: {problem}; restore the line, or "
                "delete it to go on from the checkpoint before"
            )

    def _may_be_named(self, at: Position, name: str) -> bool:
        """Whether a run of this version, or an older one, names the checkpoint of a position so."""
        if self._is_over(at):
            return is_final_name(name)
        return name in (self._name(at), f"{self.phases[at.phase]}-{at.step:06d}")  # the second of older versions

    def rl_steps(self, at: Position) -> int:
        """Steps of RL that are done at a position of the run."""
        if "rl" not in self.phases or at.phase < self.phases.index("rl"):
            return 0
        rl = self.phases.index("rl")
        return at.step if at.phase == rl else self.steps[rl]
