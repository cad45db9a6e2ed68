"""rlvr: train language models on anything that can be verified.

    from rlvr import MockRolloutSampler, REINFORCE, REINFORCEConfig, resolve_reward

The names below are what a hand-written loop needs; they are loaded when they are first asked for, so that `import rlvr`
costs nothing. docs/api/rlvr.md describes each. Whole runs are configured: `rlvr train --config-name=arithmetic`.
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
        register_decay,
        register_reduction,
        resolve_algorithm,
        save_checkpoint,
    )
    from rlvr.audits.audit_reward import audit
    from rlvr.audits.verify_rows import verify
    from rlvr.clients.local import LocalSamplingClient, LocalTrainingClient, ServiceClient
    from rlvr.clients.mock.mock_client import MockTrainingClient
    from rlvr.config.register import register
    from rlvr.core.messages import (
        AdamParams,
        Datum,
        ForwardBackwardOutput,
        ModelInput,
        MuonParams,
        NonFiniteError,
        OptimStepResponse,
        SampledSequence,
        SampleResponse,
        SamplingParams,
        SaveWeightsResponse,
        TensorData,
    )
    from rlvr.core.protocols import Env, SamplingClient, StepResult, TaskSource, TrainingClient
    from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory, TrajectoryBatch
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import EngineLimits, LoraConfig
    from rlvr.engine.model_loading import build_model, load_model
    from rlvr.engine.tokenizer import build_tokenizer, load_tokenizer
    from rlvr.envs import register_environment, resolve_environment
    from rlvr.reward import register_reward, resolve_reward
    from rlvr.runs.library import Run, evaluate, load_run, train
    from rlvr.runs.own_loop import Loop, update
    from rlvr.service.background_server import serve
    from rlvr.studies.python_study import Study, study
    from rlvr.studies.seed_curves import plot_seeds
    from rlvr.training.callbacks import Callback, StopRun, register_callback
    from rlvr.training.toy_sampler import MockRolloutSampler

__version__ = "0.1.0"

_HOMES = {
    "rlvr.algorithms": (
        "Algorithm", "PPO", "PPOConfig", "REINFORCE", "REINFORCEConfig", "UpdateResult", "load_checkpoint",
        "register_advantage", "register_algorithm", "register_decay", "register_reduction", "resolve_algorithm",
        "save_checkpoint",
    ),
    "rlvr.audits.audit_reward": ("audit",),
    "rlvr.audits.verify_rows": ("verify",),
    "rlvr.clients.local": ("LocalSamplingClient", "LocalTrainingClient", "ServiceClient"),
    "rlvr.clients.mock.mock_client": ("MockTrainingClient",),
    "rlvr.config.register": ("register",),
    "rlvr.core.messages": (
        "AdamParams", "Datum", "ForwardBackwardOutput", "ModelInput", "MuonParams", "NonFiniteError",
        "OptimStepResponse", "SampleResponse", "SampledSequence", "SamplingParams", "SaveWeightsResponse", "TensorData",
    ),
    "rlvr.core.protocols": ("Env", "SamplingClient", "StepResult", "TaskSource", "TrainingClient"),
    "rlvr.core.types": ("Outcome", "Score", "StopReason", "Task", "Trajectory", "TrajectoryBatch"),
    "rlvr.engine.engine": ("Engine",),
    "rlvr.engine.engine_options": ("EngineLimits", "LoraConfig"),
    "rlvr.engine.model_loading": ("build_model", "load_model"),
    "rlvr.engine.tokenizer": ("build_tokenizer", "load_tokenizer"),
    "rlvr.envs": ("register_environment", "resolve_environment"),
    "rlvr.reward": ("register_reward", "resolve_reward"),
    "rlvr.runs.library": ("Run", "evaluate", "load_run", "train"),
    "rlvr.runs.own_loop": ("Loop", "update"),
    "rlvr.service.background_server": ("serve",),
    "rlvr.studies.python_study": ("Study", "study"),
    "rlvr.studies.seed_curves": ("plot_seeds",),
    "rlvr.training.callbacks": ("Callback", "StopRun", "register_callback"),
    "rlvr.training.toy_sampler": ("MockRolloutSampler",),
}  # fmt: skip
_MODULES = ("algorithms", "envs", "reward", "rollout")
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AdamParams",
    "Algorithm",
    "Callback",
    "Datum",
    "Engine",
    "EngineLimits",
    "Env",
    "ForwardBackwardOutput",
    "LocalSamplingClient",
    "LocalTrainingClient",
    "Loop",
    "LoraConfig",
    "MockRolloutSampler",
    "MockTrainingClient",
    "ModelInput",
    "MuonParams",
    "NonFiniteError",
    "OptimStepResponse",
    "Outcome",
    "PPO",
    "PPOConfig",
    "REINFORCE",
    "REINFORCEConfig",
    "Run",
    "SampleResponse",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "SaveWeightsResponse",
    "Score",
    "ServiceClient",
    "StepResult",
    "StopReason",
    "StopRun",
    "Study",
    "Task",
    "TaskSource",
    "TensorData",
    "TrainingClient",
    "Trajectory",
    "TrajectoryBatch",
    "UpdateResult",
    "audit",
    "build_model",
    "build_tokenizer",
    "evaluate",
    "load_checkpoint",
    "load_model",
    "load_run",
    "load_tokenizer",
    "plot_seeds",
    "register",
    "register_advantage",
    "register_algorithm",
    "register_callback",
    "register_decay",
    "register_environment",
    "register_reduction",
    "register_reward",
    "resolve_algorithm",
    "resolve_environment",
    "resolve_reward",
    "save_checkpoint",
    "serve",
    "study",
    "train",
    "update",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"rlvr.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'rlvr' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rlvr"):
            raise
        raise ModuleNotFoundError(
            f"rlvr.{name} needs {error.name}: pip install 'rlvr[train]'", name=error.name
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
