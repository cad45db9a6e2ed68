"""Cross-entropy on several targets per token: `target_tokens` and `weights` [T, K], log-probs [T, K] out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.core.messages import Datum, ModelInput, TensorData
from tests.kit.rounding import assert_gradients_close, close_logprobs, close_loss
from tests.kit.tiny import data, gradients, with_inputs


def wide(tokens: list[int], targets: int, seed: int) -> Datum:
    """A row with `targets` weighted targets per token; some weights are 0, some targets the same."""
    rng = np.random.default_rng(seed)
    weights = rng.random((len(tokens), targets)) * (rng.random((len(tokens), targets)) > 0.3)
    inputs = {"target_tokens": TensorData.of(rng.integers(0, 17, (len(tokens), targets)))}
    return Datum(ModelInput(tokens), {**inputs, "weights": TensorData.of(weights)})


def mixed_rows() -> list[Datum]:
    """K of 3, 1 (as a column), none (a plain row), 5 and 3 again, of different lengths."""
    plain = data()
    return [
        wide([1, 2, 3, 4], 3, 1),
        wide([5, 6], 1, 2),
        plain[1],
        wide([7] * 6, 5, 3),
        wide([8, 9, 1], 3, 4),
        plain[5],
    ]


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
@pytest.mark.parametrize("limits", [{}, {"micro_tokens": 1}, {"logit_elements": 40}])
def test_loss_log_probs_and_gradient_are_those_of_a_plain_pass(
    kind: str, limits: dict[str, int], client: Callable[..., Any]
) -> None:
    """-sum over T and K of w p, at a temperature; rows of one and of several targets in one call; any micro-batches."""
    trainer, rows = client(kind, **limits), mixed_rows()
    module = copy.deepcopy(trainer._engine.model.module)
    output = trainer.forward_backward(rows, "cross_entropy", {"temperature": 0.7}).result()
    terms: list[float] = []
    total = torch.zeros((), dtype=torch.float64)
    for row, out in zip(rows, output.loss_fn_outputs, strict=True):
        table = (module(input_ids=torch.tensor([row.model_input.tokens])).logits[0].double() / 0.7).log_softmax(-1)
        x = {name: values.to_torch() for name, values in row.loss_fn_inputs.items()}
        targets, weights = x["target_tokens"].reshape(len(table), -1), x["weights"].reshape(len(table), -1)
        chosen = table.gather(-1, targets)
        total = total - (weights * chosen).sum()
        terms += (weights * chosen).flatten().tolist()
        assert out["logprobs"].shape == list(x["target_tokens"].shape)
        assert out["logprobs"].data.reshape(-1) == close_logprobs(chosen.detach().numpy().reshape(-1))
    total.backward()
    assert output.metrics["loss:sum"] == close_loss(float(total.detach()), terms)
    expected = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    assert_gradients_close(gradients(trainer), expected)


def test_one_target_as_a_column_is_one_target(client: Callable[..., Any]) -> None:
    """[T, 1] gives the gradient of [T] to the bit, and its log-probs as a column."""
    one, other, rows = client("qwen3"), client("qwen3", name="other"), data()
    columns = [
        with_inputs(r, **{n: TensorData(r.loss_fn_inputs[n].data[:, None]) for n in ("target_tokens", "weights")})
        for r in rows
    ]
    plain = one.forward_backward(rows, "cross_entropy").result()
    column = other.forward_backward(columns, "cross_entropy").result()
    assert plain.metrics == column.metrics
    for a, b in zip(plain.loss_fn_outputs, column.loss_fn_outputs, strict=True):
        assert a["logprobs"].tolist() == [x for [x] in b["logprobs"].tolist()]
    assert all(torch.equal(g, gradients(other)[k]) for k, g in gradients(one).items())


@pytest.mark.parametrize(
    ("change", "loss", "message"),
    [
        ({"weights": np.ones(4)}, "cross_entropy", r"weights has shape \[4\], expected \[4, 3\], as the target_tokens"),
        ({"weights": np.ones((3, 4))}, "cross_entropy", r"weights has shape \[3, 4\], expected \[4, 3\]"),
        ({"target_tokens": np.ones((3, 3), int)}, "cross_entropy", r"target_tokens has shape \[3, 3\], expected \[4"),
        ({"target_tokens": np.ones((4, 3, 1), int)}, "cross_entropy", r"has shape \[4, 3, 1\], expected \[4\]"),
        ({"target_tokens": np.ones((4, 0), int)}, "cross_entropy", r"has shape \[4, 0\], expected \[4\]"),
        ({"target_tokens": np.full((4, 3), 17)}, "cross_entropy", "datum 2 holds token 17"),
        ({"weights": np.full((4, 3), np.nan)}, "cross_entropy", "datum 2: weights holds nan"),
        (
            {"logprobs": np.ones(4), "advantages": np.ones(4)},
            "ppo",
            r"target_tokens has shape \[4, 3\], expected \[4\]",
        ),
    ],
)
def test_a_wide_row_that_does_not_fit_is_named(
    change: dict[str, Any], loss: str, message: str, client: Callable[..., Any]
) -> None:
    """Behind two rows that are right: the third is named, and no gradient is left."""
    trainer = client("qwen3")
    bad = with_inputs(wide([1, 2, 3, 4], 3, 1), **{name: TensorData.of(values) for name, values in change.items()})
    with pytest.raises(ValueError, match=message):
        trainer.forward_backward([*data()[:2], bad], loss)
    assert not gradients(trainer)


def test_a_kl_wants_one_target_per_token(client: Callable[..., Any]) -> None:
    """The penalty is of one log-prob a token; an entropy bonus, which is of the distribution, goes with any number."""
    trainer, row = client("qwen3"), wide([1, 2, 3], 2, 1)
    ones = TensorData.of(np.ones(3))
    with pytest.raises(ValueError, match="datum 0: a KL needs one target per token, got 2"):
        trainer.forward_backward([with_inputs(row, kl_weights=ones, reference_logprobs=ones)], "cross_entropy")
    assert (
        trainer.forward([with_inputs(row, entropy_weights=ones)], "cross_entropy").result().metrics["entropy_loss:sum"]
        < 0
    )
