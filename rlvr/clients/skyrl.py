"""Our loops on a SkyRL server, whose losses are means: `client=skyrl model.base_url=http://127.0.0.1:8000`.

SkyRL's JAX backend (0.3.0, and its main branch of August 2026) divides the loss of a row by the row's length, and the
gradient of a step by the rows of all its calls. This client multiplies advantages by both: the gradient is that of the
sum, and an optimizer step takes one forward-backward call. SkyRL computes `importance_sampling`, `ppo` and `cispo` by
name. `cross_entropy`, whose weights it divides by their sum, becomes `cispo` with the ratio clipped to 1, and every
other loss takes two passes over that (`rlvr.clients.custom_loss`).

A training run has one set of weights there, which a sampler of older weights would overwrite: samplers are for the
weights as they are now, and saved weights get a training run of their own. Left out on purpose: SkyRL's other backends,
which were not run; a bound on the gradient's norm, stop strings and weights without their optimizer, which SkyRL 0.3.0
lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from rlvr.algorithms.loss_specs import LOSS_SPECS, check_batch
from rlvr.clients.client_spec import ClientRequest, ClientSpec
from rlvr.clients.tinker import (
    TinkerTrainingClient,
    build_at_server,
    check_path,
    describe_at_server,
)
from rlvr.clients.tinker_sampler import TinkerSamplingClient
from rlvr.clients.tinker_sdk import check_logprobs, from_output
from rlvr.core.futures import Future
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
from rlvr.core.protocols import ClientCapabilities, Feature
from rlvr.core.tensors import TensorData

NO_CLIP = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
SEEDS = 2**31 - 2**16  # SkyRL's are int32, and sample i of a request has seed + i
GRAD_NORM = "skyrl.ai/grad_norm"


class SkyrlSamplingClient(TinkerSamplingClient):
    """Samples while `is_current()`: after an optimizer step the server would sample the weights after it."""

    def __init__(self, *args: Any, is_current: Callable[[], bool] = lambda: True) -> None:
        super().__init__(*args)
        self._is_current = is_current

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        self._check_current()
        stop, seed = sampling_params.stop, sampling_params.seed
        if stop is None:  # there: never
            end = self.get_tokenizer().eos_token_id
            stop = [] if end is None else [end]
        if isinstance(stop, str) or any(isinstance(part, str) for part in stop):
            raise ValueError(
                f"stop={stop!r}: client=skyrl takes token ids; SkyRL cuts stop strings out of the answer, and does not "
                "stop at the end token beside them"
            )
        params = replace(sampling_params, stop=stop, seed=None if seed is None else seed % SEEDS)
        return super().sample(prompt, num_samples, params, include_prompt_logprobs)

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        self._check_current()
        return super().compute_logprobs(prompt, temperature)

    def _prompt_logprobs(self, known: Any, length: int) -> list[float | None]:
        values = list(known or [])
        first = [None] if len(values) == length - 1 else []  # SkyRL leaves out the first token's
        return check_logprobs([*first, *values], length, "prompt")

    def _check_current(self) -> None:
        if not self._is_current():
            raise RuntimeError(
                f"the weights {self.fingerprint} were trained since this sampler was made, and SkyRL keeps one set of "
                "weights for a run; make a new sampler, or save the weights and give create_sampling_client the path"
            )


class SkyrlTrainingClient(TinkerTrainingClient):
    capabilities = ClientCapabilities(
        "skyrl",
        losses=LOSS_SPECS.keys(),
        features=frozenset({Feature.EXTRA_INPUTS, Feature.REFERENCE, Feature.OWN_LOSS}),
        is_remote=True,
        clips_gradients=False,
        accumulates=False,
    )
    named_losses = frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo"})
    _rows = 0
    """Rows of the forward-backward call since the last optimizer step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._saved: set[str] = set()

    def _pass(
        self, data: list[Datum], loss_fn: str, config: Mapping[str, float] | None, *, has_gradient: bool
    ) -> Future[ForwardBackwardOutput]:
        settings = check_batch(
            data, loss_fn, config, allow_many_targets=False
        )  # the server fills missing inputs with 0
        if has_gradient and self._rows:
            raise ValueError(
                "client=skyrl: a second forward-backward call before optim_step; SkyRL divides the gradient of a step "
                "by the rows of all its calls, so give all rows in one"
            )
        scales = [float(datum.model_input.length * len(data)) for datum in data]
        rows = [_scale(datum, scale, loss_fn) for datum, scale in zip(data, scales, strict=True)]
        thresholds = {key: settings[key] for key in NO_CLIP if key in settings}
        name, config = ("cispo", NO_CLIP) if loss_fn == "cross_entropy" else (loss_fn, thresholds)
        future = self._submit(rows, name, config, has_gradient)
        if has_gradient:
            self._rows = len(data)
        return self._future(future, partial(_read_output, scales=scales))

    def optim_step(self, adam_params: AdamParams) -> Future[OptimStepResponse]:
        if not self._rows:
            raise ValueError("optim_step: there are no gradients; call forward_backward first")
        future = super().optim_step(adam_params)
        self._rows = 0
        return future

    def _read_step(self, response: Any) -> OptimStepResponse:
        metrics = dict(response.metrics or {})
        return OptimStepResponse({**metrics, "grad_norm": metrics.get(GRAD_NORM, math.nan)})

    def save_state(self, name: str) -> Future[SaveWeightsResponse]:
        """As `TinkerTrainingClient` does, by a name that this run has not used yet."""
        if name in self._saved:
            raise ValueError(
                f"checkpoint name {name!r}: the run has saved one of that name, and SkyRL does not replace it; give "
                "another name"
            )
        future = super().save_state(name)
        self._saved.add(name)
        return future

    def save_weights_for_sampler(self, name: str) -> Future[SaveWeightsResponse]:
        """The whole state: SkyRL would load what is saved for samplers into the run that trains."""
        return self.save_state(name)

    def create_sampling_client(self, model_path: str | None = None) -> TinkerSamplingClient:
        """As `TinkerTrainingClient` does; saved weights take a place for an adapter at the server."""
        if model_path is None:
            return self.save_weights_and_get_sampling_client()
        path = check_path(model_path)
        run = self._wait(lambda: self._service.create_training_client_from_state(path), of_run=False)
        client = self._wait(run.save_weights_and_get_sampling_client)
        return SkyrlSamplingClient(client, path, self._tokenizer, self.timeout_s)

    def create_critic(self) -> NoReturn:
        """Refuse a critic by ValueError: SkyRL has policies only."""
        raise ValueError("client=skyrl has no critic; use an algorithm without one")

    def _make_sampler(self, client: Any) -> TinkerSamplingClient:
        made = self.fingerprint
        return SkyrlSamplingClient(
            client, made, self._tokenizer, self.timeout_s, is_current=lambda: self.fingerprint == made
        )

    def _load(self, make: Callable[[str], Any], path: str) -> None:
        super()._load(make, path)
        self._rows, self._saved = 0, set()


def _scale(datum: Datum, scale: float, loss_fn: str) -> Datum:
    """The row as SkyRL takes it: advantages times `scale`; weights of a cross-entropy are advantages there."""
    inputs = datum.loss_fn_inputs
    weights = inputs["weights" if loss_fn == "cross_entropy" else "advantages"].data
    logprobs = TensorData.of(0.0 * weights) if loss_fn == "cross_entropy" else inputs["logprobs"]
    scaled = {"logprobs": logprobs, "advantages": TensorData.of(scale * weights)}
    return Datum(datum.model_input, {"target_tokens": inputs["target_tokens"], **scaled})


def _read_output(output: Any, scales: list[float]) -> ForwardBackwardOutput:
    """The answer, with the loss as the sum that it is here."""
    rows = output.loss_fn_outputs
    if len(rows) != len(scales) or any("elementwise_loss" not in row for row in rows):
        raise ValueError(
            "the server's answer has no elementwise_loss for each row, as one of SkyRL's JAX backend has; give "
            "client=tinker for other servers"
        )
    losses = [row["elementwise_loss"].to_numpy().sum() / scale for row, scale in zip(rows, scales, strict=True)]
    return from_output(output, {"loss:sum": float(sum(losses))})


def _check(request: ClientRequest) -> None:
    if request.model.start_from:
        raise ValueError(
            f"model.start_from={request.model.start_from!r}: SkyRL 0.3.0 would load the optimizer with the weights; "
            "with client=skyrl leave it out"
        )


SKYRL = ClientSpec(
    SkyrlTrainingClient.capabilities,
    partial(build_at_server, client_class=SkyrlTrainingClient),
    partial(describe_at_server, name="skyrl"),
    _check,
)
