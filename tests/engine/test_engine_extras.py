"""What any loss may be given beside its own inputs: a KL to a reference, an exact entropy bonus, dro's own weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.core.messages import Datum, TensorData
from tests.kit.rounding import assert_gradients_close, close_loss
from tests.kit.tiny import LENGTHS, data, gradients, with_inputs


def with_extras(loss: str, seed: int = 4) -> list[Datum]:
    """`data()` with a KL to a reference, an entropy bonus and, for dro, weights of its own; 0 where the mask is."""
    rng = np.random.default_rng(seed)
    rows: list[Datum] = []
    for row in data():
        mask = row.loss_fn_inputs["sequence_ratio_mask"].data
        extra = {"kl_weights": rng.random(len(mask)), "entropy_weights": rng.random(len(mask))}
        extra["reference_logprobs"] = -4 * rng.random(len(mask))
        if loss == "dro":
            extra["beta_weights"] = rng.random(len(mask))
        rows.append(with_inputs(row, **{name: TensorData.of(values * mask) for name, values in extra.items()}))
    return rows


@pytest.mark.parametrize("loss", ["ppo", "dro", "gspo"])
def test_micro_batches_and_order_change_no_gradient_with_every_extra_input(
    loss: str, client: Callable[..., Any]
) -> None:
    """KL, exact entropy and dro's weights: one row at a time, all together, shuffled, and a head in chunks."""
    found: list[tuple[Any, dict[str, torch.Tensor]]] = []
    how: list[dict[str, int]] = [{}, {"micro_tokens": 1}, {"micro_tokens": 10}, {"logit_elements": 40}, {}]
    config = {"kl_estimator": 3.0, "temperature": 0.7}
    for i, limits in enumerate(how):
        trainer, rows = client("qwen3", name=str(i), **limits), with_extras(loss)
        rows = [rows[j] for j in (3, 0, 5, 1, 4, 2)] if i == 4 else rows
        found.append((trainer.forward_backward(rows, loss, config).result().metrics, gradients(trainer)))
    whole, whole_grads = found[0]
    assert whole["entropy_loss:sum"] < 0
    for metrics, grads in found[1:]:
        assert_gradients_close(grads, whole_grads)
        assert metrics == {name: pytest.approx(value, rel=1e-5, abs=2e-5) for name, value in whole.items()}


def test_the_extra_inputs_add_their_terms_to_any_loss(client: Callable[..., Any]) -> None:
    """Loss with them = loss without + sum w_kl k - sum w_H H, by a plain pass in double; likewise the gradient."""
    trainer, without = client("qwen3", name="a"), client("qwen3", name="b")
    module = copy.deepcopy(trainer._engine.model.module)
    rows = with_extras("ppo")
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        table = (module(input_ids=torch.tensor([row.model_input.tokens])).logits[0].double() / 0.7).log_softmax(-1)
        x = {name: values.to_torch() for name, values in row.loss_fn_inputs.items()}
        d = x["reference_logprobs"] - table[torch.arange(len(table)), x["target_tokens"]]
        total = total + (x["kl_weights"] * d**2 / 2 + x["entropy_weights"] * (table.exp() * table).sum(-1)).sum()
    total.backward()
    config = {"temperature": 0.7}
    found = trainer.forward_backward(rows, "ppo", {**config, "kl_estimator": 2.0}).result().metrics["loss:sum"]
    plain = without.forward_backward(data(), "ppo", config).result().metrics["loss:sum"]
    terms = [16.0] * sum(LENGTHS)  # squares of log-ratios of about 4
    assert found - plain == close_loss(float(total.detach()), terms)
    base = gradients(without)
    added = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    assert_gradients_close({k: g - base[k] for k, g in gradients(trainer).items()}, added)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize(
    "missing",
    [["kl_weights"], ["reference_logprobs"], ["kl_weights", "reference_logprobs"], ["entropy_weights"]],
    ids="+".join,
)
def test_an_extra_input_is_in_every_datum_or_in_none(at: int, missing: list[str], client: Callable[..., Any]) -> None:
    """Wherever the datum without it stands, first or later: an input is never passed over in silence."""
    trainer, rows = client("qwen3"), with_extras("ppo")
    kept = {k: v for k, v in rows[at].loss_fn_inputs.items() if k not in missing}
    rows[at] = Datum(rows[at].model_input, kept)
    with pytest.raises(ValueError, match=f"datum {at} lacks '{missing[0]}'"):
        trainer.forward_backward(rows, "ppo")
    assert not gradients(trainer)


def test_a_kl_estimator_without_a_kl_or_of_no_such_number_is_refused(client: Callable[..., Any]) -> None:
    trainer = client("qwen3")
    with pytest.raises(ValueError, match="kl_estimator has no effect on ppo"):
        trainer.forward_backward(data(), "ppo", {"kl_estimator": 1.0})
    with pytest.raises(ValueError, match=r"kl_estimator 4.0, expected 1, 2 or 3 \(k1, k2, k3\)"):
        trainer.forward_backward(with_extras("ppo"), "ppo", {"kl_estimator": 4.0})
