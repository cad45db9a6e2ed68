"""Algorithms: specs over plain functions, the update they share, and two classes for hand-written loops."""

from rlvr.algorithms.advantages import register_advantage
from rlvr.algorithms.classic import (
    PPO,
    REINFORCE,
    PPOConfig,
    REINFORCEConfig,
    UpdateResult,
    load_checkpoint,
    save_checkpoint,
)
from rlvr.algorithms.optimizers import register_decay
from rlvr.algorithms.reductions import register_reduction
from rlvr.algorithms.registry import ALGORITHMS, register_algorithm, resolve_algorithm
from rlvr.algorithms.specs import Algorithm

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "PPO",
    "PPOConfig",
    "REINFORCE",
    "REINFORCEConfig",
    "UpdateResult",
    "load_checkpoint",
    "register_advantage",
    "register_algorithm",
    "register_decay",
    "register_reduction",
    "resolve_algorithm",
    "save_checkpoint",
]
