"""Playing episodes: trajectories from task sources and samplers (`episodes`), and their scores (`scoring`)."""

from rlvr.core.types import Trajectory, TrajectoryBatch
from rlvr.rollout.episodes import Group, GroupBuilder, open_groups, play_group, rollout
from rlvr.rollout.scoring import score

__all__ = ["Group", "GroupBuilder", "Trajectory", "TrajectoryBatch", "open_groups", "play_group", "rollout", "score"]
