"""From a config to what its client is built from, and to the client.

torch is imported inside, when a model is really needed here. Exercised by
`python -m pytest tests/test_build.py tests/test_clients_tinker.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlvr.clients.local_engine import is_hub_name, is_model
from rlvr.clients.registry import ClientRequest, resolve_client
from rlvr.config.schema import RunConfig
from rlvr.core.cpu_budget import CoreShares, available_cores, split_cores
from rlvr.core.files import read_json
from rlvr.core.protocols import TaskSource, TrainingClient
from rlvr.core.ray_cluster import LOCAL
from rlvr.core.registry import did_you_mean
from rlvr.engine.gguf_files import find_gguf
from rlvr.reward import resolve_reward
from rlvr.training.initial_weights import resolve_start


def check_model_folder(config: RunConfig) -> None:
    """ValueError if `model.name` is written as a path, or is a folder, and no model is there. A hub is not asked."""
    name = config.model.name or ""
    if not resolve_client(config.client.name).capabilities.runs_in_process:
        return
    folder = Path(name).expanduser()
    if name and (name.startswith((".", "/", "~")) or folder.is_dir()) and not (is_model(folder) or find_gguf(name)):
        if (folder / "resolved.yaml").exists():
            raise ValueError(f"model.name={name} is a run; give model.start_from={name} to start from its weights")
        found = "no config.json" if folder.is_dir() else f"no such folder{find_near_folder(folder)}"
        raise ValueError(
            f"model.name={name}: {found}; give a folder that `save_pretrained` wrote, a GGUF file, or a hub name"
        )


def find_near_folder(missing: Path) -> str:
    """` (did you mean 'my-model'?)`: the folder that is there with a name near that of the first missing part."""
    place = missing.absolute()
    while not place.parent.is_dir():
        place = place.parent
    near = did_you_mean(place.name, [entry.name for entry in place.parent.iterdir() if entry.is_dir()])
    return near if place == missing.absolute() or not near else f" {place.name}{near}"


def find_base(adapter: Path, given: str | None) -> str:
    """The model that an adapter belongs to: the one that is given, else the one that it names itself."""
    named = read_json(adapter / "adapter_config.json", "the config of an adapter").get("base_model_name_or_path")
    base = given or named
    if not isinstance(base, str) or not (is_hub_name(base) or is_model(Path(base).expanduser())):
        raise ValueError(
            f"{adapter} names the base model {base!r}, which was not found; give model.name=<its base model>"
        )
    return base


def core_shares(config: RunConfig, source: TaskSource, total: int | None = None) -> CoreShares:
    """How torch's threads and the sandbox's workers divide the cores, if they run at the same time."""
    rewards = [resolve_reward(config.reward.type or source.reward, **config.reward.kwargs)]
    rewards += [resolve_reward(name) for name in config.reward.watch]
    in_process = resolve_client(config.client.name).capabilities.runs_in_process
    sandboxes = list(_sandbox_settings(config.reward.kwargs))
    is_elsewhere = any(sandbox.get("ray") not in (None, LOCAL) for sandbox in sandboxes)
    concurrent = in_process and not is_elsewhere and any(reward.waits_for == "processes" for reward in rewards)
    workers = max((n for sandbox in sandboxes if isinstance(n := sandbox.get("workers"), int)), default=0)
    device = concurrent and uses_device(config)
    total = total or available_cores()
    return split_cores(total, config.engine.threads, workers, concurrent=concurrent, device=device)


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


def client_request(config: RunConfig, source: TaskSource) -> ClientRequest:
    """What the run asks of its client: enough to check and describe it."""
    return ClientRequest(
        model=config.model,
        source=source,
        environment=config.env.name,
        seed=config.seed,
        limits=config.engine,
        options=config.client_options,
        resolve_start=resolve_start,
    )


def build_client(
    config: RunConfig,
    source: TaskSource,
    folder: Path,
    say: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    fresh: bool = True,
) -> TrainingClient:
    """The training client with its untrained policy; it saves in `folder`. `say` and `warn` take messages about it.

    Unless it is `fresh`, its weights are about to be loaded: `model.start_from` need not exist any more.
    """
    spec, temperature = resolve_client(config.client.name), config.rollout.temperature
    if temperature != 1 and config.training.mode == "rlvr" and not spec.capabilities.scores_at_temperature:
        warn(
            f"rollout.temperature={temperature:g}, but client={config.client.name} scores answers at temperature 1: "
            "the gradient is of another policy than the one that sampled. training.gap_stop is off for this; watch "
            "sampling/sampling_logp_difference/mean, and use rollout.temperature=1 unless you know better"
        )
    request = replace(client_request(config, source), cores=core_shares(config, source))
    client = spec.build(replace(request, folder=folder, log=say, warn=warn, fresh=fresh))
    keep = config.training.max_steps_off_policy + 2
    has_adapter = config.model.lora is not None
    return config.sampler_options.attach(client, has_adapter=has_adapter, keep=keep, warn=warn)
