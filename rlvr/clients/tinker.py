"""Our loops on any server that speaks the Tinker protocol, through the public `tinker` SDK (extra: `rlvr[tinker]`).

`connect(...)` gives a `TinkerTrainingClient`. What the wire has no place for is refused here, or takes two passes: a
loss that needs more inputs than its named form is computed by `rlvr.clients.custom_loss` (torch, in this process). Left
out on purpose: training without an adapter, scores at another temperature than 1, `min_p`, exact entropy; the wire has
none of these.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rlvr.algorithms.loss_specs import LOSS_SPECS, PROTOCOL_LOSSES, VALUE_LOSS, VALUE_SPEC
from rlvr.algorithms.losses.loss import DUAL_CLIP
from rlvr.clients.client_options import AtServer
from rlvr.clients.client_spec import ClientRequest, ClientSpec
from rlvr.clients.custom_loss import (
    build_named_loss,
    compute_custom_loss,
    cross_entropy_datum,
    needs_two_passes,
    two_passes,
)
from rlvr.clients.local_engine import load_named_tokenizer
from rlvr.clients.tinker_sampler import TIMEOUT, TinkerSamplingClient
from rlvr.clients.tinker_sdk import (
    RemoteFuture,
    end_session,
    from_output,
    import_sdk,
    to_datum,
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
    SaveWeightsResponse,
)
from rlvr.core.protocols import ClientCapabilities, CustomLoss, Feature
from rlvr.engine.engine_options import LoraConfig

SCHEME = "tinker://"
T = TypeVar("T")


class TinkerTrainingClient:
    """Trains an adapter on a server, which keeps what is saved: paths are `tinker://` paths.

    The SDK loads weights by making a new training run of them: after `load_state` this client speaks to another one.
    Every call raises RuntimeError after `timeout_s`.
    """

    capabilities = ClientCapabilities(
        "tinker",
        losses=LOSS_SPECS.keys(),
        features=frozenset({Feature.EXTRA_INPUTS, Feature.REFERENCE, Feature.OWN_LOSS, Feature.CRITIC}),
        can_overlap=True,
        is_remote=True,
    )

    named_losses = PROTOCOL_LOSSES
    """The losses that the server computes by name; the others take two passes."""

    def __init__(self, service: Any, client: Any, *, tokenizer: Any = None, timeout_s: float = TIMEOUT) -> None:
        self._service, self._client, self._tokenizer, self.timeout_s = service, client, tokenizer, timeout_s
        self._steps = 0
        self._sampler: TinkerSamplingClient | None = None

    @property
    def base_model(self) -> str:
        return str(self._wait(self._client.get_info).model_data.model_name)

    @property
    def lora_rank(self) -> int | None:
        return self._wait(self._client.get_info).lora_rank

    @property
    def fingerprint(self) -> str:
        """A name of the weights as they are now: the server's name for the run, and the steps made by this client."""
        return f"{self._client.model_id}@{self._steps}"

    def forward_backward(
        self, data: list[Datum], loss_fn: str, loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        """One call, or two passes where the protocol has no such loss, input (`kl_weights`, say) or setting."""
        _check_config(loss_fn_config)
        if self._needs_two_passes(data, loss_fn, loss_fn_config):
            loss = build_named_loss(loss_fn, loss_fn_config)
            return LazyFuture.from_value(two_passes(self, data, loss, _kl_config(loss_fn_config)))
        return self._pass(data, loss_fn, loss_fn_config, has_gradient=True)

    def forward(
        self, data: list[Datum], loss_fn: str = "cross_entropy", loss_fn_config: dict[str, float] | None = None
    ) -> Future[ForwardBackwardOutput]:
        _check_config(loss_fn_config)
        if self._needs_two_passes(data, loss_fn, loss_fn_config):
            loss = build_named_loss(loss_fn, loss_fn_config)
            return LazyFuture.from_value(self._forward_custom(data, loss, _kl_config(loss_fn_config)))
        return self._pass(data, loss_fn, loss_fn_config, has_gradient=False)

    def _needs_two_passes(self, data: list[Datum], loss_fn: str, config: Mapping[str, float] | None) -> bool:
        has_dual_clip = (config or {}).get(DUAL_CLIP, math.inf) != math.inf
        return needs_two_passes(data) or has_dual_clip or loss_fn not in self.named_losses

    def _pass(
        self, data: list[Datum], loss_fn: str, config: Mapping[str, float] | None, *, has_gradient: bool
    ) -> Future[ForwardBackwardOutput]:
        """A loss by the server's name for it, with every setting: servers have other defaults than ours."""
        settings = {**LOSS_SPECS[loss_fn].config, **(config or {})}
        settings.pop(DUAL_CLIP, None)  # none: the protocol has no such setting
        return self._future(self._submit(data, loss_fn, settings, has_gradient), from_output)

    def _submit(self, data: list[Datum], loss_fn: str, config: Mapping[str, float] | None, has_gradient: bool) -> Any:
        if not data:
            raise ValueError("data is empty: there is nothing to compute (were all groups filtered out?)")
        call = self._client.forward_backward if has_gradient else self._client.forward
        with translate_errors(of_run=True):
            return call([to_datum(datum) for datum in data], loss_fn, dict(config or {}) or None)

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
        return self._future(future, self._read_step)

    def _read_step(self, response: Any) -> OptimStepResponse:
        return OptimStepResponse(dict(response.metrics or {}))

    def save_state(self, name: str) -> Future[SaveWeightsResponse]:
        """Weights and optimizer, in place of what this run saved by that name before."""
        check_name(name, "checkpoint name")
        with translate_errors():
            return self._future(self._client.save_state(name, overwrite=True), _to_response)

    def save_weights_for_sampler(self, name: str) -> Future[SaveWeightsResponse]:
        check_name(name, "checkpoint name")
        with translate_errors():
            return self._future(self._client.save_weights_for_sampler(name), _to_response)

    def load_state(self, path: str) -> Future[None]:
        return LazyFuture.from_value(self._load(self._service.create_training_client_from_state, path))

    def load_state_with_optimizer(self, path: str) -> Future[None]:
        return LazyFuture.from_value(self._load(self._service.create_training_client_from_state_with_optimizer, path))

    def _load(self, make: Callable[[str], Any], path: str) -> None:
        self._client = self._wait(lambda: make(check_path(path)), of_run=False)
        self._steps, self._sampler = 0, None

    def create_sampling_client(self, model_path: str | None = None) -> TinkerSamplingClient:
        """A sampler for the weights as they are now, or for those saved at `model_path`."""
        if model_path is None:
            return self.save_weights_and_get_sampling_client()
        path = check_path(model_path)
        client = self._wait(lambda: self._client.create_sampling_client(path), of_run=False)
        return TinkerSamplingClient(client, path, self._tokenizer, self.timeout_s)

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> TinkerSamplingClient:
        """A sampler for the weights as they are now; the same one until they change. With a name they are saved too."""
        if name is not None:
            self.save_weights_for_sampler(name).result()
        if self._sampler is None or self._sampler.fingerprint != self.fingerprint:
            client = self._wait(self._client.save_weights_and_get_sampling_client)
            self._sampler = self._make_sampler(client)
        return self._sampler

    def create_critic(self) -> TinkerCriticClient:
        """A critic at the same server, from a state saved now; ValueError if the server makes a policy of it."""
        path = self.save_state("start-of-critic").result().path
        role = {"model_role": "critic"}
        client = self._wait(lambda: self._service.create_training_client_from_state(path, user_metadata=role))
        critic = TinkerCriticClient(self._service, client, tokenizer=self._tokenizer, timeout_s=self.timeout_s)
        critic.check_role()
        return critic

    def _make_sampler(self, client: Any) -> TinkerSamplingClient:
        return TinkerSamplingClient(client, self.fingerprint, self._tokenizer, self.timeout_s)

    def _future(self, future: Any, read: Callable[[Any], T]) -> Future[T]:
        return RemoteFuture(future, read, self.timeout_s)

    def _wait(self, call: Callable[[], Any], *, of_run: bool = True) -> Any:
        with translate_errors(of_run=of_run):
            return wait_for(call, self.timeout_s)

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


class TinkerCriticClient(TinkerTrainingClient):
    """A critic on a server. Its loss is sent as `ppo`, since the SDK takes no new name, with the inputs of `value`."""

    named_losses = PROTOCOL_LOSSES | {VALUE_LOSS}

    def _pass(
        self, data: list[Datum], loss_fn: str, config: Mapping[str, float] | None, *, has_gradient: bool
    ) -> Future[ForwardBackwardOutput]:
        if loss_fn != VALUE_LOSS:
            raise ValueError(f"loss_fn {loss_fn!r} for a critic is not supported; give loss_fn={VALUE_LOSS}")
        return self._future(self._submit(data, "ppo", config, has_gradient), from_output)

    def check_role(self) -> None:
        """ValueError if the server made a policy instead of a critic: it returns no values and has another loss."""
        inputs = {"target_tokens": [0], **{name: [0.0] for name in VALUE_SPEC.inputs}}
        try:
            [row] = self.forward([Datum(ModelInput([0]), inputs)], VALUE_LOSS).result().loss_fn_outputs
            answer = f"it answers {', '.join(row)}"
        except ValueError as error:
            row, answer = {}, str(error)
        if "values" not in row:
            raise ValueError(
                "client=tinker: this server made no critic of a run with user_metadata model_role=critic "
                f"({answer}); use a server that knows the role (rlvr serve engine), or an algorithm without a critic"
            )


C = TypeVar("C", bound=TinkerTrainingClient)


def connect(
    base_model: str | None,
    *,
    start_from: str | None = None,
    has_optimizer: bool = False,
    lora: LoraConfig | None = None,
    seed: int = 0,
    base_url: str | None = None,
    api_key: str | None = None,
    tokenizer: Any = None,
    timeout_s: float = TIMEOUT,
    client_class: type[C] = TinkerTrainingClient,
) -> C:
    """A client that trains a new adapter of `base_model`, or goes on from the weights at `start_from`, and from the
    optimizer's state there if `has_optimizer`.

    `base_url` and `api_key` None: where the SDK itself looks (TINKER_BASE_URL, TINKER_API_KEY, its credentials file).
    The adapter covers all linear layers but the head, as our own engine's do.
    """
    tinker, lora = import_sdk(), lora or LoraConfig()
    if lora.targets:
        raise ValueError(f"model.lora.targets={list(lora.targets)}: the Tinker protocol takes no list; leave it out")
    try:
        service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
        new = {"rank": lora.rank, "seed": seed, "train_unembed": False}
        with translate_errors():
            if start_from is not None:
                path, make = check_path(start_from), service.create_training_client_from_state
                if has_optimizer:
                    make = service.create_training_client_from_state_with_optimizer
                client = wait_for(lambda: make(path), timeout_s)
            else:
                client = wait_for(lambda: service.create_lora_training_client(base_model, **new), timeout_s)
    except tinker.TinkerError as error:
        raise ValueError(f"client=tinker: {error}") from error
    return client_class(service, client, tokenizer=tokenizer, timeout_s=timeout_s)


def build_at_server(request: ClientRequest, client_class: type[C]) -> C:
    options, server = request.model, request.options
    assert isinstance(server, AtServer)
    if options.tokenizer:
        from rlvr.engine.tokenizer import silence_transformers

        silence_transformers()
    check_reachable(server.base_url or os.environ.get("TINKER_BASE_URL"))
    client = connect(
        options.name,
        start_from=_start_path(request) if request.fresh and options.start_from else None,
        lora=options.lora,
        seed=request.seed,
        base_url=server.base_url,
        api_key=server.api_key,
        tokenizer=load_named_tokenizer(options.tokenizer, request) if options.tokenizer else None,
        timeout_s=server.answer_timeout_s,
        client_class=client_class,
    )
    request.log(f"{client.base_model} at {server.base_url or 'the server that the tinker SDK finds'}")
    return client


def describe_at_server(request: ClientRequest, name: str) -> str:
    model = _start_path(request) if request.model.start_from else request.model.name
    assert isinstance(request.options, AtServer)
    return f"{model}, an adapter that {request.options.base_url or 'a Tinker server'} trains (client={name})"


def _start_path(request: ClientRequest) -> str:
    """The `tinker://` path of `model.start_from`; for a run or checkpoint, the path that it recorded."""
    path = request.find_start()
    if not path.startswith(SCHEME):
        raise ValueError(
            f"model.start_from={request.model.start_from!r}: client=tinker starts from {SCHEME} paths, or from a run "
            "that kept its weights at the same server; to go on from a folder use client=local"
        )
    return path


def check_reachable(address: str | None) -> None:
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


def check_path(path: str) -> str:
    if not path.startswith(SCHEME):
        raise ValueError(f"{path}: a Tinker server keeps its weights at {SCHEME} paths; give what save_state returned")
    return path


TINKER = ClientSpec(
    TinkerTrainingClient.capabilities,
    partial(build_at_server, client_class=TinkerTrainingClient),
    partial(describe_at_server, name="tinker"),
)
