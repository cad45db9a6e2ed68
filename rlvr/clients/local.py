"""The engine in this process, behind the Tinker method names.

`LocalTrainingClient(engine, policy, folder)` trains one policy; `create_sampling_client()` gives a sampler bound to
its weights as they are now. Saved states live in `folder` under their names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlvr.engine.checkpoint import load_policy, save_policy
from rlvr.engine.engine import Engine
from rlvr.engine.policy import Policy, Snapshot
from rlvr.files import checked_name, new_folder
from rlvr.protocols import (
    AdamParams,
    CustomLoss,
    Datum,
    ForwardBackwardOutput,
    Future,
    LazyFuture,
    ModelInput,
    NonFiniteError,
    OptimStepResponse,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
    TensorData,
)


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
            logprobs = self._engine.prompt_logprobs(self._snapshot, prompt)
            return SampleResponse(response.sequences, logprobs, response.fingerprint)

        return LazyFuture(with_prompt)

    def compute_logprobs(self, prompt: ModelInput) -> Future[list[float | None]]:
        return LazyFuture(lambda: self._engine.prompt_logprobs(self._snapshot, prompt))

    def get_tokenizer(self) -> Any:
        return self._engine.model.tokenizer


class LocalTrainingClient:
    """Trains one policy of an engine. Calls run when they are made: the futures are already done."""

    scores_at_temperature = True  # `loss_fn_config={"temperature": T}` is honoured

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

    def forward_backward_custom(self, data: list[Datum], loss_fn: CustomLoss) -> Future[ForwardBackwardOutput]:
        """The gradient of any function of per-token log-probs: `loss_fn(data, [logprobs, ...]) -> (loss, metrics)`.

        Two passes: log-probs first, then the chain rule through a cross-entropy with weights -dL/dlogprob.
        """
        import torch

        zero = [_weighted(d, [0.0] * d.model_input.length) for d in data]
        first = self.forward(zero).result()
        leaves = [out["logprobs"].to_torch().requires_grad_(True) for out in first.loss_fn_outputs]
        loss, metrics = loss_fn(data, leaves)
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        bad = [i for i, g in enumerate(grads) if g is not None and not bool(torch.isfinite(g).all())]
        if bad or not bool(torch.isfinite(loss)):
            raise NonFiniteError("the custom loss or its gradient", bad)
        second = [
            _weighted(d, torch.zeros_like(leaf) if g is None else -g)
            for d, leaf, g in zip(data, leaves, grads, strict=True)
        ]
        surrogate = self.forward_backward(second, "cross_entropy").result()
        values = {"loss:sum": float(loss.detach()), "surrogate_loss:sum": surrogate.metrics["loss:sum"]}
        return LazyFuture.done(ForwardBackwardOutput(first.loss_fn_outputs, {**metrics, **values}))

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

    def create_sampling_client(self) -> LocalSamplingClient:
        return LocalSamplingClient(self._engine, self._engine.snapshot(self._policy))

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> LocalSamplingClient:
        """A sampler for the weights as they are now; with a name they are saved too."""
        if name is not None:
            self.save_weights_for_sampler(name).result()
        return self.create_sampling_client()

    def get_tokenizer(self) -> Any:
        return self._engine.model.tokenizer


def _weighted(datum: Datum, weights: Any) -> Datum:
    return Datum(
        datum.model_input,
        {"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": TensorData.of(weights)},
    )
