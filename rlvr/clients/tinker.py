"""Our loops on any server that speaks the Tinker protocol, through the public `tinker` SDK (extra: `rlvr[tinker]`).

`connect(...)` gives a `TinkerTrainingClient`. What the wire has no place for is refused here, or takes two passes: a
loss that needs more inputs than its named form is computed by `rlvr.clients.custom_loss` (torch, in this process).
Exercised by tests/test_clients_tinker.py. Left out on purpose: training without an adapter, scores at another
temperature than 1, `min_p`, exact entropy; the wire has none of these.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from rlvr.algorithms.loss_specs import LOSS_SPECS
from rlvr.clients.custom_loss import (
    build_named_loss,
    compute_custom_loss,
    cross_entropy_datum,
    needs_two_passes,
    two_passes,
)
from rlvr.clients.local_engine import load_named_tokenizer
from rlvr.clients.registry import ClientRequest, ClientSpec
from rlvr.clients.tinker_sdk import (
    RemoteFuture,
    check_logprobs,
    end_session,
    from_output,
    import_sdk,
    to_datum,
    to_input,
    translate_errors,
    wait_for,
)
from rlvr.core.files import check_name
from rlvr.core.futures import Future, LazyFuture
from rlvr.core.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
)
from rlvr.core.protocols import ClientCapabilities, CustomLoss, Feature
from rlvr.core.types import StopReason
from rlvr.engine.engine_options import LoraConfig

SCHEME = "tinker://"


class TinkerSamplingClient:
    """Samples from weights on a server. `fingerprint` says which, as far as this process knows."""

    def __init__(self, client: Any, fingerprint: str, tokenizer: Any = None) -> None:
        self._client, self.fingerprint, self._tokenizer = client, fingerprint, tokenizer

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> Future[SampleResponse]:
        types, asked = import_sdk().types, sampling_params
        if asked.min_p:
            raise ValueError(f"sample: min_p={asked.min_p} has no place in the Tinker protocol; use top_p or top_k")
        params = types.SamplingParams(
            max_tokens=asked.max_tokens,
            seed=asked.seed,
            stop=asked.stop,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
        )
        future = self._client.sample(to_input(prompt), num_samples, params, include_prompt_logprobs)
        scored = prompt.length if include_prompt_logprobs else None
        return RemoteFuture(future, lambda response: self._response(response, scored))

    def _response(self, response: Any, scored: int | None) -> SampleResponse:
        """`scored`: how many log-probs of the prompt were asked for."""
        sequences = [
            SampledSequence(
                StopReason(s.stop_reason), s.tokens, check_logprobs(s.logprobs, len(s.tokens), "completion")
            )
            for s in response.sequences
        ]
        known = None if scored is None else check_logprobs(response.prompt_logprobs, scored, "prompt")
        return SampleResponse(sequences, known, self.fingerprint)

    def compute_logprobs(self, prompt: ModelInput, temperature: float = 1.0) -> Future[list[float | None]]:
        if temperature != 1.0:
            raise ValueError(
                f"compute_logprobs: a Tinker server scores at temperature 1, not {temperature:g}; sample at "
                "rollout.temperature=1, or leave out what compares with a reference (algorithm.kl_coef)"
            )
        length = prompt.length
        return RemoteFuture(
            self._client.compute_logprobs(to_input(prompt)), lambda known: check_logprobs(known, length, "prompt")
        )

    def get_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._client.get_tokenizer()
        return self._tokenizer


class TinkerTrainingClient:
    """Trains an adapter on a server, which keeps what is saved: paths are `tinker://` paths.

    The SDK loads weights by making a new training run of them: after `load_state` this client speaks to another one.
    """

    capabilities = ClientCapabilities(
        "tinker",
        losses=frozenset(LOSS_SPECS),
        features=frozenset({Feature.EXTRA_INPUTS, Feature.REFERENCE, Feature.OWN_LOSS}),
        can_overlap=True,
        is_remote=True,
    )

    def __init__(self, service: Any, client: Any, *, tokenizer: Any = None) -> None:
        self._service, self._client, self._tokenizer = service, client, tokenizer
        self._steps = 0
        self._sampler: TinkerSamplingClient | None = None

    @property
    def base_model(self) -> str:
        return str(self._client.get_info().model_data.model_name)

    @property
    def fingerprint(self) -> str:
        """Of the weights as they are now: the server's name for the run, and the steps made by this client."""
        return f"{self._client.model_id}@{self._steps}"

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """One call, or two passes where the loss is given inputs that the wire does not know (`kl_weights`, say)."""
        _check_config(loss_fn_config)
        if needs_two_passes(data):
            loss = build_named_loss(loss_fn, loss_fn_config)
            return LazyFuture.from_value(two_passes(self, data, loss, _kl_config(loss_fn_config)))
        return self._pass(self._client.forward_backward, data, loss_fn, loss_fn_config)

    def forward(
        self, data: list[Datum], loss_fn: str = "cross_entropy", loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        _check_config(loss_fn_config)
        if needs_two_passes(data):
            loss = build_named_loss(loss_fn, loss_fn_config)
            return LazyFuture.from_value(self._forward_custom(data, loss, _kl_config(loss_fn_config)))
        return self._pass(self._client.forward, data, loss_fn, loss_fn_config)

    def _pass(
        self, call: Callable[..., Any], data: list[Datum], loss_fn: str, config: Mapping[str, float] | None
    ) -> Future[ForwardBackwardOutput]:
        if not data:
            raise ValueError("data is empty: there is nothing to compute (were all groups filtered out?)")
        with translate_errors():
            return RemoteFuture(
                call([to_datum(datum) for datum in data], loss_fn, dict(config or {}) or None), from_output
            )

    def _forward_custom(
        self, data: list[Datum], loss: CustomLoss, config: Mapping[str, float]
    ) -> ForwardBackwardOutput:
        """A forward pass, with the value of a loss that is computed here."""
        output = self.forward([cross_entropy_datum(datum, [0.0] * datum.model_input.length) for datum in data]).result()
        logprobs = [out["logprobs"].to_torch() for out in output.loss_fn_outputs]
        value, _ = compute_custom_loss(loss, data, logprobs, **config)
        return ForwardBackwardOutput(output.loss_fn_outputs, {"loss:sum": float(value)})

    def forward_backward_custom(
        self, data: list[Datum], loss_fn: CustomLoss, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """The gradient of any function of per-token log-probs, in two passes (`rlvr.clients.custom_loss`)."""
        _check_config(loss_fn_config)
        return LazyFuture.from_value(two_passes(self, data, loss_fn, loss_fn_config))

    def optim_step(self, adam_params: AdamParams) -> Future[OptimStepResponse]:
        self.capabilities.check_optimizer(adam_params)
        self._steps += 1
        with translate_errors():
            future = self._client.optim_step(import_sdk().types.AdamParams(**vars(adam_params)))
        return RemoteFuture(future, lambda response: OptimStepResponse(dict(response.metrics or {})))

    def save_state(self, name: str) -> Future[SaveWeightsResponse]:
        """Weights and optimizer, in place of what this run saved by that name before."""
        check_name(name, "checkpoint name")
        with translate_errors():
            return RemoteFuture(self._client.save_state(name, overwrite=True), _to_response)

    def save_weights_for_sampler(self, name: str) -> Future[SaveWeightsResponse]:
        check_name(name, "checkpoint name")
        with translate_errors():
            return RemoteFuture(self._client.save_weights_for_sampler(name), _to_response)

    def load_state(self, path: str) -> Future[None]:
        return LazyFuture.from_value(self._load(self._service.create_training_client_from_state, path))

    def load_state_with_optimizer(self, path: str) -> Future[None]:
        return LazyFuture.from_value(self._load(self._service.create_training_client_from_state_with_optimizer, path))

    def _load(self, make: Callable[[str], Any], path: str) -> None:
        with translate_errors():
            self._client = wait_for(make(_check_path(path)))
        self._steps, self._sampler = 0, None

    def create_sampling_client(self, model_path: str | None = None) -> TinkerSamplingClient:
        """A sampler for the weights as they are now, or for those saved at `model_path`."""
        if model_path is None:
            return self.save_weights_and_get_sampling_client()
        path = _check_path(model_path)
        with translate_errors():
            return TinkerSamplingClient(wait_for(self._client.create_sampling_client(path)), path, self._tokenizer)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> TinkerSamplingClient:
        """A sampler for the weights as they are now; the same one until they change. With a name they are saved too."""
        if name is not None:
            self.save_weights_for_sampler(name).result()
        if self._sampler is None or self._sampler.fingerprint != self.fingerprint:
            with translate_errors():
                client = wait_for(self._client.save_weights_and_get_sampling_client())
            self._sampler = TinkerSamplingClient(client, self.fingerprint, self._tokenizer)
        return self._sampler

    def get_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._client.get_tokenizer()
        return self._tokenizer

    def weights_sha256(self) -> str:
        return ""

    def describe_environment(self) -> dict[str, str | int]:
        return {"server": self.base_model}

    def close(self) -> None:
        """End the session at the server, and its heartbeat. What was saved stays."""
        end_session(self._service)


def connect(
    base_model: str | None,
    *,
    start_from: str | None = None,
    lora: LoraConfig | None = None,
    seed: int = 0,
    base_url: str | None = None,
    api_key: str | None = None,
    tokenizer: Any = None,
) -> TinkerTrainingClient:
    """A client that trains a new adapter of `base_model`, or goes on from the weights at `start_from`.

    `base_url` and `api_key` None: where the SDK itself looks (TINKER_BASE_URL, TINKER_API_KEY, its credentials file).
    The adapter covers all linear layers but the head, as our own engine's do.
    """
    tinker, lora = import_sdk(), lora or LoraConfig()
    if lora.targets:
        raise ValueError(f"model.lora.targets={list(lora.targets)}: the Tinker protocol takes no list; leave it out")
    try:
        service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
        with translate_errors():
            if start_from is not None:
                client = wait_for(service.create_training_client_from_state(_check_path(start_from)))
            else:
                client = wait_for(
                    service.create_lora_training_client(base_model, rank=lora.rank, seed=seed, train_unembed=False)
                )
    except tinker.TinkerError as error:
        raise ValueError(f"client=tinker: {error}") from error
    return TinkerTrainingClient(service, client, tokenizer=tokenizer)


def _build(request: ClientRequest) -> TinkerTrainingClient:
    options = request.model
    if options.tokenizer:
        from rlvr.engine.tokenizer import silence_transformers

        silence_transformers()
    _check_reachable(options.base_url or os.environ.get("TINKER_BASE_URL"))
    client = connect(
        options.name,
        start_from=_start_path(request) if request.fresh and options.start_from else None,
        lora=options.lora,
        seed=request.seed,
        base_url=options.base_url,
        api_key=options.api_key,
        tokenizer=load_named_tokenizer(options.tokenizer, request) if options.tokenizer else None,
    )
    request.say(f"{client.base_model} at {options.base_url or 'the server that the tinker SDK finds'}")
    return client


def _describe(request: ClientRequest) -> str:
    model = _start_path(request) if request.model.start_from else request.model.name
    return f"{model}, an adapter that {request.model.base_url or 'a Tinker server'} trains (client=tinker)"


def _start_path(request: ClientRequest) -> str:
    """The `tinker://` path of `model.start_from`; of a run or a checkpoint, the one it wrote down."""
    path = request.find_start()
    if not path.startswith(SCHEME):
        raise ValueError(
            f"model.start_from={request.model.start_from!r}: client=tinker starts from {SCHEME} paths, or from a run "
            "that kept its weights at the same server; to go on from a folder use client=local"
        )
    return path


def _check_reachable(address: str | None) -> None:
    """ValueError if no server listens at the address: the SDK would retry for five minutes before it says so."""
    if address is None:
        return  # the SDK's own choice
    try:
        parts = urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=10).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.base_url={address}: no server answers there ({error}); start the server (rlvr serve engine), or "
            "give its address, for example http://127.0.0.1:8000"
        ) from error


def _to_response(saved: Any) -> SaveWeightsResponse:
    return SaveWeightsResponse(saved.path)


def _check_config(config: Mapping[str, float] | None) -> None:
    if "temperature" in (config or {}):
        raise ValueError("loss_fn_config: a Tinker server scores at temperature 1; leave temperature out")


def _kl_config(config: Mapping[str, float] | None) -> dict[str, float]:
    """The setting of a KL, which is computed beside the loss."""
    return {key: value for key, value in (config or {}).items() if key == "kl_estimator"}


def _check_path(path: str) -> str:
    if not path.startswith(SCHEME):
        raise ValueError(f"{path}: a Tinker server keeps its weights at {SCHEME} paths; give what save_state returned")
    return path


TINKER = ClientSpec(TinkerTrainingClient.capabilities, _build, _describe)
