"""`rlvr doctor --tinker URL` tries a Tinker server before a run: key, model, adapter, losses, sampling, log-probs.

Everything happens on an adapter of its own, which is trained by one token at learning rate 0; its session is ended
afterwards. The SDK finds the key where it always does (TINKER_API_KEY).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rlvr.algorithms.loss_specs import LOSS_SPECS
from rlvr.cli.doctor import Check
from rlvr.clients.registry import close_client
from rlvr.clients.skyrl import SkyrlTrainingClient
from rlvr.clients.tinker import TinkerTrainingClient, check_reachable, connect
from rlvr.clients.tinker_sdk import import_sdk, translate_errors, wait_for
from rlvr.core.messages import AdamParams, Datum, ModelInput, SamplingParams
from rlvr.core.tensors import TensorData
from rlvr.engine.engine_options import LoraConfig

PATIENCE = 120.0  # seconds: the first request of a fresh server compiles
TOKENS = [1, 2, 3]
STILL = AdamParams(learning_rate=0.0)


def check_tinker(url: str, model: str | None = None, rank: int = LoraConfig().rank) -> list[Check]:
    """The checks of the server at `url`, as lines of the report; `model` None takes the first that it offers."""
    return list(_check(url, model, rank))


def _check(url: str, model: str | None, rank: int) -> Iterator[Check]:
    try:
        tinker = import_sdk()
        check_reachable(url)
        with translate_errors():
            offered = wait_for(lambda: _list_models(tinker, url), PATIENCE).supported_models
    except Exception as error:  # the SDK's own for a key, say
        yield _describe_refusal(error, "server", "")
        return
    names = [str(entry.model_name) for entry in offered]
    yield Check("ok", "server", f"{url} answers; SDK {tinker.__version__}")
    if model is not None and model not in names:
        yield Check("fails", "model", f"{model!r} is not offered; give model.name={' or '.join(names) or '(none)'}")
        return
    yield Check("ok" if names else "fails", "model", f"offered: {', '.join(names) or 'none'}")
    if names:
        yield from _check_client(url, model or names[0], rank)


def _list_models(tinker: Any, url: str) -> Any:
    if hasattr(tinker, "RestClient") and hasattr(tinker.RestClient, "get_server_capabilities"):
        return tinker.RestClient(base_url=url).get_server_capabilities()
    return tinker.ServiceClient(base_url=url).get_server_capabilities()  # the SDK before 0.38


def _check_client(url: str, model: str, rank: int) -> Iterator[Check]:
    """Try what a run asks for, as `client=tinker`, and as `client=skyrl` where the losses are not the protocol's."""
    tried: list[Check] = []
    for name, kind in (("tinker", TinkerTrainingClient), ("skyrl", SkyrlTrainingClient)):
        try:
            client = connect(model, base_url=url, lora=LoraConfig(rank=rank), timeout_s=PATIENCE, client_class=kind)
        except (ValueError, RuntimeError) as error:
            yield _describe_refusal(error, "adapter", f"none of rank {rank} (model.lora.rank): ")
            return
        try:
            problem = _try_loss(client, "cross_entropy")
            tried.append(Check("fails", f"client={name}", problem or "works"))
            if not problem:
                yield Check("ok", "adapter", f"rank {rank} of {model}; the key is accepted")
                yield Check("ok", "client", f"client={name} model.base_url={url} model.name={model}")
                yield _losses(client)
                yield from _sampling(client)
                return
        finally:
            close_client(client)  # SkyRL has no call for it
    yield from tried


def _describe_refusal(error: Exception, name: str, said: str) -> Check:
    if "(401)" in str(error) or "(403)" in str(error):
        return Check("fails", "key", f"{error}; give the server's key as TINKER_API_KEY")
    return Check("fails", name, f"{said}{error}")


def _losses(client: TinkerTrainingClient) -> Check:
    """Which losses work, named ones and a KL in two passes."""
    wrong = {name: problem for name in LOSS_SPECS if (problem := _try_loss(client, name))}
    works = ", ".join(name for name in LOSS_SPECS if name not in wrong)
    if not wrong:
        return Check("ok", "losses", works)
    return Check("note", "losses", f"{works}; not {'; '.join(f'{name} ({why})' for name, why in wrong.items())}")


def _try_loss(client: TinkerTrainingClient, loss_fn: str) -> str:
    """What is wrong with a step of this loss on one row; "" if nothing is."""
    spec = LOSS_SPECS[loss_fn]
    values = {"weights": 1.0, "logprobs": -1.0, "advantages": 1.0}
    inputs = {name: TensorData.of([values.get(name, 1.0)] * len(TOKENS)) for name in spec.required}
    row = Datum(ModelInput(TOKENS), {"target_tokens": TensorData.of(TOKENS), **inputs})
    try:
        output = client.forward_backward([row], loss_fn).result()
        client.optim_step(STILL).result()
    except (ValueError, RuntimeError) as error:
        return str(error)
    if loss_fn == "cross_entropy":
        expected = -float(output.loss_fn_outputs[0]["logprobs"].data.sum())
        if not math.isclose(output.metrics["loss:sum"], expected, rel_tol=1e-3):
            return f"loss:sum is {output.metrics['loss:sum']:g} where the sum over tokens is {expected:g}"
    return ""


def _sampling(client: TinkerTrainingClient) -> Iterator[Check]:
    try:
        sampler: Any = client.save_weights_and_get_sampling_client()
        sampler.sample(ModelInput(TOKENS), 1, SamplingParams(max_tokens=2, stop=[], seed=1)).result()
        yield Check("ok", "sampling", "every token with its log-prob")
    except (ValueError, RuntimeError) as error:
        yield Check("fails", "sampling", str(error))
        return
    try:
        sampler.compute_logprobs(ModelInput(TOKENS)).result()
        yield Check("ok", "prompt", "log-probs of prompts, which algorithm.kl_coef needs")
    except (ValueError, RuntimeError) as error:
        yield Check("note", "prompt", str(error))
