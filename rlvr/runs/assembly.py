"""The objects of a run, each made once from its settings: environment, rewards and algorithm, and the client on them.

    assembly = assemble(config)
    assembly.start_rewards()
    client = assembly.build_client(folder, say, warn)

torch is imported when a model is really needed: `client=mock` runs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr.algorithms import Algorithm
from rlvr.clients.client_spec import ClientRequest, ClientSpec
from rlvr.clients.local_engine import build_sampler
from rlvr.clients.registry import resolve_client
from rlvr.config.schema import RunConfig
from rlvr.core.cpu_budget import CoreShares, available_cores, set_default_workers, split_by_settings
from rlvr.core.protocols import TaskSource, TrainingClient
from rlvr.core.ray_cluster import LOCAL
from rlvr.core.registry import GIVEN
from rlvr.envs import resolve_environment
from rlvr.reward import Reward, resolve_reward
from rlvr.reward.registry import number_name
from rlvr.training.initial_weights import resolve_start

if TYPE_CHECKING:
    from rlvr.clients.local import LocalSamplingClient


@dataclass(frozen=True)
class Assembly:
    """What a run is made of. Make one with `assemble`; `replace(assembly, config=...)` keeps the objects under settings
    that do not concern them, such as the number of steps. `watched` are the verifiers that only watch."""

    config: RunConfig
    source: TaskSource
    reward: Reward
    watched: list[Reward]
    algorithm: Algorithm

    @property
    def spec(self) -> ClientSpec:
        """The client's spec."""
        return resolve_client(self.config.client.name)

    @property
    def has_teacher(self) -> bool:
        """Whether the run learns from a model beside the policy."""
        return self.config.training.mode == "rlvr" and self.algorithm.needs_teacher

    @property
    def request(self) -> ClientRequest:
        """What the run asks of its client: enough to check and describe it."""
        return client_request(self.config, self.source)

    @cached_property
    def core_shares(self) -> CoreShares:
        """How torch's threads and the sandbox's workers divide the cores of this machine."""
        return self.divide_cores(available_cores())

    def divide_cores(self, total: int) -> CoreShares:
        """How torch's threads and the sandbox's workers divide `total` cores, if they run at the same time."""
        config = self.config
        sandboxes = list(_sandbox_settings(config.reward.kwargs))
        is_elsewhere = any(sandbox.get("ray") not in (None, LOCAL) for sandbox in sandboxes)
        waits = any(reward.waits_for == "processes" for reward in (self.reward, *self.watched))
        concurrent = self.spec.capabilities.runs_in_process and not is_elsewhere and waits
        workers = max((n for sandbox in sandboxes if isinstance(n := sandbox.get("workers"), int)), default=0)
        device = concurrent and uses_device(config)
        return split_by_settings(total, config.engine.threads, workers, concurrent=concurrent, device=device)

    def start_rewards(self) -> None:
        """Start what the verifiers depend on, such as a sandbox; ValueError if this machine does not support it."""
        check_cluster_use(self.config)
        set_default_workers(self.core_shares.workers)
        for reward in (self.reward, *self.watched):
            reward.start()

    def build_client(
        self, folder: Path, say: Callable[[str], None], warn: Callable[[str], None], *, fresh: bool = True
    ) -> TrainingClient:
        """The training client with its untrained policy; it saves in `folder`. `say` and `warn` take messages about it.

        Unless it is `fresh`, its weights are about to be loaded: `model.start_from` need not exist any more.
        """
        config, spec = self.config, self.spec
        temperature = config.rollout.temperature
        if temperature != 1 and config.training.mode == "rlvr" and not spec.capabilities.scores_at_temperature:
            warn(
                f"rollout.temperature={temperature:g}, but client={config.client.name} scores answers at temperature "
                "1: the gradient is of another policy than the one that sampled. training.gap_stop is off for this; "
                "watch sampling/sampling_logp_difference/mean, and use rollout.temperature=1 unless you know better"
            )
        request = replace(self.request, cores=self.core_shares, folder=folder, log=say, warn=warn, fresh=fresh)
        keep, has_adapter = config.training.order.max_lag + 2, config.model.lora is not None
        return config.sampler_options.attach(spec.build(request), has_adapter=has_adapter, keep=keep, warn=warn)

    def build_sampler(
        self, adapter: Path | None, warn: Callable[[str], None], cores: CoreShares | None = None
    ) -> LocalSamplingClient:
        """A sampler of the model in this process, or of an adapter on it; nothing is trained."""
        return build_sampler(replace(self.request, cores=cores or self.core_shares, warn=warn), adapter)


def assemble(config: RunConfig, source: TaskSource | None = None) -> Assembly:
    """Make the objects of a run, on another environment than its own if a `source` is given.

    ValueError where the config names an environment, a reward or an algorithm that does not exist, or the client cannot
    be.
    """
    if source is None:
        source = resolve_environment(config.env.name, **config.env.kwargs)
    resolve_client(config.client.name).check(client_request(config, source))
    reward = _bind_reward(config, source)
    return Assembly(config, source, reward, _bind_watched(config, reward), config.algorithm.resolve())


def client_request(config: RunConfig, source: TaskSource) -> ClientRequest:
    """What a run asks of its client. A client that makes no tokenizer of the environment's words reads no `source`."""
    return ClientRequest(
        model=config.model,
        source=source,
        environment=config.env.name,
        seed=config.seed,
        limits=config.engine,
        options=config.client_options,
        resolve_start=resolve_start,
    )


def _bind_reward(config: RunConfig, source: TaskSource) -> Reward:
    reward = resolve_reward(config.reward.type or source.reward, **config.reward.kwargs)
    weight = config.reward.environment_weight
    if weight is None and reward.name == source.reward:
        weight = source.environment_weight
    return reward.plus_environment(weight)


def _bind_watched(config: RunConfig, reward: Reward) -> list[Reward]:
    """The verifiers that watch; functions of a program have other names than the reward and each other."""
    names = config.reward.watch
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"reward.watch: {twice[0]!r} is named twice; leave one out")
    bound: list[Reward] = []
    for name in names:
        one = resolve_reward(name)
        if name.startswith(f"{GIVEN}:"):
            one = replace(one, name=number_name(one.name, [other.name for other in (reward, *bound)]))
        bound.append(one)
    return bound


def has_interim(config: RunConfig) -> bool:
    """Whether the run makes interim evaluations."""
    return bool(config.sft.until or config.evaluation.every)


def _sandbox_settings(value: Any) -> Iterator[Mapping[str, Any]]:
    """The mappings `sandbox` in a reward's options, those of its parts too."""
    if isinstance(value, Mapping):
        if isinstance(sandbox := value.get("sandbox"), Mapping):
            yield sandbox
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _sandbox_settings(part)


def check_cluster_use(config: RunConfig) -> None:
    """ValueError if the verifiers would take the CPUs of a Ray cluster that the ranks need: they start first."""
    on_ray = [sandbox for sandbox in _sandbox_settings(config.reward.kwargs) if sandbox.get("ray") is not None]
    if config.client_options.cluster and any(one.get("workers") is None for one in on_ray):
        raise ValueError(
            "reward.kwargs.sandbox has no workers: without it the sandbox takes all free CPUs of the Ray cluster, and "
            "sharding.ranks find none; give workers, a number that leaves CPUs to the ranks"
        )


def uses_device(config: RunConfig) -> bool:
    """Whether the model computes on an accelerator."""
    if config.model.device != "auto":
        return config.model.device != "cpu"
    if find_spec("torch") is None:
        return False
    from rlvr.engine.model_loading import pick_device

    return pick_device(config.model.device).type != "cpu"
