"""The two clients over an engine in this process.

`LocalTrainingClient(engine, policy, folder)` trains one policy; `create_sampling_client()` gives a sampler bound to its
weights as they are now. Saved states live in `folder` under their names. Each client is its own future, because the
SDK's makers of clients return futures of them. The `..._async` forms compute where they are called, in order, as
training must; only the wait for a result leaves the event loop free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from dataclasses import fields
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from rlvr.clients.custom_loss import two_passes
from rlvr.clients.local.types import GetInfoResponse, ModelData
from rlvr.clients.local_capabilities import LOCAL_CAPABILITIES
from rlvr.core.files import check_name, new_folder
from rlvr.core.futures import Future, LazyFuture
from rlvr.core.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
)
from rlvr.core.protocols import CustomLoss
from rlvr.engine.checkpoint import interpolate_policy, load_policy, read_snapshot, save_policy
from rlvr.engine.engine import Engine
from rlvr.engine.model_loading import describe_device
from rlvr.engine.policy import Policy, Snapshot, tensors_sha256
from rlvr.engine.value_head import create_critic

T = TypeVar("T")
P = ParamSpec("P")


def make_async(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The `..._async` form of a method: a coroutine function that returns the same."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return method(*args, **kwargs)

    return call


class SelfFuture:
    """A client that is there already, where a future of one is asked for: `.result()` and `await` give itself."""

    def result(self, timeout: float | None = None) -> Self:
        return self

    async def result_async(self, timeout: float | None = None) -> Self:
        return self

    def __await__(self) -> Generator[None, None, Self]:
        yield from ()
        return self


class LocalSamplingClient(SelfFuture):
    """Samples from the weights of one moment, whatever is trained later. Made by `create_sampling_client`."""

    def __init__(self, engine: Engine, snapshot: Snapshot) -> None:
        self._engine = engine
        self._snapshot = snapshot

    @property
    def fingerprint(self) -> str:
        return self._snapshot.fingerprint

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
    ) -> Future[SampleResponse]:
        """`num_samples` completions. All calls made before a result is first read are computed together.

        The `topk` arguments ask for the likeliest tokens of each position, of the prompt and of the completions.
        """
        return self._engine.sample(
            self._snapshot,
            ModelInput(prompt.to_ints()),
            num_samples,
            _params(sampling_params),
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt=topk_prompt_logprobs,
            topk_sample=topk_sample_logprobs,
        )

    async def sample_async(self, *args: Any, **kwargs: Any) -> SampleResponse:
        """Sample and wait for the result; requests made at the same time run together."""
        return await self.sample(*args, **kwargs)

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        """Log-prob of every token given those before it, None for the first; what is asked at once runs together."""
        return self._engine.logprobs(self._snapshot, prompt, temperature)

    async def compute_logprobs_async(self, prompt: ModelInput, temperature: float = 1.0) -> list[float | None]:
        return await self.compute_logprobs(prompt, temperature)

    def get_base_model(self) -> str:
        return self._engine.model.name

    def get_tokenizer(self) -> Any:
        return self._engine.model.tokenizer

    def weights_sha256(self) -> str:
        """A hash over names, dtypes, shapes and bytes of the model's weights and those of the snapshot."""
        return tensors_sha256({**dict(self._engine.model.module.named_parameters()), **self._snapshot.tensors})


def _params(given: Any) -> SamplingParams:
    """Sampling parameters, ours or those of the SDK's own class, by their fields' names."""
    if isinstance(given, SamplingParams):
        return given
    return SamplingParams(**{f.name: getattr(given, f.name) for f in fields(SamplingParams) if hasattr(given, f.name)})


class LocalTrainingClient(SelfFuture):
    """Trains one policy of an engine. Calls run when they are made: the futures are already done.

    `policy` comes from `engine.create_policy`. States are saved in `folder` under their names; what is saved for
    samplers goes to `sampler_folder`, by default the same. Most methods have a form `NAME_async`, to be awaited.
    """

    capabilities = LOCAL_CAPABILITIES

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        folder: Path,
        sampler_folder: Path | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._folder = folder
        self._sampler_folder = sampler_folder or folder
        self.user_metadata = dict(user_metadata or {})

    @property
    def model_id(self) -> str:
        return self._policy.name

    def get_info(self) -> GetInfoResponse:
        model, lora = self._engine.model, self._policy.lora
        data = ModelData(model.name, model.module.config.model_type, model.name)
        return GetInfoResponse(data, self.model_id, model.name, lora is not None, lora.rank if lora else None)

    @property
    def fingerprint(self) -> str:
        return self._policy.fingerprint

    @property
    def policy(self) -> Policy:
        return self._policy

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a named loss, summed over all data, to the policy's; log-probs [T] of the targets."""
        return LazyFuture.from_value(self._engine.forward_backward(self._policy, data, loss_fn, loss_fn_config))

    def forward(
        self, data: list[Datum], loss_fn: str = "cross_entropy", loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """`forward_backward` without adding a gradient."""
        return LazyFuture.from_value(
            self._engine.forward_backward(self._policy, data, loss_fn, loss_fn_config, backward=False)
        )

    def forward_backward_custom(
        self, data: list[Datum], loss_fn: CustomLoss, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """The gradient of any function of per-token log-probs, in two passes (`rlvr.clients.custom_loss`)."""
        return LazyFuture.from_value(two_passes(self, data, loss_fn, loss_fn_config))

    def optim_step(self, adam_params: AdamParams) -> Future[OptimStepResponse]:
        """One step of AdamW, or of the `stepper` of the parameters, with the accumulated gradients."""
        return LazyFuture.from_value(self._engine.optim_step(self._policy, adam_params))

    def save_state(
        self, name: str, ttl_seconds: int | None = None, overwrite: bool = True
    ) -> Future[SaveWeightsResponse]:
        """Weights and optimizer, to go on from."""
        return self._save(self._folder, name, ttl_seconds, overwrite, optimizer=True)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, overwrite: bool = True
    ) -> Future[SaveWeightsResponse]:
        """The weights alone."""
        return self._save(self._sampler_folder, name, ttl_seconds, overwrite, optimizer=False)

    def _save(
        self, place: Path, name: str, ttl_seconds: int | None, overwrite: bool, *, optimizer: bool
    ) -> Future[SaveWeightsResponse]:
        if ttl_seconds is not None:
            raise ValueError(f"ttl_seconds={ttl_seconds}: folders on this disk do not expire; leave it out")
        path = place / check_name(name, "checkpoint name")
        if path.exists() and not overwrite:
            raise ValueError(f"checkpoint {path} exists already; give another name, or overwrite=True")
        with self._engine.lock, new_folder(path) as folder:
            save_policy(folder, self._policy, self._engine.model, optimizer=optimizer)
        return LazyFuture.from_value(SaveWeightsResponse(str(path)))

    def load_state(self, path: str) -> Future[None]:
        """Load saved weights, with a fresh optimizer."""
        return self._load(path, optimizer=False)

    def load_state_with_optimizer(self, path: str) -> Future[None]:
        """Go on from a saved state as if training had never stopped."""
        return self._load(path, optimizer=True)

    def _load(self, path: str, *, optimizer: bool) -> Future[None]:
        with self._engine.lock:
            load_policy(Path(path), self._policy, self._engine.model, optimizer=optimizer)
        return LazyFuture.from_value(None)

    def interpolate(self, path: str, share: float) -> Future[None]:
        """Go from the weights saved at `path` that share of the way to the present ones, with a fresh optimizer."""
        with self._engine.lock:
            interpolate_policy(Path(path), self._policy, self._engine.model, share)
        return LazyFuture.from_value(None)

    def create_sampling_client(self, model_path: str | None = None) -> LocalSamplingClient:
        """A sampler for the weights as they are now, or for those saved at `model_path`."""
        if model_path is None:
            return LocalSamplingClient(self._engine, self._engine.snapshot(self._policy))
        with self._engine.lock:
            return LocalSamplingClient(self._engine, read_snapshot(Path(model_path), self._policy, self._engine.model))

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> LocalSamplingClient:
        """A sampler for the weights as they are now; with a name they are saved too."""
        if name is not None:
            self.save_weights_for_sampler(name).result()
        return self.create_sampling_client()

    def create_critic(self) -> LocalTrainingClient:
        """A client for a critic of this policy, which begins with its weights as they are now and V = 0.

        It takes the loss `value`, and gives values where a policy gives log-probs.
        """
        engine, critic = create_critic(self._engine, self._policy)
        return LocalTrainingClient(engine, critic, self._folder, self._sampler_folder)

    def get_tokenizer(self) -> Any:
        return self._engine.model.tokenizer

    def weights_sha256(self) -> str:
        """A hash over names, dtypes, shapes and bytes of the trained weights."""
        return self._policy.sha256()

    def describe_environment(self) -> dict[str, str | int]:
        """Version of torch, threads and device."""
        return describe_device(self._engine.model.device)

    def close(self) -> None:
        """Nothing to close: the engine ends with the process."""

    forward_async = make_async(forward)
    forward_backward_async = make_async(forward_backward)
    forward_backward_custom_async = make_async(forward_backward_custom)
    optim_step_async = make_async(optim_step)
    save_state_async = make_async(save_state)
    save_weights_for_sampler_async = make_async(save_weights_for_sampler)
    load_state_async = make_async(load_state)
    load_state_with_optimizer_async = make_async(load_state_with_optimizer)
    get_info_async = make_async(get_info)
    create_sampling_client_async = make_async(create_sampling_client)
    save_weights_and_get_sampling_client_async = make_async(save_weights_and_get_sampling_client)
