"""Adapters: start as the base, learn alone, share batches, and load in peft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams, ModelInput
from rlvr.engine.engine_options import LoraConfig
from tests.kit.devices import ON_DEVICES, WITH_A_GPU
from tests.kit.rounding import close_logprobs
from tests.kit.tiny import PROMPTS, assert_gradients_of_peft, data, gradients, params, plain_logprobs, texts

KINDS = ["qwen3", "llama", "gpt2"]
LORA = LoraConfig(rank=4, alpha=8.0)


def train(trainer: Any, steps: int = 2, seed: int = 0, rate: float = 5e-2) -> None:
    for step in range(steps):
        trainer.forward_backward(data(seed=seed + step), "cross_entropy")
        trainer.optim_step(AdamParams(rate))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_is_the_base_model_exactly(kind: str, client: Callable[..., Any]) -> None:
    """B is zero: log-probs equal those of the model without adapter to the bit; every linear layer has one."""
    base, adapted = client(kind, name="base"), client(kind, name="adapter", lora=LORA)
    one, other = (t.forward(data(), "ppo").result().loss_fn_outputs for t in (base, adapted))
    assert [o["logprobs"].tolist() for o in one] == [o["logprobs"].tolist() for o in other]
    layers = {"qwen3": 7, "llama": 7, "gpt2": 4}[kind]
    assert len(adapted.policy.parameters) == 2 * 2 * layers
    assert all(p.dtype == torch.float32 for p in adapted.policy.parameters.values())


@WITH_A_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_loads_in_peft(kind: str, client: Callable[..., Any], pristine: Callable[..., Any]) -> None:
    """After training, PeftModel on the base model gives the same log-probs within 1e-5."""
    import copy

    from peft import PeftModel

    trainer = client(kind, lora=LORA)
    before = trainer.create_sampling_client().compute_logprobs(ModelInput([1, 2, 3, 4])).result()
    train(trainer)
    path = trainer.save_weights_for_sampler("a").result().path
    ours = trainer.create_sampling_client().compute_logprobs(ModelInput([1, 2, 3, 4])).result()
    assert max(abs(a - b) for a, b in zip(ours[1:], before[1:], strict=True)) > 0.05
    theirs = PeftModel.from_pretrained(copy.deepcopy(pristine(kind).module), path, torch_device="cpu").eval()
    assert ours[1:] == close_logprobs(plain_logprobs(theirs, [1], [2, 3, 4]))
    assert sorted(p.name for p in Path(path).iterdir() if p.suffix == ".safetensors") == ["adapter_model.safetensors"]


@ON_DEVICES
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mistral"])
def test_two_adapters_in_one_batch_give_the_results_of_each_alone(
    kind: str, fresh: Callable[..., Any], tmp_path: Path, device: str
) -> None:
    """Rows are routed one by one: tokens as alone, log-probs within 1e-5; so for a frozen older snapshot too."""
    engine = fresh(kind, device=device)
    trainers = [
        LocalTrainingClient(engine, engine.create_policy(n, lora=LORA, seed=i), tmp_path) for i, n in enumerate("ab")
    ]
    for i, trainer in enumerate(trainers):
        train(trainer, seed=10 * i)
    samplers = [t.create_sampling_client() for t in trainers]
    train(trainers[0], 1)
    samplers.append(trainers[0].create_sampling_client())

    def ask(which: int) -> Any:
        return samplers[which].sample(ModelInput(PROMPTS[which]), 2, params(which, 8))

    alone = [ask(i).result() for i in range(3)]
    together = [f.result() for f in [ask(i) for i in range(3)]]
    for one, other in zip(alone, together, strict=True):
        assert texts(one) == texts(other)
        assert one.fingerprint == other.fingerprint
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert a.logprobs == close_logprobs(b.logprobs)
    assert len({r.fingerprint for r in alone}) == 3


@ON_DEVICES
def test_gradients_reach_only_the_adapter_that_is_trained(
    fresh: Callable[..., Any], tmp_path: Path, device: str
) -> None:
    """Not its neighbour, not the base; and a step of one leaves the other's weights and answers alone."""
    engine = fresh("qwen3", device=device)
    a, b = (LocalTrainingClient(engine, engine.create_policy(n, lora=LORA), tmp_path) for n in "ab")
    base = {k: p.detach().clone() for k, p in engine.model.parameters().items()}
    answers = b.create_sampling_client().compute_logprobs(ModelInput([1, 2, 3])).result()
    before = b.policy.sha256()
    a.forward_backward(data(), "ppo")
    assert len(gradients(a)) == len(a.policy.parameters)
    assert not gradients(b)
    assert all(p.grad is None for p in engine.model.parameters().values())
    a.optim_step(AdamParams(1e-2))
    assert b.policy.sha256() == before
    assert b.create_sampling_client().compute_logprobs(ModelInput([1, 2, 3])).result() == answers
    assert all(torch.equal(p, base[k]) for k, p in engine.model.parameters().items())


@ON_DEVICES
def test_the_adapters_gradient_equals_pefts(
    client: Callable[..., Any], pristine: Callable[..., Any], tmp_path: Path
) -> None:
    """Cross-entropy through peft's own layers, after a step that made B non-zero."""
    import copy

    trainer = client("llama", lora=LORA)
    train(trainer, 1)
    path = trainer.save_weights_for_sampler("a").result().path
    assert_gradients_of_peft(trainer, copy.deepcopy(pristine("llama").module), path)


def test_targets_choose_layers_and_unknown_ones_are_named(fresh: Callable[..., Any]) -> None:
    """Two names adapt two layers a block; a misspelled one lists what there is."""
    engine = fresh("llama")
    policy = engine.create_policy("p", lora=LoraConfig(2, 2.0, ("q_proj", "v_proj")))
    assert {n.split(".")[-3] for n in policy.parameters} == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match=r"q_porj not among .*: down_proj, gate_proj"):
        engine.create_policy("q", lora=LoraConfig(2, 2.0, ("q_porj",)))
    with pytest.raises(ValueError, match="lora: rank=0"):
        LoraConfig(0)


def test_full_fine_tuning_shares_no_engine(fresh: Callable[..., Any]) -> None:
    """It changes the base under every adapter; and a name is given once."""
    engine = fresh("qwen3")
    engine.create_policy("a", lora=LORA)
    with pytest.raises(ValueError, match="cannot share an engine"):
        engine.create_policy("full")
    with pytest.raises(ValueError, match="exists already"):
        engine.create_policy("a", lora=LORA)
