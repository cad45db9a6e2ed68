"""Muon: against `torch.optim.Muon`, a singular value decomposition and a step by hand; its state and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlvr.algorithms.optimizers import OptimizerSection
from rlvr.clients.mock.mock_client import MockTrainingClient
from rlvr.clients.mock.tabular_policy import TablePolicy
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.messages import AdamParams, MuonParams
from rlvr.engine import muon
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.muon import hidden_matrices, muon_step, orthogonalize
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from tests.kit.tiny import data


def test_orthogonalized_matrices_have_the_polynomial_of_each_singular_value() -> None:
    """Against U p(S / |S|) V by a singular value decomposition in float64; large values end near 1."""
    torch.manual_seed(0)
    low_rank = torch.randn(2, 40, 3) @ torch.randn(2, 3, 24) + 1e-3 * torch.randn(2, 40, 24)
    for G in (100 * torch.randn(3, 6, 4), torch.randn(3, 4, 6), torch.randn(1, 256, 256), low_rank):
        U, S, Vh = torch.linalg.svd(G.double(), full_matrices=False)
        share = sigma = S / S.norm(dim=-1, keepdim=True)
        for _ in range(5):
            sigma = 3.4445 * sigma - 4.7750 * sigma**3 + 2.0315 * sigma**5
        assert torch.allclose(orthogonalize(G).double(), U * sigma[:, None] @ Vh, atol=2e-3)
        large = sigma[share > 1 / 300]
        assert float(large.min()) > 0.66 and float(large.max()) < 1.21
    assert (orthogonalize(torch.zeros(1, 3, 2)) == 0).all()


def step_all(matrices: dict[str, nn.Parameter], momenta: dict[str, torch.Tensor], **options: float) -> None:
    muon_step(matrices, momenta, transposed=dict.fromkeys(matrices, False), **options)


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
    step_all({"w": matrix}, momenta, learning_rate=0.1, momentum=0.5, weight_decay=0.2)
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
        step_all(ours, momenta, learning_rate=0.05, momentum=0.9, weight_decay=0.1)
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
    step_all({"stack": stack}, {}, learning_rate=0.1, momentum=0.9, weight_decay=0.0)
    step_all(single, {}, learning_rate=0.1, momentum=0.9, weight_decay=0.0)
    assert torch.allclose(stack, torch.stack(list(single.values())), atol=1e-6)


def test_chunks_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stacks and single matrices of one shape, in chunks of two matrices, in place of all ten at once."""
    torch.manual_seed(3)
    shapes = {"a": (3, 4, 6), "b": (5, 4, 6), "c": (4, 6), "d": (4, 6)}
    whole = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    parts = {name: nn.Parameter(p.detach().clone()) for name, p in whole.items()}
    momenta: list[dict[str, torch.Tensor]] = [{}, {}]
    for _ in range(2):
        for name, p in whole.items():
            p.grad = torch.randn(p.shape)
            parts[name].grad = p.grad.clone()
        step_all(whole, momenta[0], learning_rate=0.1, momentum=0.9, weight_decay=0.1)
        with monkeypatch.context() as patch:
            patch.setattr(muon, "CHUNK_BYTES", 2 * 4 * 24)
            step_all(parts, momenta[1], learning_rate=0.1, momentum=0.9, weight_decay=0.1)
    assert all(torch.allclose(p, parts[name], atol=1e-5) for name, p in whole.items())
    assert all(torch.equal(m, momenta[1][name]) for name, m in momenta[0].items())


def test_what_has_no_gradient_stays_as_it_is() -> None:
    """After a real step: no gradient, zeros, and a stack in which one of two experts was reached."""
    torch.manual_seed(4)
    matrices = {"none": nn.Parameter(torch.randn(4, 3)), "zero": nn.Parameter(torch.randn(4, 3))}
    matrices["experts"] = nn.Parameter(torch.randn(2, 4, 3))
    momenta: dict[str, torch.Tensor] = {}
    options = {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    for p in matrices.values():
        p.grad = torch.randn(p.shape)
    step_all(matrices, momenta, **options)
    before = {name: p.detach().clone() for name, p in matrices.items()}
    buffers = {name: m.clone() for name, m in momenta.items()}
    matrices["none"].grad, matrices["zero"].grad = None, torch.zeros(4, 3)
    matrices["experts"].grad = torch.stack([torch.zeros(4, 3), torch.ones(4, 3)])
    step_all(matrices, momenta, **options)
    for name in ("none", "zero"):
        assert torch.equal(matrices[name], before[name]) and torch.equal(momenta[name], buffers[name])
    moved = [not torch.equal(p, q) for p, q in zip(matrices["experts"], before["experts"], strict=True)]
    assert moved == [False, True]


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_the_output_and_vectors_stay_with_adamw(tied: bool) -> None:
    """GPT-2 stores its matrices as [in, out]: there the wider output is the second size."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=9, n_positions=8, n_embd=4, n_layer=1, n_head=1, tie_word_embeddings=tied)
    model, block = GPT2LMHeadModel(config), "transformer.h.0."
    names = hidden_matrices(model)
    assert names == {f"{block}{n}.weight": True for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    weight = dict(model.named_parameters())[f"{block}mlp.c_fc.weight"]
    assert weight.shape == (4, 16)
    plain = nn.Parameter(weight.detach().T.clone())
    weight.grad = torch.randn(4, 16)
    plain.grad = weight.grad.T.clone()
    options = {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    muon_step({"w": weight}, {}, transposed={"w": True}, **options)
    step_all({"w": plain}, {}, **options)
    assert torch.allclose(weight, plain.T, atol=1e-5)


def test_experts_are_stepped_and_their_biases_and_routers_are_not() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GptOssConfig(vocab_size=9, num_key_value_heads=1, head_dim=8, num_local_experts=4, **small)
    names = hidden_matrices(GptOssForCausalLM(config))
    layer = "model.layers.0."
    assert names == {
        **{f"{layer}self_attn.{n}_proj.weight": False for n in "qkvo"},
        **{f"{layer}mlp.experts.{n}_proj": True for n in ("gate_up", "down")},
    }


TOY = """
client: mock
env: {name: toy}
reward: {kwargs: {keywords: [answer]}}
rollout: {max_tokens: 8}
model: {tokenizer: words, config: {model_type: gpt2, n_embd: 8, n_layer: 1, n_head: 1, n_positions: 32}}
training: {steps: 1}
"""
MUON, RATE = "training.optimizer.name=muon", "training.optimizer.matrix_learning_rate=0.01"
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
    assert resumed.policy.momenta.keys() == resumed.policy.matrices.keys() == unbroken.policy.matrices.keys()
    for _ in range(3):
        learn(resumed)
    assert resumed.policy.sha256() == unbroken.policy.sha256()
    resumed.load_state(path).result()
    assert not resumed.policy.momenta


def test_matrices_take_the_step_of_muon_and_the_rest_that_of_adamw(client: Callable[..., Any]) -> None:
    """One step from the same weights with AdamW: equal in all weights that are not matrices."""
    ours, adam = client("qwen3", name="muon"), client("qwen3", name="adam")
    learn(ours)
    learn(adam, AdamParams(0.01, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0))
    theirs = adam.policy.parameters
    differ = {name for name, p in ours.policy.parameters.items() if not torch.equal(p, theirs[name])}
    assert differ == set(ours.policy.matrices) < set(theirs)


def test_a_change_of_optimizer_leaves_no_state_of_the_other_and_is_resumed_to_the_bit(
    client: Callable[..., Any],
) -> None:
    """AdamW, Muon, a checkpoint, Muon, AdamW; beside a policy that goes on from the checkpoint."""
    adam = AdamParams(0.01, eps=1e-8)
    unbroken = client("qwen3", name="unbroken")
    learn(unbroken, adam)
    learn(unbroken)
    stepped = {name for name, p in unbroken.policy.masters.items() if unbroken.policy.optimizer.state.get(p)}
    assert not stepped & set(unbroken.policy.matrices) and stepped
    path = unbroken.save_state("two").result().path
    resumed = client("qwen3", name="resumed", seed=99)
    resumed.load_state_with_optimizer(path).result()
    for trainer in (unbroken, resumed):
        learn(trainer)
        learn(trainer, adam)
        assert not trainer.policy.momenta
    assert resumed.policy.sha256() == unbroken.policy.sha256()


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
        ([MUON], "name=muon needs matrix_learning_rate"),
        ([MUON, RATE], "training.optimizer.name=muon is not supported by client=mock, which has AdamW; use training"),
        (["sft.optimizer={name: muon, matrix_learning_rate: 0.1}", "sft.steps=3"], "sft.optimizer.name=muon is not"),
        ([MUON, RATE, "client=local", "model.lora.rank=4"], "with model.lora: Muon is for whole"),
        (["training.optimizer.name=sgd"], "name='sgd' is unknown; known: adamw, muon"),
        (["training.optimizer.momentum=1"], "momentum=1.*expected 0 to below 1"),
        (["training.optimizer.matrix_learning_rate=0"], "matrix_learning_rate=0.*expected a number above 0"),
    ],
)
def test_configs_that_cannot_be(words: list[str], message: str, tmp_path: Path) -> None:
    (file := tmp_path / "toy.yaml").write_text(TOY)
    with pytest.raises(ValueError, match=message):
        config = build_config(load(None, str(file), words))
        plan(assemble(config))


def test_the_schedule_scales_both_rates() -> None:
    schedule = OptimizerSection(
        learning_rate=1.0, warmup_steps=1, decay="linear", name="muon", matrix_learning_rate=10.0, momentum=0.7
    )
    steps = [schedule.variant.at(step, 5) for step in range(5)]
    assert all(isinstance(p, MuonParams) and p.momentum == 0.7 for p in steps)
    assert np.allclose([p.learning_rate for p in steps], [0.5, 1.0, 0.75, 0.5, 0.25])
    assert np.allclose([vars(p)["matrix_learning_rate"] for p in steps], [5.0, 10.0, 7.5, 5.0, 2.5])
    assert type(OptimizerSection().variant.at(0, 5)) is AdamParams


def test_the_plan_names_the_optimizer_in_effect() -> None:
    both = OptimizerSection(learning_rate=0.1, name="muon", matrix_learning_rate=0.2)
    assert str(both.variant) == "Muon at 0.2 for matrices, AdamW at 0.1 for the rest"
    assert str(replace(both, name="adamw").variant) == "AdamW at 0.1"
