"""A package with a plug-in for everything that has a name, as `pip install` leaves it: a module and its entry point."""

from __future__ import annotations

from pathlib import Path

MODULE = '''
"""Names that an installed package adds. Importing this module registers them."""
from dataclasses import dataclass, replace

import rlvr
from rlvr.algorithms.advantages import GroupMeanAdvantage
from rlvr.algorithms.losses.clipped import Ppo
from rlvr.algorithms.losses.loss import Loss, LossSpec
from rlvr.algorithms.optimizers import AdamW
from rlvr.clients.mock.mock_client import MOCK
from rlvr.clients.registry import register_client
from rlvr.clients.sampler_options import SamplerOptions
from rlvr.core.futures import LazyFuture
from rlvr.core.messages import OptimStepResponse
from rlvr.tracking.tracker import TrackerOptions
from rlvr.training.curriculum import Uniform
from rlvr.training.schedules import SyncOptions


@rlvr.register_reward("plug_reward")
def reward(prompt, response, meta, scale=1.0):
    """The share of even places of a response."""
    return scale * (len(response) % 3) / 2


rlvr.register_environment("plug_env")(lambda: rlvr.resolve_environment("toy"))


@rlvr.register_reduction("plug_reduction")
def weigh(lengths, max_tokens):
    return [1 / sum(lengths)] * len(lengths)  # token_mean


@rlvr.register_decay("plug_decay")
def fall(progress):
    return 1 - progress  # linear


rlvr.register_algorithm(rlvr.Algorithm("plug_algorithm", GroupMeanAdvantage(), Ppo(0.2, 0.2), "plug_reduction"))


def build(request):
    """The table of logits, whose steps report a metric of their own."""
    client = MOCK.build(request)
    step = client.optim_step

    def optim_step(params):
        metrics = step(params).result().metrics
        return LazyFuture.from_value(OptimStepResponse({**metrics, "plug/norm": 2 * metrics["grad_norm"]}))

    client.optim_step = optim_step
    return client


register_client("plug_client", replace(MOCK, build=build))


@rlvr.register
@dataclass(frozen=True)
class PlugSampler(SamplerOptions):
    """The client samples, one version of its weights is kept."""
    name = "plug_sampler"
    note: str = ""

    def attach(self, client, *, has_adapter, keep, warn):
        warn(f"plug_sampler notes {self.note}")
        return client


@rlvr.register
@dataclass(frozen=True)
class PlugLoss(Loss):
    """The loss of REINFORCE with a factor of its own."""
    name = "plug_loss"
    spec = LossSpec("-k p A", config={"strength": 1.0})
    strength: float = 1.0

    @staticmethod
    def torch_terms(p, inputs, config, row_N):
        return -config["strength"] * p * inputs["advantages"]

    @staticmethod
    def numpy_terms(p, inputs, config, row_N):
        weight = config["strength"] * inputs["advantages"]
        return -weight * p, -weight


@rlvr.register_advantage("plug_advantage")
def double(returns):
    mean = sum(returns) / len(returns)
    return [2 * (value - mean) for value in returns]


@rlvr.register
@dataclass(frozen=True)
class PlugOptimizer(AdamW):
    """AdamW by another name, with an option of its own."""
    name = "plug_optimizer"
    factor: float = 1.0


@rlvr.register
@dataclass(frozen=True)
class PlugCurriculum(Uniform):
    name = "plug_curriculum"


@rlvr.register
@dataclass(frozen=True)
class PlugSchedule(SyncOptions):
    name = "plug_schedule"


@rlvr.register
@dataclass(frozen=True)
class PlugTracker(TrackerOptions):
    name = "plug_tracker"
    file: str = "seen.txt"

    def open(self, run):
        return Lines(run.folder / self.file)


class Lines:
    name, interval = "lines", 0.0

    def __init__(self, file):
        self.file = file

    def begin(self, kept):
        self.file.write_text("")

    def write(self, rows):
        with self.file.open("a") as file:
            file.writelines(f"{row.phase} {row.step}\\n" for row in rows)

    def close(self, status):
        with self.file.open("a") as file:
            file.write(status + "\\n")


@rlvr.register_callback("plug_callback")
class PlugCallback(rlvr.Callback):
    def __init__(self, value=1.0):
        self.value = value

    def on_step(self, phase, step, metrics):
        return {"plug/value": self.value}
'''

WORDS = (
    "env.name=plug_env", "reward.type=plug_reward", "reward.kwargs.scale=2.0", "client=plug_client",
    "sampler={name: plug_sampler, kwargs: {note: versions}}",
    "algorithm.name=plug_algorithm", "algorithm.advantage=plug_advantage",
    "algorithm.loss={name: plug_loss, kwargs: {strength: 0.5}}",
    "training.optimizer={name: plug_optimizer, learning_rate: 0.1, decay: plug_decay, kwargs: {factor: 2.0}}",
    "curriculum.by=plug_curriculum", "training.schedule=plug_schedule", "tracking.trackers=[plug_tracker]",
    "callbacks=[{name: plug_callback, kwargs: {value: 3.0}}]", "training.steps=2", "training.prompts_per_step=2",
    "training.group_size=4", "rollout.max_tokens=4", "evaluation.tasks=4", "evaluation.samples=2",
)  # fmt: skip


def write_package(folder: Path, module: str, text: str, entry: str = "") -> None:
    """Write a module and what says that its package is installed; `entry` is the entry point's value."""
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{module}_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rlvr.plugins]\n{module} = {entry or module}\n")
