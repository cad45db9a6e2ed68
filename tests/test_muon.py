"""Muon: against `torch.optim.Muon`, a singular value decomposition and a step by hand; its state and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import data
from torch import nn

from rlvr.clients.mock.mock_client import MockTrainingClient
from rlvr.clients.mock.tabular_policy import TablePolicy
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.config.build_run import build_source, plan
from rlvr.core.messages import AdamParams, MuonParams
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.muon import hidden_matrices, muon_step, orthogonalize
from rlvr.training.training_options import LearningRateSchedule


def test_orthogonalized_matrices_keep_directions_and_lose_scale() -> None:
    """Against U V of the singular value decomposition: the same directions, singular values near 1."""
    torch.manual_seed(0)
    for shape in ((6, 4), (4, 6), (5, 5)):
        G = torch.randn(3, *shape) * 100
        U, _, Vh = torch.linalg.svd(G, full_matrices=False)
        inner = U.mT @ orthogonalize(G) @ Vh.mT  # diagonal where the directions are those of G
        diagonal = inner.diagonal(dim1=-2, dim2=-1)
        assert torch.allclose(inner, torch.diag_embed(diagonal), atol=1e-3)
        assert float(diagonal.min()) > 0.6 and float(diagonal.max()) < 1.2
    assert (orthogonalize(torch.zeros(1, 3, 2)) == 0).all()


def test_a_step_by_hand() -> None:
    """A matrix [2, 1]: its only singular value 5 becomes sigma, the step is rate x sqrt(2 / 1) x sigma x (3, 4) / 5.

    sigma is five rounds of 3.4445 s - 4.775 s^3 + 2.0315 s^5 from s = 1, computed here in Python floats. Momentum 0.5
    with Nesterov, first step: buffer = g / 2, update = (g + buffer) / 2 = 3 g / 4, of the same direction.
    """
    sigma = 1.0
    for _ in range(5):
        sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
    matrix = nn.Parameter(torch.tensor([[1.0], [1.0]]))
    matrix.grad = torch.tensor([[3.0], [4.0]])
    momenta: dict[str, torch.Tensor] = {}
    muon_step({"w": matrix}, momenta, learning_rate=0.1, momentum=0.5, weight_decay=0.2)
    step = 0.1 * 2**0.5 * sigma
    assert matrix.flatten().tolist() == pytest.approx([0.98 - step * 0.6, 0.98 - step * 0.8], rel=1e-5)
    assert momenta["w"].flatten().tolist() == [1.5, 2.0]


def test_steps_are_those_of_torch() -> None:
    """Five steps beside `torch.optim.Muon`, which multiplies in bfloat16: equal to its rounding."""
    torch.manual_seed(1)
    ours = {f"m{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate(((8, 8), (24, 8), (8, 24), (8, 8)))}
    theirs = [nn.Parameter(p.detach().clone()) for p in ours.values()]
    start = [p.detach().clone() for p in theirs]
    optimizer = torch.optim.Muon(theirs, lr=0.05, momentum=0.9, weight_decay=0.1)
    momenta: dict[str, torch.Tensor] = {}
    for _ in range(5):
        for p, q in zip(ours.values(), theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        muon_step(ours, momenta, learning_rate=0.05, momentum=0.9, weight_decay=0.1)
        optimizer.step()
    for p, q, first in zip(ours.values(), theirs, start, strict=True):
        # bfloat16 has 8 bits, so 0.4 % in each of the fifteen products.
        assert float((p - q).detach().norm()) < 0.03 * float((q - first).detach().norm())


def test_a_stack_of_matrices_is_stepped_one_by_one() -> None:
    """The experts of a mixture lie in one tensor [E, M, N]; each takes the step that it would take alone."""
    torch.manual_seed(2)
    stack = nn.Parameter(torch.randn(3, 4, 6))
    stack.grad = torch.randn(3, 4, 6)
    single = {str(i): nn.Parameter(stack[i].detach().clone()) for i in range(3)}
    for i, p in single.items():
        p.grad = stack.grad[int(i)].clone()
    muon_step({"stack": stack}, {}, learning_rate=0.1, momentum=0.9, weight_decay=0.0)
    muon_step(single, {}, learning_rate=0.1, momentum=0.9, weight_decay=0.0)
    assert torch.allclose(stack, torch.stack(list(single.values())), atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_the_output_and_vectors_stay_with_adamw(tied: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=9, n_positions=8, n_embd=4, n_layer=1, n_head=1, tie_word_embeddings=tied)
    names = hidden_matrices(GPT2LMHeadModel(config))
    block = "transformer.h.0."
    assert names == {block + n + ".weight" for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}


TOY = """
client: mock
env: {name: toy}
reward: {kwargs: {keywords: [answer]}}
rollout: {max_tokens: 8}
model: {tokenizer: words, config: {model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 1, n_positions: 32}}
training: {steps: 1}
"""
PARAMS = MuonParams(0.01, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0, matrix_learning_rate=0.05, momentum=0.8)


def learn(trainer: Any, adam: AdamParams = PARAMS) -> float:
    output = trainer.forward_backward(data(), "cross_entropy").result()
    trainer.optim_step(adam).result()
    return output.metrics["loss:sum"]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_policy_learns_and_goes_on_from_its_checkpoint_to_the_bit(client: Callable[..., Any], dtype: Any) -> None:
    """Six steps, or three, a checkpoint, another policy and three more: the same weights. And the loss falls."""
    unbroken = client("qwen3", name="unbroken", dtype=dtype)
    losses = [learn(unbroken) for _ in range(3)]
    path = unbroken.save_state("three").result().path
    losses += [learn(unbroken) for _ in range(3)]
    assert losses[-1] < 0.8 * losses[0]
    resumed = client("qwen3", name="resumed", dtype=dtype, seed=99)
    learn(resumed)  # something to be replaced
    resumed.load_state_with_optimizer(path).result()
    assert resumed.policy.momenta.keys() == resumed.policy.matrices == unbroken.policy.matrices
    for _ in range(3):
        learn(resumed)
    assert resumed.policy.sha256() == unbroken.policy.sha256()
    resumed.load_state(path).result()
    assert not resumed.policy.momenta


def test_matrices_take_the_step_of_muon_and_the_rest_that_of_adamw(client: Callable[..., Any]) -> None:
    """One step from the same weights with AdamW: equal in all weights that are not matrices."""
    muon, adam = client("qwen3", name="muon"), client("qwen3", name="adam")
    learn(muon)
    learn(adam, AdamParams(0.01, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0))
    theirs = adam.policy.parameters
    differ = {name for name, p in muon.policy.parameters.items() if not torch.equal(p, theirs[name])}
    assert differ == muon.policy.matrices < set(theirs)


def test_a_checkpoint_whose_momentum_does_not_fit_is_refused(client: Callable[..., Any]) -> None:
    trainer = client("qwen3")
    learn(trainer)
    name = sorted(trainer.policy.matrices)[0]
    trainer.policy.momenta[name] = torch.zeros(1, 1)
    path = trainer.save_state("wrong").result().path
    with pytest.raises(ValueError, match=rf"optimizer.safetensors has no momentum\.{name} of shape"):
        trainer.load_state_with_optimizer(path).result()


def test_an_adapter_refuses_muon(client: Callable[..., Any]) -> None:
    trainer = client("qwen3", lora=LoraConfig(rank=2))
    with pytest.raises(ValueError, match="whole weight matrices, and the factors of one are not: use AdamParams"):
        learn(trainer)


def test_a_client_without_muon_says_so() -> None:
    client = MockTrainingClient(TablePolicy(["a", "b"]))
    with pytest.raises(ValueError, match="client=mock has no Muon, its optimizer is AdamW; use AdamParams"):
        client.optim_step(PARAMS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["training.optimizer.name=muon"],
            "training.optimizer.name=muon is not supported by client=mock, which has AdamW; use training",
        ),
        (["sft.optimizer.name=muon", "sft.steps=3"], "sft.optimizer.name=muon is not supported by client=mock"),
        (["training.optimizer.name=muon", "client=local", "model.lora.rank=4"], "with model.lora: Muon is for whole"),
        (["training.optimizer.name=sgd"], "name='sgd'; expected adamw or muon"),
        (["training.optimizer.momentum=1"], "momentum=1.*expected 0 to below 1"),
        (["training.optimizer.matrix_learning_rate=0"], "matrix_learning_rate=0.*expected a number above 0"),
    ],
)
def test_configs_that_cannot_be(words: list[str], message: str, tmp_path: Path) -> None:
    (file := tmp_path / "toy.yaml").write_text(TOY)
    with pytest.raises(ValueError, match=message):
        config = build_config(load(None, str(file), words))
        plan(config, build_source(config))


def test_the_schedule_scales_both_rates() -> None:
    schedule = LearningRateSchedule(
        learning_rate=1.0, warmup_steps=1, decay="linear", name="muon", matrix_learning_rate=10.0, momentum=0.7
    )
    steps = [schedule.at(step, 5) for step in range(5)]
    assert all(isinstance(p, MuonParams) and p.momentum == 0.7 for p in steps)
    assert np.allclose([p.learning_rate for p in steps], [0.5, 1.0, 0.75, 0.5, 0.25])
    assert np.allclose([vars(p)["matrix_learning_rate"] for p in steps], [5.0, 10.0, 7.5, 5.0, 2.5])
    assert type(LearningRateSchedule().at(0, 5)) is AdamParams
