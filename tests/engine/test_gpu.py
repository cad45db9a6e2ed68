"""A GPU beside the processor: equal gradients, bf16 steps that learn, a fused AdamW and a run that go on after a stop.

On a pretended one everywhere, and where `make test-gpu` runs on a real one (RLVR_TEST_GPU=1), which no card has yet.
Other files run their tests there too: those with `ON_DEVICES` (`tests/kit/devices.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams, Datum, ModelInput
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.model_loading import build_model, pick_device, pick_dtype
from tests.kit.devices import ON_DEVICES, ON_GPUS
from tests.kit.rounding import assert_gradients_close
from tests.kit.tiny import CONFIGS, PROMPTS, data, gradients, params
from tests.kit.tiny_run import TINY, RunKilled, attempt, stored_steps

ADAM = AdamParams(1e-2)
SETTINGS = pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["all weights", "adapter"])


@pytest.fixture
def start(tokenizer: Any, tmp_path: Path) -> Callable[..., LocalTrainingClient]:
    """A client on a tiny model of the same weights, on any device and in any dtype."""

    def make(device: str, dtype: str, lora: Any = None, name: str = "policy") -> LocalTrainingClient:
        config = {**CONFIGS["qwen3"], "initializer_range": 0.2}
        engine = Engine(build_model(config, tokenizer, seed=1, device=device, dtype=dtype), EngineLimits())
        return LocalTrainingClient(engine, engine.create_policy(name, lora=lora), tmp_path / f"{device}-{name}")

    return make


@ON_GPUS
def test_auto_is_the_gpu_in_bf16_where_it_has_that(device: str) -> None:
    found = pick_device("auto")
    assert found.type == device
    assert (pick_dtype("auto", found) == torch.bfloat16) == torch.cuda.is_bf16_supported()


@ON_GPUS
@SETTINGS
def test_gradients_are_those_of_the_cpu(lora: Any, start: Callable[..., Any], device: str) -> None:
    """In float32, whose products torch does not shorten to TF32 unless told."""
    assert not torch.backends.cuda.matmul.allow_tf32
    one, other = (start(where, "float32", lora) for where in ("cpu", device))
    for loss in ("cross_entropy", "ppo"):
        outputs = [client.forward_backward(data(), loss).result() for client in (one, other)]
        assert outputs[1].metrics["loss:sum"] == pytest.approx(outputs[0].metrics["loss:sum"], rel=1e-3)
        found = {name: gradient.cpu() for name, gradient in gradients(other).items()}
        assert_gradients_close(found, gradients(one))


@ON_GPUS
@SETTINGS
def test_steps_in_bf16_learn(lora: Any, start: Callable[..., Any], device: str) -> None:
    client, losses = start(device, "bfloat16", lora), []
    for _ in range(20):
        losses.append(client.forward_backward(data(), "cross_entropy").result().metrics["loss:sum"])
        assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.device.type == device for p in client.policy.masters.values())


@ON_GPUS
@SETTINGS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_state_goes_on_as_one_that_never_stopped(
    lora: Any, dtype: str, start: Callable[..., Any], device: str
) -> None:
    """The step after a load is AdamW's third: with moments or a count of its own it would go elsewhere.

    Kernels that add in any order differ by rounding, so both get one gradient; the fused step itself has no sums.
    """
    whole, resumed = (start(device, dtype, lora, name) for name in ("whole", "resumed"))
    for seed in range(2):
        whole.forward_backward(data(seed=seed), "ppo").result()
        whole.optim_step(ADAM).result()
    resumed.load_state_with_optimizer(whole.save_state("half").result().path).result()
    for client in (whole, resumed):
        client.forward_backward(data(seed=2), "ppo").result()
    for name, master in resumed.policy.masters.items():
        master.grad = whole.policy.masters[name].grad.clone()
    for client in (whole, resumed):
        client.optim_step(ADAM).result()
    for name, master in resumed.policy.masters.items():
        assert torch.equal(master, whole.policy.masters[name]), name
        assert resumed.policy.optimizer.state[master]["step"].device == master.device


@ON_DEVICES
@SETTINGS
def test_sampler_and_trainer_are_apart_by_the_rounding_of_bf16(
    lora: Any, start: Callable[..., Any], device: str
) -> None:
    """The mean gap of their log-probs after a step that moved the weights, with prompts that rows share."""
    client = start(device, "bfloat16", lora)
    client.forward_backward(data(), "cross_entropy").result()
    client.optim_step(ADAM).result()
    sampler, gaps = client.create_sampling_client(), list[float]()
    for i, prompt in enumerate([*PROMPTS[1:3], [t % 15 for t in range(40)]]):
        for sequence in sampler.sample(ModelInput(prompt), 4, params(i, tokens=8)).result().sequences:
            datum = Datum.from_completion(prompt, sequence.tokens)
            scored = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
            gaps += [abs(a - b) for a, b in zip(sequence.logprobs, scored[len(prompt) - 1 :], strict=True)]
    # A log-prob of -4 has a rounding of 0.008 in bf16; a pass has some more. Other weights are apart by 0.5.
    assert sum(gaps) / len(gaps) < 0.03 and max(gaps) < 0.3


@pytest.mark.slow
@ON_GPUS
def test_a_run_that_is_killed_goes_on(device: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """To its end; and on the pretended device to the bits of a run that was not killed."""
    words = [f"model.device={device}", "model.dtype=float32", f"run.root={tmp_path}"]
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    with pytest.raises(RunKilled):
        attempt(str(file), *words, "run.name=killed", killed_at=2)
    attempt(str(file), *words, "run.name=killed")
    attempt(str(file), *words, "run.name=whole")
    resumed, whole = (stored_steps(tmp_path / name) for name in ("killed", "whole"))
    assert [row["phase"] for row in resumed] == [row["phase"] for row in whole]
    if "pretended" in request.node.name:
        assert resumed == whole
