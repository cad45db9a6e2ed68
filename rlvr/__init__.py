"""rlvr: train language models on anything that can be verified."""

from rlvr.types import Outcome, Score, StopReason, Task, Trajectory, TrajectoryBatch

__version__ = "0.1.0"
__all__ = ["Outcome", "Score", "StopReason", "Task", "Trajectory", "TrajectoryBatch"]
