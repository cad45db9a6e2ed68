"""Critics on the engine: the value loss, its gradient, where a critic begins, its checkpoint, and what it refuses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.algorithms.loss_specs import VALUE_SPEC
from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams, Datum
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.losses import value_loss
from rlvr.engine.policy import VALUE_HEAD
from tests.kit.rounding import assert_gradients_close
from tests.kit.tiny import gradients
from tests.kit.value_rows import value_rows

LORA = LoraConfig(rank=4, alpha=8.0)


def test_the_value_loss_by_hand() -> None:
    """w max((V - R)^2, (clip(V) - R)^2) / 2 with V_old = 0.5 and a clip of 0.2.

    V 0.6, R 1: inside the clip, 0.4^2 / 2 = 0.08, slope -0.4. V 1, R 0: the clip would be the smaller, 0.5, slope 1.
    V 1, R 1.5: clipped to 0.7, 0.8^2 / 2 = 0.32, slope 0. Weight 2 doubles, 0 is nothing.
    """
    v = torch.tensor([0.6, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    inputs = {
        "values": torch.full((5,), 0.5, dtype=torch.float64),
        "returns": torch.tensor([1.0, 0.0, 1.5, 0.0, 0.0], dtype=torch.float64),
        "weights": torch.tensor([1.0, 1.0, 1.0, 2.0, 0.0], dtype=torch.float64),
    }
    row = torch.zeros(5, dtype=torch.long)
    terms = value_loss(v, inputs, {"value_clip": 0.2}, row)
    (slopes,) = torch.autograd.grad(terms.sum(), v)
    assert terms.tolist() == pytest.approx([0.08, 0.5, 0.32, 1.0, 0.0])
    assert slopes.tolist() == pytest.approx([-0.4, 1.0, 0.0, 2.0, 0.0])
    free = value_loss(v, inputs, dict(VALUE_SPEC.config), row)
    assert free.tolist() == pytest.approx([0.08, 0.5, 0.125, 1.0, 0.0])
    assert torch.autograd.gradcheck(lambda x: value_loss(x, inputs, {"value_clip": 0.2}, row), (v,))
    assert torch.autograd.gradcheck(lambda x: value_loss(x, inputs, dict(VALUE_SPEC.config), row), (v,))


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma2"])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_values_and_gradients_are_those_of_a_plain_pass(
    kind: str, clip: float | None, client: Callable[..., Any]
) -> None:
    """Packed rows that share a prefix, against one row after another in transformers with a head of our own."""
    critic = client(kind).create_critic()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        head = critic.policy.parameters[VALUE_HEAD]
        head.copy_(torch.randn(head.shape, generator=generator))
    module, weight = copy.deepcopy(critic._engine.model.module), head.detach().clone().requires_grad_()
    config = {} if clip is None else {"value_clip": clip}
    output = critic.forward_backward(value_rows(), "value", config).result()
    total = torch.zeros(())
    for datum, found in zip(value_rows(), output.loss_fn_outputs, strict=True):
        hidden = module.base_model(input_ids=torch.tensor([datum.model_input.tokens])).last_hidden_state[0]
        values = hidden @ weight[0]
        assert found["values"].data == pytest.approx(values.detach().numpy(), abs=1e-4)
        inputs = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
        total = total + value_loss(values, inputs, {**VALUE_SPEC.config, **config}, torch.zeros(len(values))).sum()
    total.backward()
    assert output.metrics == {"loss:sum": pytest.approx(float(total.detach()), rel=1e-4)}
    expected = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    found = gradients(critic)
    outside = {name: grad for name, grad in found.items() if name not in {*expected, VALUE_HEAD}}
    assert all(not grad.any() for grad in outside.values()), "the model's own head is not read"
    assert weight.grad is not None
    assert_gradients_close({n: found[n] for n in (*expected, VALUE_HEAD)}, {**expected, VALUE_HEAD: weight.grad})


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapter"])
def test_a_critic_begins_with_the_policys_weights_and_values_of_zero(lora: Any, client: Callable[..., Any]) -> None:
    """And from there on each is trained without the other."""
    policy = client("qwen3", lora=lora)
    policy.forward_backward([supervised()], "cross_entropy")
    policy.optim_step(AdamParams(0.01))
    before = policy.weights_sha256()
    critic = policy.create_critic()
    own = dict(critic.policy.parameters)
    assert not own.pop(VALUE_HEAD).any()
    assert own.keys() == policy.policy.parameters.keys()
    assert all(torch.equal(p, policy.policy.parameters[name]) for name, p in own.items())
    assert all(not row["values"].data.any() for row in critic.forward(value_rows(), "value").result().loss_fn_outputs)
    for _ in range(3):  # the head first: at zero it hides the others
        critic.forward_backward(value_rows(), "value")
        critic.optim_step(AdamParams(0.01))
    assert policy.weights_sha256() == before
    assert any(not torch.equal(p, policy.policy.parameters[name]) for name, p in own.items())


def supervised() -> Datum:
    return Datum.from_completion([1, 2], [3, 4, 5])


def train_both(policy: LocalTrainingClient, critic: LocalTrainingClient) -> tuple[str, str]:
    """Steps of both in turn; the hashes of their weights."""
    for step in range(3):
        policy.forward_backward([supervised()], "cross_entropy")
        critic.forward_backward(value_rows(seed=step), "value", {"value_clip": 0.2})
        policy.optim_step(AdamParams(0.01))
        critic.optim_step(AdamParams(0.02))
    return policy.weights_sha256(), critic.weights_sha256()


def test_two_adapters_of_one_base_are_bit_equal_to_two_models(client: Callable[..., Any]) -> None:
    """The policy and its critic share a base model; beside them the critic of a policy on a base of its own."""
    policy, alone, other = (client("qwen3", lora=LORA) for _ in range(3))
    together = train_both(policy, policy.create_critic())
    assert together == train_both(alone, other.create_critic())
    assert alone._engine.policies.keys() == {"policy"} and len(policy._engine.policies) == 2


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapter"])
def test_a_saved_critic_goes_on_to_the_bit(lora: Any, client: Callable[..., Any]) -> None:
    """Weights, head and moments: three steps, or two, a save, another critic that loads, and the third."""

    def step(critic: Any, seed: int) -> None:
        critic.forward_backward(value_rows(seed=seed), "value")
        critic.optim_step(AdamParams(0.01))

    whole = client("qwen3", lora=lora).create_critic()
    for seed in range(3):
        step(whole, seed)
    first, second = client("qwen3", lora=lora).create_critic(), client("qwen3", lora=lora).create_critic()
    step(first, 0)
    step(first, 1)
    second.load_state_with_optimizer(first.save_state("critic").result().path)
    step(second, 2)
    assert second.weights_sha256() == whole.weights_sha256()


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapter"])
def test_a_critic_and_a_policy_do_not_load_each_others_checkpoints(lora: Any, client: Callable[..., Any]) -> None:
    policy = client("qwen3", lora=lora)
    critic = policy.create_critic()
    of_policy, of_critic = policy.save_state("policy").result().path, critic.save_state("critic").result().path
    with pytest.raises(ValueError, match=r"holds no value head .*: it is a policy's; load a critic's"):
        critic.load_state_with_optimizer(of_policy)
    with pytest.raises(ValueError, match=r"holds a value head .*: it is a critic's; load a policy's"):
        policy.load_state(of_critic)
    with pytest.raises(ValueError, match="it is a critic's; load a policy's"):
        policy.create_sampling_client(of_critic)
    if lora:
        with pytest.raises(ValueError, match="is a critic's, which predicts values and no tokens; give the policy's"):
            policy._engine.load_snapshot(Path(of_critic))
        targets = json.loads((Path(of_critic) / "adapter_config.json").read_text())["target_modules"]
        assert targets == json.loads((Path(of_policy) / "adapter_config.json").read_text())["target_modules"]


def test_what_a_critic_refuses(client: Callable[..., Any]) -> None:
    """Losses of policies, the value loss of a policy, missing inputs, settings that mean nothing to it."""
    policy = client("qwen3", lora=LORA)
    critic = policy.create_critic()
    with pytest.raises(ValueError, match="'cross_entropy' for the policy 'policy-critic': it is a critic"):
        critic.forward([supervised()])
    with pytest.raises(ValueError, match="'value' for the policy 'policy': it has no value head"):
        policy.forward(value_rows(), "value")
    with pytest.raises(ValueError, match="datum 0 lacks 'values', which value needs"):
        critic.forward_backward([supervised()], "value")
    for config, message in (
        ({"temperature": 0.5}, "temperature has no effect on value; known: value_clip"),
        ({"value_clip": 0.0}, "value_clip 0.0, expected above 0"),
        ({"value_clip": float("nan")}, "value_clip nan, expected above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            critic.forward_backward(value_rows(), "value", config)
    assert critic.policy.version == 0


def test_a_critic_of_low_precision_weights_keeps_its_head_in_fp32(client: Callable[..., Any]) -> None:
    """Values of a bfloat16 model are fp32 numbers, and a saved critic of one loads."""
    critic = client("qwen3", dtype=torch.bfloat16).create_critic()
    critic.forward_backward(value_rows(), "value")
    critic.optim_step(AdamParams(0.01))
    assert critic.policy.parameters[VALUE_HEAD].dtype == torch.float32
    [row, *_] = critic.forward(value_rows(), "value").result().loss_fn_outputs
    assert row["values"].data.dtype == np.float32 and row["values"].data.any()
    before = critic.weights_sha256()
    critic.load_state_with_optimizer(critic.save_state("critic").result().path)
    assert critic.weights_sha256() == before
