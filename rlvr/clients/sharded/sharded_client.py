"""The training client over a group of ranks, and `client=sharded`, which starts them for a run.

Each call is cut over the ranks (`split_call`) and returns what one process would: losses are sums, so the parts add up.
Samples come from an engine in this process, made when they are first asked for: it holds a whole copy of the weights,
which are gathered again after every optimizer step. With `sampler.name=vllm` there is no such copy.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rlvr.clients.client_spec import ClientRequest, ClientSpec
from rlvr.clients.custom_loss import two_passes
from rlvr.clients.local_capabilities import LOCAL_CAPABILITIES
from rlvr.clients.local_engine import (
    EXTRA,
    ModelBuild,
    describe_model,
    find_adapter_start,
    plan_model,
    warn_of_threads,
)
from rlvr.clients.sharded.rank_channel import RankFacts
from rlvr.clients.sharded.rank_group import RankGroup, RankLauncher
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.clients.sharded.split_call import check_equal, open_group, run_split
from rlvr.core.files import check_name, new_folder
from rlvr.core.futures import Future, LazyFuture
from rlvr.core.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    OptimStepResponse,
    SaveWeightsResponse,
)
from rlvr.core.protocols import CustomLoss, Feature, SamplingClient
from rlvr.engine.engine_options import EngineLimits, LoraConfig

SHARDED_CAPABILITIES = replace(
    LOCAL_CAPABILITIES, name="sharded", features=LOCAL_CAPABILITIES.features - {Feature.CRITIC, Feature.INTERPOLATION}
)


@dataclass(frozen=True)
class ShardedPolicy:
    """What the ranks and the driver's engine are built from."""

    model: ModelBuild
    lora: LoraConfig | None
    seed: int
    limits: EngineLimits


class ShardedTrainingClient:
    """Trains one policy on all ranks of a group. A call returns once it has run: its future is already done."""

    def __init__(
        self,
        group: RankGroup,
        facts: RankFacts,
        policy: ShardedPolicy,
        folder: Path,
    ) -> None:
        self.group, self.facts = group, facts
        self._policy, self._folder = policy, folder
        self.capabilities = replace(SHARDED_CAPABILITIES, world_size=group.size)
        self._version = 0
        self._is_current = False  # whether the engine has the weights of the ranks
        self._meter = _Meter(group)
        tokenizer = policy.model.tokenizer
        if (longest := getattr(tokenizer, "model_max_length", None)) is not None:
            tokenizer.model_max_length = min(longest, facts.context)

    @property
    def fingerprint(self) -> str:
        return f"policy@{self._version}"

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a named loss, summed over all data, to the policy's; log-probs [T] of the targets."""
        return LazyFuture.from_value(self._run(data, loss_fn, loss_fn_config, backward=True))

    def forward(
        self, data: list[Datum], loss_fn: str = "cross_entropy", loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """`forward_backward` without adding a gradient."""
        return LazyFuture.from_value(self._run(data, loss_fn, loss_fn_config, backward=False))

    def _run(
        self, data: list[Datum], loss_fn: str, config: dict[str, float] | None, *, backward: bool
    ) -> ForwardBackwardOutput:
        from rlvr.engine.learner import check_data

        check_data(data, loss_fn, config, self.facts.context, self.facts.vocabulary)
        return run_split(self.group, data, loss_fn, config, backward=backward)

    def forward_backward_custom(
        self, data: list[Datum], loss_fn: CustomLoss, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """The gradient of any function of per-token log-probs, in two passes (`rlvr.clients.custom_loss`)."""
        return LazyFuture.from_value(two_passes(self, data, loss_fn, loss_fn_config))

    def optim_step(self, adam_params: AdamParams) -> Future[OptimStepResponse]:
        """One step with the accumulated gradients. Its metrics say how busy the ranks were since the last one."""
        self.capabilities.check_optimizer(adam_params)
        response, self._version = self.group.call("optim_step", params=adam_params)[0]
        self._is_current = False
        return LazyFuture.from_value(OptimStepResponse({**response.metrics, **self._meter.read()}))

    def save_state(self, name: str) -> Future[SaveWeightsResponse]:
        """Weights and optimizer, to go on from, with any number of ranks or in one process."""
        return self._save(name, optimizer=True)

    def save_weights_for_sampler(self, name: str) -> Future[SaveWeightsResponse]:
        """The weights alone."""
        return self._save(name, optimizer=False)

    def _save(self, name: str, *, optimizer: bool) -> Future[SaveWeightsResponse]:
        path = self._folder / check_name(name, "checkpoint name")
        with new_folder(path) as folder:
            self.group.call("save", folder=folder.absolute(), optimizer=optimizer)
        return LazyFuture.from_value(SaveWeightsResponse(str(path)))

    def load_state(self, path: str) -> Future[None]:
        """Load saved weights, with a fresh optimizer."""
        return self._load(path, optimizer=False)

    def load_state_with_optimizer(self, path: str) -> Future[None]:
        """Go on from a saved state as if training had never stopped."""
        return self._load(path, optimizer=True)

    def _load(self, path: str, *, optimizer: bool) -> Future[None]:
        self._version = self.group.call("load", folder=Path(path).absolute(), optimizer=optimizer)[0]
        self._is_current = False
        return LazyFuture.from_value(None)

    @cached_property
    def _sampler(self) -> Any:
        """The engine in this process that samples, and its copy of the policy."""
        from rlvr.engine.engine import Engine
        from rlvr.engine.policy import tensors_sha256

        model = self._policy.model.load()
        if (dtype := str(model.dtype).removeprefix("torch.")) != self.facts.dtype:
            raise ValueError(
                f"model.dtype={self._policy.model.dtype}: the ranks compute in {self.facts.dtype}, and this machine, "
                f"which samples, would in {dtype}; name one for both: model.dtype={self.facts.dtype}"
            )
        # All weights of a policy come from the ranks. Of an adapter's, the base is this machine's own.
        if self._policy.lora and tensors_sha256(model.parameters()) != self.facts.code["weights"]:
            raise ValueError(
                f"model.name={self._policy.model.name}: this machine, which samples, has other weights than the ranks; "
                "load the same revision everywhere"
            )
        engine = Engine(model, self._policy.limits)
        return engine, engine.create_policy("policy", lora=self._policy.lora, seed=self._policy.seed)

    def create_sampling_client(self, model_path: str | None = None) -> SamplingClient:
        """A sampler in this process for the weights as they are now, or for those saved at `model_path`."""
        from rlvr.clients.local import LocalSamplingClient
        from rlvr.engine.checkpoint import read_snapshot

        engine, policy = self._sampler
        if model_path is not None:
            with engine.lock:
                return LocalSamplingClient(engine, read_snapshot(Path(model_path), policy, engine.model))
        if not self._is_current:
            self._publish(engine, policy)
        return LocalSamplingClient(engine, engine.snapshot(policy))

    def _publish(self, engine: Any, policy: Any) -> None:
        """Gather the weights of the ranks into the engine."""
        import torch

        from rlvr.engine.policy import Snapshot

        began = time.perf_counter()
        arrays: dict[str, np.ndarray] = self.group.call("gather")[0]
        weights = {
            name: torch.from_numpy(arrays[name]).view(p.dtype).view(p.shape).to(p.device)
            for name, p in policy.parameters.items()
        }
        with engine.lock:
            policy.adopt(Snapshot(self.fingerprint, policy=policy, copy=weights, scale=policy.scale))
            policy.version = self._version
        self._is_current = True
        self._meter.publish_s += time.perf_counter() - began

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """A sampler for the weights as they are now; with a name they are saved too."""
        if name is not None:
            self.save_weights_for_sampler(name).result()
        return self.create_sampling_client()

    def create_critic(self) -> NoReturn:
        """Refuse a critic by ValueError: the ranks train one policy."""
        raise ValueError("client=sharded has no critic; use client=local, or an algorithm without one")

    def get_tokenizer(self) -> Any:
        return self._policy.model.tokenizer

    def weights_sha256(self) -> str:
        """The hash of the whole weights, equal to the hash of one process with the same weights."""
        return self.group.call("sha256")[0]

    def describe_environment(self) -> dict[str, str | int]:
        """The environment of a rank, and the number of ranks."""
        return {**self.facts.environment, "ranks": self.group.size}

    def close(self) -> None:
        """End the ranks."""
        self.group.close()


class _Meter:
    """How busy the ranks were between two optimizer steps. On a GPU the time in collectives is not measured."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._before = (group.seconds, group.waited)
        self.publish_s = 0.0

    def read(self) -> dict[str, float]:
        """The metrics since the last call."""
        now = (self._group.seconds, self._group.waited)
        seconds, waited = (
            [b - a for a, b in zip(before, after, strict=True)] for before, after in zip(self._before, now, strict=True)
        )
        self._before, publish_s, self.publish_s = now, self.publish_s, 0.0
        transfer = min(waited)
        shares: dict[str, float] = {}
        for rank, (whole, spent) in enumerate(zip(seconds, waited, strict=True)):
            shares[f"ranks/busy/{rank}"] = 1 - spent / whole
            shares[f"ranks/idle/{rank}"] = (spent - transfer) / whole
        return {**shares, "ranks/transfer_s": transfer, "ranks/publish_s": publish_s}


def start_ranks(
    policy: ShardedPolicy,
    options: ShardingOptions,
    folder: Path,
    *,
    threads: int = 1,
    adapter: Path | None = None,
    start: Callable[[ShardingOptions], RankLauncher] | None = None,
) -> ShardedTrainingClient:
    """Start the ranks and build the policy on them; states are saved in `folder`.

    ValueError for a model that cannot be trained or a folder that the ranks do not share, RayError if a cluster has no
    room, RankError if a rank fails.
    """
    group = open_group(options, policy.model.device, threads, start)
    try:
        _check_shared(group, folder)
        built: list[RankFacts] = group.call_in_turn(
            "build", model=policy.model, lora=policy.lora, seed=policy.seed, limits=policy.limits, adapter=adapter
        )
        check_equal([facts.code for facts in built])
    except BaseException:
        group.close()
        raise
    return ShardedTrainingClient(group, built[0], policy, folder)


def _check_shared(group: RankGroup, folder: Path) -> None:
    """ValueError unless every rank can read and write the folder of the run, where checkpoints are."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-by-all-") as file:
        is_seen: list[bool] = group.call("has_file", path=Path(file.name).absolute())
    if not all(is_seen):
        rank = is_seen.index(False)
        raise ValueError(
            f"client=sharded: rank {rank} on {group.processes.machines[rank]} does not see the run folder "
            f"{folder.absolute()}, or cannot write in it; all ranks write and read checkpoints there. Choose a "
            "run.root on a file system that all machines mount at the same path"
        )


def _build(request: ClientRequest) -> ShardedTrainingClient:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; training needs the extra: {EXTRA}") from error
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        raise ValueError(f"client=sharded needs torch 2.13 or newer, this is {torch.__version__}; use client=local")
    from rlvr.engine.tokenizer import silence_transformers

    silence_transformers()
    torch.set_num_threads(request.cores.threads)
    warn_of_threads(request)
    options, model, adapter = request.options, plan_model(request), find_adapter_start(request)
    assert isinstance(options, ShardingOptions)
    if options.ray is None:
        threads = max(1, request.cores.threads // options.ranks)
    else:
        threads = options.cpus_per_rank
        if model.name and Path(model.name).exists():  # actors have working directories of their own
            model = replace(model, name=str(Path(model.name).absolute()))
        adapter = adapter and adapter.absolute()
    policy = ShardedPolicy(model, request.model.lora, request.seed, request.limits)
    client = start_ranks(policy, options, request.folder, threads=threads, adapter=adapter)
    for note in client.facts.notes:
        request.warn(note)
    facts = client.facts
    request.log(
        f"{facts.trainable:,} trainable parameters, {facts.dtype} on {facts.environment['device']}, "
        f"{client.group.size} ranks with {threads} thread{'s' if threads > 1 else ''} each"
    )
    return client


def _describe(request: ClientRequest) -> str:
    options = request.options
    assert isinstance(options, ShardingOptions)
    where = f" that Ray places (sharding.ray={options.ray})" if options.ray else ""
    return f"{describe_model(request)}, over {options.ranks} processes{where} (client=sharded)"


SHARDED = ClientSpec(SHARDED_CAPABILITIES, _build, _describe)
