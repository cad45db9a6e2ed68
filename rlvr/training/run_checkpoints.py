"""Saves the state of a run at safe points, and restores the newest whole one.

A checkpoint is the weights, what is in flight, and a line of the journal with all other state.
Exercised by `python -m pytest tests/test_kill.py tests/test_damaged_runs.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlvr.core.files import find_damage
from rlvr.training.curriculum import Curriculum
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.journal import Checkpoint, Journal, Position, describe_mismatch, store_remote_path, weights_path
from rlvr.training.schedules import Schedule
from rlvr.training.training_job import TrainingJob

REFERENCE = "reference"  # the checkpoint that a KL compares with


class RunCheckpoints:
    """The checkpoints of one attempt at a job. `phases` are the phases of the run in order."""

    def __init__(
        self,
        job: TrainingJob,
        journal: Journal,
        phases: tuple[str, ...],
        sft_curriculum: Curriculum,
        schedule: Schedule,
    ) -> None:
        self.job, self.journal, self.phases = job, journal, phases
        self.sft_curriculum, self.schedule = sft_curriculum, schedule
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
            weights = weights_path(self.journal.resolve(checkpoint.path))
            self.job.parts.client.load_state_with_optimizer(weights).result()
            self.sft_curriculum.restore(checkpoint.state["sft"])
            self.job.trainer.restore(checkpoint.state["rl"])
            self._seconds_before = checkpoint.state["seconds"]
            note(f"resuming: {(*self.phases, 'done')[position.phase]}, {position.step} steps done")
        self.schedule.restore(checkpoint, self._rl_steps(position))
        return position

    def save(self, position: Position) -> None:
        name = self._name(position)
        inflight = self.schedule.store_inflight(name) if position.step else ""
        saved = self.job.parts.client.save_state(name).result()
        path = Path(saved.path)
        if "://" in saved.path:
            path = self.job.folder / "checkpoints" / name
            store_remote_path(path, saved.path)
        relative = str(path.relative_to(self.job.folder)) if path.is_relative_to(self.job.folder) else saved.path
        checkpoint = Checkpoint(position, relative, self._state(), inflight)
        self.journal.checkpoint(checkpoint, self.job.options.keep_checkpoints)
        self.schedule.delete_before(self._rl_steps(self.journal.oldest_kept))

    def save_reference(self, first: int) -> None:
        """Save the policy before step 0 of RL if a KL compares with it; a resumed run (`first` > 0) reads it back."""
        job, client = self.job, self.job.parts.client
        if not job.parts.algorithm.kl_coef:
            return
        folder = job.folder / "checkpoints" / REFERENCE
        if first and (damage := find_damage(folder)):
            raise TrainingStoppedError(
                f"{folder}, the policy that algorithm.kl_coef compares with, is damaged or missing ({damage}); put it "
                "back: it cannot be made again from later weights. Or start anew under another run.name"
            )
        if not folder.exists():
            saved = client.save_weights_for_sampler(REFERENCE).result()
            if "://" in saved.path:
                store_remote_path(folder, saved.path)
        job.trainer.reference = client.create_sampling_client(weights_path(folder))

    def _name(self, position: Position) -> str:
        return f"{(*self.phases, 'done')[position.phase]}-{position.step:06d}"

    def _state(self) -> dict[str, Any]:
        """What a checkpoint stores beside the weights."""
        state = {"sft": self.sft_curriculum.state(), "rl": self.job.trainer.state(), "seconds": self.seconds}
        scheduled = self.schedule.state()
        return {**state, "pipeline": scheduled} if scheduled else state

    def _check(self, checkpoint: Checkpoint) -> None:
        """Raise ValueError for a checkpoint in the journal that no run of this job can have written."""
        at, name = checkpoint.position, Path(checkpoint.path).name
        steps = {"sft": self.job.sft.steps, "rl": self.job.parts.options.steps}
        most = [*(steps.get(phase, 0) for phase in self.phases), 0]
        problem = describe_mismatch(checkpoint.state, self._state())
        if at.phase >= len(most) or at.step > most[at.phase] or name != self._name(at):
            problem = f"phase {at.phase}, step {at.step} is not where this run saved {name[:80]}"
        if problem:
            raise ValueError(
                f"{self.journal.folder / 'journal.jsonl'}, line {checkpoint.line}: {problem}; restore the line, or "
                "delete it to go on from the checkpoint before"
            )

    def _rl_steps(self, at: Position) -> int:
        """Steps of RL that are done at a position of the run."""
        if "rl" not in self.phases or at.phase < self.phases.index("rl"):
            return 0
        return at.step if at.phase == self.phases.index("rl") else self.job.parts.options.steps
