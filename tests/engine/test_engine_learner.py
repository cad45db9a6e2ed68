"""Losses and gradients of the engine: against plain torch, split against whole, guards, and AdamW."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlvr.core.messages import AdamParams, Datum, ModelInput, NonFiniteError, TensorData
from tests.kit.devices import ON_DEVICES, WITH_A_GPU
from tests.kit.rounding import assert_gradients_close, close_logprobs, close_loss
from tests.kit.tiny import LENGTHS, data, gradients, with_inputs

TERMS = [4.0] * sum(LENGTHS)  # a log-prob of a tiny model is about -4, a factor (advantage, weight) about 1
ALL = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]


@WITH_A_GPU
@pytest.mark.parametrize("loss", ALL)
def test_micro_batches_change_no_gradient(loss: str, client: Callable[..., Any]) -> None:
    """One row at a time, ten tokens at a time, or all together: loss, gradient and log-probs up to rounding."""
    found = []
    for i, micro in enumerate((1, 10, 10_000)):
        trainer = client("qwen3", name=str(i), micro_tokens=micro)
        output = trainer.forward_backward(data(), loss).result()
        found.append((output, gradients(trainer)))
    whole, whole_grads = found[-1]
    for output, grads in found[:-1]:
        assert_gradients_close(grads, whole_grads)
        assert output.metrics["loss:sum"] == close_loss(whole.metrics["loss:sum"], TERMS)
        for row, expected in zip(output.loss_fn_outputs, whole.loss_fn_outputs, strict=True):
            assert row["logprobs"].tolist() == close_logprobs(expected["logprobs"].tolist())
    assert [o["logprobs"].shape for o in whole.loss_fn_outputs] == [[n] for n in LENGTHS]


@ON_DEVICES
@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_chunked_log_probs_change_no_gradient(kind: str, client: Callable[..., Any]) -> None:
    """Logits of one token at a time against all at once, also where the head cannot be split off."""
    small, large = client(kind, name="a", logit_elements=1), client(kind, name="b")
    results = [t.forward_backward(data(), "ppo").result().metrics["loss:sum"] for t in (small, large)]
    assert results[0] == close_loss(results[1], TERMS)
    assert_gradients_close(gradients(small), gradients(large))


@WITH_A_GPU
def test_gradients_accumulate_over_calls(client: Callable[..., Any]) -> None:
    """Two calls add up to one call with all rows; forward() in between adds nothing."""
    twice, once = client("llama", name="a"), client("llama", name="b")
    twice.forward_backward(data()[:2], "ppo")
    twice.forward(data(), "ppo")
    twice.forward_backward(data()[2:], "ppo")
    once.forward_backward(data(), "ppo")
    assert_gradients_close(gradients(twice), gradients(once))


def test_forward_gives_the_same_numbers_and_no_gradient(client: Callable[..., Any]) -> None:
    """Loss and log-probs of forward_backward, without any .grad."""
    trainer = client("qwen3")
    seen = trainer.forward(data(), "ppo").result()
    assert not gradients(trainer)
    learned = trainer.forward_backward(data(), "ppo").result()
    assert seen.metrics == learned.metrics
    assert [o["logprobs"].tolist() for o in seen.loss_fn_outputs] == [
        o["logprobs"].tolist() for o in learned.loss_fn_outputs
    ]


@ON_DEVICES
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "mistral", "gemma2"])
def test_the_gradient_of_ppo_equals_plain_torch(kind: str, client: Callable[..., Any]) -> None:
    """Row by row through the transformers model, softmax at T = 0.7, Schulman's formula written out, autograd."""
    trainer = client(kind)
    module = copy.deepcopy(trainer._engine.model.module).cpu()
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28, "temperature": 0.7}
    total = torch.zeros(())
    for row in data():
        logits = module(input_ids=torch.tensor([row.model_input.tokens])).logits[0].float() / 0.7
        inputs = {k: v.to_torch() for k, v in row.loss_fn_inputs.items()}
        p = logits.log_softmax(-1)[torch.arange(len(logits)), inputs["target_tokens"]]
        ratio, a = (p - inputs["logprobs"]).exp(), inputs["advantages"]
        bad = ((a > 0) & (ratio > 1.28)) | ((a < 0) & (ratio < 0.8))
        limit = torch.where(a > 0, 1.28, 0.8)
        total = total - torch.where(bad, limit * a, ratio * a).sum()
    total.backward()
    output = trainer.forward_backward(data(), "ppo", config).result()
    assert output.metrics["loss:sum"] == close_loss(float(total.detach()), TERMS)
    plain = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    assert_gradients_close({name: g.cpu() for name, g in gradients(trainer).items()}, plain)


@ON_DEVICES
def test_a_custom_loss_gives_the_gradient_of_the_named_one(client: Callable[..., Any]) -> None:
    """importance_sampling written by the caller over log-probs: same gradient; its loss and metrics come back."""
    named, custom = client("qwen3", name="a"), client("qwen3", name="b")
    expected = named.forward_backward(data(), "importance_sampling").result()

    def loss(rows: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = torch.zeros(())
        for row, p in zip(rows, logprobs, strict=True):
            inputs = {k: v.to_torch() for k, v in row.loss_fn_inputs.items()}
            total = total - ((p - inputs["logprobs"]).exp() * inputs["advantages"]).sum()
        return total, {"mine": 3.0}

    got = custom.forward_backward_custom(data(), loss).result()
    assert_gradients_close(gradients(custom), gradients(named))
    assert got.metrics["loss:sum"] == close_loss(expected.metrics["loss:sum"], TERMS)
    assert got.metrics["mine"] == 3.0
    assert "surrogate_loss:sum" in got.metrics
    assert got.loss_fn_outputs[1]["logprobs"].shape == [9]


def test_a_custom_loss_that_is_nan_stops_before_any_gradient(client: Callable[..., Any]) -> None:
    """The rows whose gradient is nan are named, and nothing was accumulated."""
    trainer = client("qwen3")

    def loss(rows: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return logprobs[0].sum() + (logprobs[1] * math.nan).sum(), {}

    with pytest.raises(NonFiniteError) as caught:
        trainer.forward_backward_custom(data(), loss)
    assert caught.value.rows == [1]
    assert not gradients(trainer)


# Validation


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda d: Datum(ModelInput([]), d.loss_fn_inputs), r"datum 1 has 0 tokens"),
        (lambda d: Datum(ModelInput([1] * 257), d.loss_fn_inputs), r"datum 1 has 257 tokens; expected 1 to 256"),
        (
            lambda d: Datum(d.model_input, {"target_tokens": d.loss_fn_inputs["target_tokens"]}),
            r"datum 1 lacks 'logprobs'",
        ),
        (
            lambda d: with_inputs(d, advantages=TensorData.of([1.0])),
            r"datum 1: advantages has shape \[1\], expected \[9\]",
        ),
        (lambda d: with_inputs(d, logprobs=TensorData.of([math.nan] * 9)), r"datum 1: logprobs holds nan"),
        (
            lambda d: with_inputs(d, target_tokens=TensorData.of([17] * 9)),
            r"datum 1 holds token 17, outside the vocabulary",
        ),
        (lambda d: with_inputs(d, target_tokens=TensorData.of([-1] * 9)), r"datum 1 holds token -1"),
        (lambda d: with_inputs(d, target_tokens=TensorData.of([1.0] * 9)), r"datum 1: target_tokens are float32"),
        (lambda d: Datum(ModelInput([99] * 9), d.loss_fn_inputs), r"datum 1 holds token 99"),
    ],
)
def test_a_wrong_datum_is_named(wrong: Callable[[Datum], Datum], message: str, client: Callable[..., Any]) -> None:
    """Which datum, what is wrong with it, what was expected; no gradient is touched."""
    trainer = client("qwen3")
    rows = data()
    rows[1] = wrong(rows[1])
    with pytest.raises(ValueError, match=message):
        trainer.forward_backward(rows, "ppo")
    assert not gradients(trainer)


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("pppo", None, "loss_fn 'pppo' is unknown; known: cross_entropy"),
        ("importance_sampling", {"beta": 1.0}, "beta has no effect on importance_sampling"),
        ("ppo", {"temperature": 0.0}, "temperature 0.0"),
    ],
)
def test_a_wrong_loss_or_setting_is_named(loss: str, config: Any, message: str, client: Callable[..., Any]) -> None:
    """Unknown names, settings without effect, a temperature one cannot train at."""
    with pytest.raises(ValueError, match=message):
        client("qwen3").forward_backward(data(), loss, config)


def test_no_data_and_no_gradients_are_said(client: Callable[..., Any]) -> None:
    """An empty call, and a step before any forward_backward."""
    trainer = client("qwen3")
    with pytest.raises(ValueError, match="data is empty"):
        trainer.forward_backward([], "ppo")
    with pytest.raises(ValueError, match="no gradients were accumulated"):
        trainer.optim_step(AdamParams())


# Guards


@ON_DEVICES
def test_nan_weights_stop_the_call_and_keep_accumulated_gradients(client: Callable[..., Any]) -> None:
    """A nan that reaches some rows: those are named; weights and the gradients of earlier calls are as before."""
    trainer = client("llama")
    trainer.forward_backward(data(), "ppo")
    before, weights = gradients(trainer), trainer.policy.sha256()
    embedding = trainer.policy.parameters["model.embed_tokens.weight"]
    kept = embedding.detach().clone()
    rows = [Datum.from_completion([1, 2], [3]), Datum.from_completion([1, 16], [3]), Datum.from_completion([4], [5])]
    with torch.no_grad():
        embedding[16] = math.nan
    with pytest.raises(NonFiniteError, match="loss is not finite") as caught:
        trainer.forward_backward(rows, "cross_entropy")
    assert caught.value.rows == [1]
    with torch.no_grad():
        embedding.copy_(kept)
    assert trainer.policy.sha256() == weights
    after = gradients(trainer)
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_an_infinite_loss_is_caught(client: Callable[..., Any]) -> None:
    """(p - q)^2 overflows where the sampler's log-prob is absurd: named, not learned from."""
    trainer = client("qwen3")
    row = with_inputs(data()[1], logprobs=TensorData.of([-1e20] * 9))
    with pytest.raises(NonFiniteError):
        trainer.forward_backward([row], "dro")
    assert not gradients(trainer)


def test_a_step_with_an_infinite_norm_changes_nothing(client: Callable[..., Any]) -> None:
    """Finite gradients whose norm overflows: no clipping by nan, no step; weights and gradients stay."""
    trainer = client("qwen3")
    trainer.forward_backward(data(), "ppo")
    for p in trainer.policy.masters.values():
        p.grad.mul_(1e30)
    before, weights = gradients(trainer), trainer.policy.sha256()
    with pytest.raises(NonFiniteError, match="gradient norm"):
        trainer.optim_step(AdamParams(grad_clip_norm=1.0))
    assert trainer.policy.sha256() == weights
    after = gradients(trainer)
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_gradients_that_add_up_to_an_infinite_norm_are_refused(client: Callable[..., Any]) -> None:
    """Each call's norm is finite; that of the sum is not, and the step could never be taken."""
    trainer = client("qwen3")
    trainer.forward_backward(data(), "ppo")
    norm = torch.nn.utils.get_total_norm(list(gradients(trainer).values()))
    for p in trainer.policy.masters.values():
        p.grad.mul_(1.8e19 / norm)  # squares of float32 end at 3.4e38, whose root is 1.84e19
    before = gradients(trainer)
    more = 0.1e19 / float(norm)
    rows = [with_inputs(row, advantages=TensorData(row.loss_fn_inputs["advantages"].data * more)) for row in data()]
    with pytest.raises(NonFiniteError, match="gradient norm"):
        trainer.forward_backward(rows, "ppo")
    after = gradients(trainer)
    assert all(torch.equal(after[k], before[k]) for k in before)
    trainer.optim_step(AdamParams(grad_clip_norm=1.0))


def test_a_huge_rate_is_caught_by_the_next_call(client: Callable[..., Any]) -> None:
    """The step itself is finite arithmetic; the pass after it is not, and says so."""
    trainer = client("qwen3")
    trainer.forward_backward(data(), "ppo")
    trainer.optim_step(AdamParams(learning_rate=1e30))
    with pytest.raises(NonFiniteError):
        trainer.forward_backward(data(), "ppo")


# Steps


@ON_DEVICES
@pytest.mark.parametrize("adam", [AdamParams(1e-2), AdamParams(3e-3, 0.8, 0.99, 1e-6, weight_decay=0.1)])
def test_three_steps_equal_torchs_adamw(adam: AdamParams, client: Callable[..., Any]) -> None:
    """Weights after each step equal AdamW on a copy that is given the same gradients; the norm is reported."""
    trainer = client("qwen3")
    twins = {k: torch.nn.Parameter(p.detach().clone()) for k, p in trainer.policy.parameters.items()}
    peer = torch.optim.AdamW(
        twins.values(), adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, weight_decay=adam.weight_decay
    )
    for step in range(3):
        trainer.forward_backward(data(seed=step), "ppo")
        for k, g in gradients(trainer).items():
            twins[k].grad = g
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients(trainer).values()))
        assert trainer.optim_step(adam).result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        peer.step()
        assert not gradients(trainer), "a step clears the gradients"
        for k, p in trainer.policy.parameters.items():
            torch.testing.assert_close(p, twins[k], rtol=1e-6, atol=1e-7)
    assert trainer.policy.version == 3


@WITH_A_GPU
def test_clipping_scales_the_whole_gradient_to_the_norm(client: Callable[..., Any]) -> None:
    """With beta1 = 0 AdamW's first moment is the gradient it was given: its norm is the limit, or the whole."""
    norms = []
    for i, limit in enumerate((0.0, 0.5, 1e9)):
        trainer = client("qwen3", name=str(i))
        trainer.forward_backward(data(), "ppo")
        reported = trainer.optim_step(AdamParams(1e-3, beta1=0.0, grad_clip_norm=limit)).result().metrics["grad_norm"]
        moments = [s["exp_avg"] for s in trainer.policy.optimizer.state.values()]
        norms.append((reported, float(torch.nn.utils.get_total_norm(moments))))
    assert norms[0][0] == norms[1][0] == norms[2][0] > 0.5
    assert norms[0][1] == pytest.approx(norms[0][0], rel=1e-4)
    assert norms[1][1] == pytest.approx(0.5, rel=1e-4)
    assert norms[2][1] == pytest.approx(norms[2][0], rel=1e-4)


@pytest.mark.slow
def test_bf16_weights_learn_by_steps_smaller_than_their_rounding(client: Callable[..., Any]) -> None:
    """Rate 1e-5 on bf16 weights of 1 moves nothing at once and something after 400 steps: the masters are fp32."""
    trainer = client("llama", dtype=torch.bfloat16)
    name = "model.norm.weight"
    weight, master = trainer.policy.parameters[name], trainer.policy.masters[name]
    assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    assert bool((weight == 1).all())
    for step in range(400):
        for p in trainer.policy.masters.values():
            p.grad = torch.ones_like(p)
        trainer.optim_step(AdamParams(1e-5, beta1=0.0, beta2=0.5))
        if step == 0:
            assert bool((weight == 1).all())
            assert bool((master < 1).all())
    assert bool((weight < 1).all())
    assert torch.equal(weight, master.bfloat16())


@WITH_A_GPU
def test_bf16_gradients_are_summed_in_fp32(client: Callable[..., Any]) -> None:
    """Sixty micro-batches sum to their parts exactly: eight bits would lose what the later ones add."""
    rows = data([6] * 60)
    trainer = client("qwen3", dtype=torch.bfloat16, micro_tokens=1)
    each: list[dict[str, torch.Tensor]] = []
    for row in rows:
        trainer.forward_backward([row], "cross_entropy")
        each.append(gradients(trainer))
        trainer.policy.clear_gradients()
    trainer.forward_backward(rows, "cross_entropy")
    found = gradients(trainer)
    assert all(g.dtype == torch.float32 for g in found.values())
    assert all(p.grad is None for p in trainer.policy.parameters.values())
    for name, grad in found.items():
        exact = torch.stack([e[name].double() for e in each]).sum(0)
        assert float((grad - exact).norm()) <= 1e-5 * float(exact.norm()), name  # 1e-2 when summed in bf16


def test_rows_that_teach_nothing_give_a_gradient_of_zero(client: Callable[..., Any]) -> None:
    """As any other gradient it may be stepped, which a server's clients do without looking; the momentum goes on."""
    trainer = client("llama")
    trainer.forward_backward(data(), "ppo")
    trainer.optim_step(AdamParams(learning_rate=0.01))
    before = trainer.policy.sha256()
    none = [Datum.from_completion([1, 2], [3], weight=0.0), Datum.from_completion([1], [4], weight=0.0)]
    trainer.forward_backward(none, "cross_entropy")
    assert gradients(trainer) and not any(g.any() for g in gradients(trainer).values())
    stepped = trainer.optim_step(AdamParams(learning_rate=0.01)).result()
    assert stepped.metrics["grad_norm"] == 0 and trainer.policy.sha256() != before
