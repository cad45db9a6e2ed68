"""The engine in this process, behind the Tinker method names.

`LocalTrainingClient(engine, policy, folder)` trains one policy; `create_sampling_client()` gives a sampler bound to
its weights as they are now. Saved states live in `folder` under their names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlvr.clients.custom import two_passes
from rlvr.engine.checkpoint import load_policy, save_policy, saved_snapshot
from rlvr.engine.engine import Engine
from rlvr.engine.losses import LOSSES
from rlvr.engine.policy import Policy, Snapshot
from rlvr.files import checked_name, new_folder
from rlvr.futures import Future, LazyFuture
from rlvr.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
)
from rlvr.protocols import CustomLoss


class LocalSamplingClient:
    """Samples from the weights of one moment, whatever is trained later."""

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
    ) -> Future[SampleResponse]:
        future = self._engine.sample(self._snapshot, prompt, num_samples, sampling_params)
        if not include_prompt_logprobs:
            return future

        def with_prompt() -> SampleResponse:
            response = future.result()
            logprobs = self.compute_logprobs(prompt).result()
            return SampleResponse(response.sequences, logprobs, response.fingerprint)

        return LazyFuture(with_prompt)

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        """Log-prob of every token given those before it, None for the first; what is asked at once runs together."""
        return self._engine.logprobs(self._snapshot, prompt, temperature)

    def get_tokenizer(self) -> Any:
        return self._engine.model.tokenizer


class LocalTrainingClient:
    """Trains one policy of an engine. Calls run when they are made: the futures are already done."""

    scores_at_temperature = True  # `loss_fn_config={"temperature": T}` is honoured
    losses = frozenset(LOSSES)
    roads = frozenset({"advantage", "inputs", "custom", "logits", "reference"})

    def __init__(self, engine: Engine, policy: Policy, folder: Path) -> None:
        self._engine = engine
        self._policy = policy
        self._folder = folder

    @property
    def policy(self) -> Policy:
        return self._policy

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        return LazyFuture.done(self._engine.forward_backward(self._policy, data, loss_fn, loss_fn_config))

    def forward(
        self, data: list[Datum], loss_fn: str = "cross_entropy", loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        return LazyFuture.done(
            self._engine.forward_backward(self._policy, data, loss_fn, loss_fn_config, backward=False)
        )

    def forward_backward_custom(
        self, data: list[Datum], loss_fn: CustomLoss, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """The gradient of any function of per-token log-probs, in two passes (`rlvr.clients.custom`)."""
        return LazyFuture.done(two_passes(self, data, loss_fn, loss_fn_config))

    def optim_step(self, adam_params: AdamParams) -> Future[OptimStepResponse]:
        return LazyFuture.done(self._engine.optim_step(self._policy, adam_params))

    def save_state(self, name: str) -> Future[SaveWeightsResponse]:
        return self._save(name, optimizer=True)

    def save_weights_for_sampler(self, name: str) -> Future[SaveWeightsResponse]:
        return self._save(name, optimizer=False)

    def _save(self, name: str, *, optimizer: bool) -> Future[SaveWeightsResponse]:
        path = self._folder / checked_name(name, "checkpoint name")
        with self._engine.lock, new_folder(path) as folder:
            save_policy(folder, self._policy, self._engine.model, optimizer=optimizer)
        return LazyFuture.done(SaveWeightsResponse(str(path)))

    def load_state(self, path: str) -> Future[None]:
        return self._load(path, optimizer=False)

    def load_state_with_optimizer(self, path: str) -> Future[None]:
        return self._load(path, optimizer=True)

    def _load(self, path: str, *, optimizer: bool) -> Future[None]:
        with self._engine.lock:
            load_policy(Path(path), self._policy, self._engine.model, optimizer=optimizer)
        return LazyFuture.done(None)

    def create_sampling_client(self, model_path: str | None = None) -> LocalSamplingClient:
        """A sampler for the weights as they are now, or for those saved at `model_path`."""
        if model_path is None:
            return LocalSamplingClient(self._engine, self._engine.snapshot(self._policy))
        with self._engine.lock:
            return LocalSamplingClient(self._engine, saved_snapshot(Path(model_path), self._policy, self._engine.model))

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> LocalSamplingClient:
        """A sampler for the weights as they are now; with a name they are saved too."""
        if name is not None:
            self.save_weights_for_sampler(name).result()
        return self.create_sampling_client()

    def get_tokenizer(self) -> Any:
        return self._engine.model.tokenizer
