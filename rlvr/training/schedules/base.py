"""What every schedule does: make the steps of reinforcement learning, and survive a restart."""

from __future__ import annotations

from typing import Any, Protocol

from rlvr.training.journal import Checkpoint
from rlvr.training.parts import StepBatch


class Schedule(Protocol):
    """Decides which version of the policy samples which batch. `schedules.sync` is the reference: no lag at all.

    A schedule is made from a `Trainer`, whose `collector` samples, and the `Journal` of the run.
    What a schedule does not define does nothing: it has nothing in flight and no state.
    """

    def learn(self, step: int) -> tuple[dict[str, float], StepBatch]:
        """Make one whole step; its metrics, and the trajectories that they are about."""
        ...

    def store_inflight(self, checkpoint: str) -> str:
        """Write what was sampled and not yet learned from for a checkpoint; the hash of the file, '' for none."""
        return ""

    def delete_before(self, step: int) -> None:
        """Delete files that no resumed run needs, since none begins before `step`."""

    def state(self) -> dict[str, Any]:
        """The state of the schedule that a checkpoint stores; empty if there is none."""
        return {}

    def restore(self, checkpoint: Checkpoint | None, step: int) -> None:
        """Take up the state of earlier attempts; `step` steps are done."""

    def finish(self) -> None:
        """Stop and delete what is in flight: no step follows (a run may end before its last step)."""

    def close(self) -> None:
        """Stop what runs in the background, without waiting for it. May be called again."""
