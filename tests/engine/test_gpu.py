"""On a GPU: a bf16 step learns, gradients are those of the CPU, and a run's fused AdamW goes on after a resume.

`make test-gpu` runs these alone (RLVR_TEST_GPU=1); every other test hides the devices. No card has run them yet.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.model_loading import build_model, pick_device, pick_dtype
from tests.kit.rounding import assert_gradients_close
from tests.kit.tiny import CONFIGS, data, gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]
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


def test_auto_is_the_gpu_in_bf16_where_it_has_that() -> None:
    device = pick_device("auto")
    assert device.type == "cuda"
    assert (pick_dtype("auto", device) == torch.bfloat16) == torch.cuda.is_bf16_supported()


@SETTINGS
def test_gradients_are_those_of_the_cpu(lora: Any, start: Callable[..., Any]) -> None:
    """In float32, whose products torch does not shorten to TF32 unless told."""
    assert not torch.backends.cuda.matmul.allow_tf32
    one, other = (start(device, "float32", lora) for device in ("cpu", "cuda"))
    for loss in ("cross_entropy", "ppo"):
        outputs = [client.forward_backward(data(), loss).result() for client in (one, other)]
        assert outputs[1].metrics["loss:sum"] == pytest.approx(outputs[0].metrics["loss:sum"], rel=1e-3)
        found = {name: gradient.cpu() for name, gradient in gradients(other).items()}
        assert_gradients_close(found, gradients(one))


@SETTINGS
def test_steps_in_bf16_learn(lora: Any, start: Callable[..., Any]) -> None:
    client, losses = start("cuda", "bfloat16", lora), []
    for _ in range(20):
        losses.append(client.forward_backward(data(), "cross_entropy").result().metrics["loss:sum"])
        assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.device.type == "cuda" for p in client.policy.masters.values())


@SETTINGS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_state_goes_on_as_one_that_never_stopped(lora: Any, dtype: str, start: Callable[..., Any]) -> None:
    """The step after a load is AdamW's third: with moments or a count of its own it would go elsewhere.

    Kernels that add in any order differ by rounding, so both get one gradient; the fused step itself has no sums.
    """
    whole, resumed = (start("cuda", dtype, lora, name) for name in ("whole", "resumed"))
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
