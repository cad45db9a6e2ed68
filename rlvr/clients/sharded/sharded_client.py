"""The training client over a group of ranks, and `client=sharded`, which starts them for a run.

Each call is cut over the ranks (`data_split`) and returns what one process would: losses are sums, so the parts add up.
Samples come from an engine in this process, made when they are first asked for: it holds a whole copy of the weights,
which are gathered again after every optimizer step. With `sampler.name=vllm` there is no such copy. Exercised by
`python -m pytest tests/test_sharded_client.py tests/test_sharded_gradient.py`. Left out on purpose: ranks on several
machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

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
from rlvr.clients.registry import ClientRequest, ClientSpec
from rlvr.clients.sharded.rank_channel import RankFacts
from rlvr.clients.sharded.rank_group import RankGroup, RankRows
from rlvr.clients.sharded.rank_processes import RankProcesses, listen_on_loopback
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.core.files import check_name, new_folder
from rlvr.core.futures import Future, LazyFuture
from rlvr.core.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    NonFiniteError,
    OptimStepResponse,
    SaveWeightsResponse,
)
from rlvr.core.protocols import CustomLoss, Feature, SamplingClient
from rlvr.engine.engine_options import EngineLimits, LoraConfig

SHARDED_CAPABILITIES = replace(
    LOCAL_CAPABILITIES, name="sharded", features=LOCAL_CAPABILITIES.features - {Feature.CRITIC}
)


@dataclass(frozen=True)
class ShardedPolicy:
    """What the ranks and the driver's engine are built from."""

    model: ModelBuild
    lora: LoraConfig | None
    seed: int
    limits: EngineLimits


class ShardedTrainingClient:
    """Trains one policy on all ranks of a group. Calls run when they are made: the futures are already done."""

    def __init__(
        self,
        group: RankGroup,
        facts: RankFacts,
        policy: ShardedPolicy,
        folder: Path,
        store: Any = None,
    ) -> None:
        self.group, self.facts = group, facts
        self._policy, self._folder, self._store = policy, folder, store
        self.capabilities = replace(SHARDED_CAPABILITIES, world_size=group.size)
        self._version = 0
        self._is_current = False  # whether the engine has the weights of the ranks
        self._publish_s = 0.0
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
        """The same without a gradient."""
        return LazyFuture.from_value(self._run(data, loss_fn, loss_fn_config, backward=False))

    def _run(
        self, data: list[Datum], loss_fn: str, config: dict[str, float] | None, *, backward: bool
    ) -> ForwardBackwardOutput:
        from rlvr.clients.sharded.data_split import split_data
        from rlvr.engine.learner import check_data, make_filler

        check_data(data, loss_fn, config, self.facts.context, self.facts.vocabulary)
        shares = split_data(data, self.group.size)
        idle = [make_filler(data[0])]  # a rank without data takes part in the passes of the others
        calls = [
            {"data": [data[i] for i in share] or idle, "loss_fn": loss_fn, "config": config, "backward": backward}
            for share in shares
        ]
        try:
            outputs: list[ForwardBackwardOutput] = self.group.call_each("forward_backward", calls)
        except RankRows as error:
            rows = [shares[rank][row] for rank, found in error.by_rank.items() for row in found if shares[rank]]
            raise NonFiniteError(error.what, sorted(rows)) from error
        return _join(outputs, shares)

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

        engine = Engine(self._policy.model.load(), self._policy.limits)
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
        """ValueError: the ranks train one policy."""
        raise ValueError("client=sharded has no critic; use client=local, or an algorithm without one")

    def get_tokenizer(self) -> Any:
        return self._policy.model.tokenizer

    def weights_sha256(self) -> str:
        """The hash of the whole weights: that of one process with the same."""
        return self.group.call("sha256")[0]

    def describe_environment(self) -> dict[str, str | int]:
        """That of a rank, and how many there are."""
        return {**self.facts.environment, "ranks": self.group.size}

    def close(self) -> None:
        """End the ranks."""
        self.group.close()


def _join(outputs: Sequence[ForwardBackwardOutput], shares: Sequence[Sequence[int]]) -> ForwardBackwardOutput:
    """One output in the order of the data. The first rank's metrics come first: a sum has one order."""
    by_index = {
        i: part for output, share in zip(outputs, shares, strict=True)
        for i, part in zip(share, output.loss_fn_outputs, strict=bool(share))
    }  # fmt: skip
    metrics = {name: sum(output.metrics[name] for output in outputs) for name in outputs[0].metrics}
    return ForwardBackwardOutput([by_index[i] for i in range(len(by_index))], metrics)


class _Meter:
    """How busy the ranks were between two optimizer steps. On a GPU the times in collectives are not known."""

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
    start: Callable[[int], RankProcesses] = RankProcesses,
) -> ShardedTrainingClient:
    """`start` the ranks and build the policy on them; states are saved in `folder`.

    ValueError for a model that cannot be trained, RankError if a rank fails.
    """
    store = listen_on_loopback(options.port)
    group = RankGroup(start(options.ranks), options.timeout_s)
    try:
        meeting = {"host": "127.0.0.1", "port": store.port, "device": policy.model.device, "threads": threads}
        meeting |= {"size": options.ranks, "timeout_s": options.timeout_s}
        group.call_each("join", [{**meeting, "rank": rank} for rank in range(options.ranks)])
        built: list[RankFacts] = group.call_in_turn(
            "build", model=policy.model, lora=policy.lora, seed=policy.seed, limits=policy.limits, adapter=adapter
        )
        _check_equal([facts.code for facts in built])
    except BaseException:
        group.close()
        raise
    return ShardedTrainingClient(group, built[0], policy, folder, store)


def _check_equal(codes: Sequence[dict[str, str]]) -> None:
    """ValueError if a rank runs other code than the first, or has loaded other weights."""
    for rank, code in enumerate(codes):
        for name, value in code.items():
            if value != codes[0][name]:
                raise ValueError(
                    f"client=sharded: rank {rank} has {name} {value[:20]}, rank 0 {codes[0][name][:20]}; install and "
                    "load the same everywhere"
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
    policy = ShardedPolicy(plan_model(request), request.model.lora, request.seed, request.limits)
    threads = max(1, request.cores.threads // request.sharding.ranks)
    adapter = find_adapter_start(request)
    client = start_ranks(policy, request.sharding, request.folder, threads=threads, adapter=adapter)
    for note in client.facts.notes:
        request.warn(note)
    facts = client.facts
    request.say(
        f"{facts.trainable:,} trainable parameters, {facts.dtype} on {facts.environment['device']}, "
        f"{client.group.size} ranks with {threads} thread{'s' if threads > 1 else ''} each"
    )
    return client


def _describe(request: ClientRequest) -> str:
    return f"{describe_model(request)}, over {request.sharding.ranks} processes (client=sharded)"


SHARDED = ClientSpec(SHARDED_CAPABILITIES, _build, _describe)
