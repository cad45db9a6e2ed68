"""rlvr: train language models on anything that can be verified.

    from rlvr import MockRolloutSampler, REINFORCE, REINFORCEConfig, resolve_reward

The names below are what a hand-written loop needs; they are loaded when they are first asked for, so that `import rlvr`
costs nothing. Whole runs are configured: `rlvr train --config-name=arithmetic`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlvr.algorithms import (
        PPO,
        REINFORCE,
        Algorithm,
        PPOConfig,
        REINFORCEConfig,
        UpdateResult,
        load_checkpoint,
        register_advantage,
        register_algorithm,
        resolve_algorithm,
        save_checkpoint,
    )
    from rlvr.clients.mock.mock_client import MockTrainingClient
    from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory, TrajectoryBatch
    from rlvr.envs import register_environment, resolve_environment
    from rlvr.reward import register_reward, resolve_reward
    from rlvr.training.toy_sampler import MockRolloutSampler

__version__ = "0.1.0"

_HOMES = {
    "rlvr.algorithms": (
        "Algorithm", "PPO", "PPOConfig", "REINFORCE", "REINFORCEConfig", "UpdateResult", "load_checkpoint",
        "register_advantage", "register_algorithm", "resolve_algorithm", "save_checkpoint",
    ),
    "rlvr.clients.mock.mock_client": ("MockTrainingClient",),
    "rlvr.envs": ("register_environment", "resolve_environment"),
    "rlvr.reward": ("register_reward", "resolve_reward"),
    "rlvr.training.toy_sampler": ("MockRolloutSampler",),
    "rlvr.core.types": ("Outcome", "Score", "StopReason", "Task", "Trajectory", "TrajectoryBatch"),
}  # fmt: skip
_MODULES = ("algorithms", "envs", "reward", "rollout")
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Algorithm",
    "MockRolloutSampler",
    "MockTrainingClient",
    "Outcome",
    "PPO",
    "PPOConfig",
    "REINFORCE",
    "REINFORCEConfig",
    "Score",
    "StopReason",
    "Task",
    "Trajectory",
    "TrajectoryBatch",
    "UpdateResult",
    "load_checkpoint",
    "register_advantage",
    "register_algorithm",
    "register_environment",
    "register_reward",
    "resolve_algorithm",
    "resolve_environment",
    "resolve_reward",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"rlvr.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'rlvr' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
