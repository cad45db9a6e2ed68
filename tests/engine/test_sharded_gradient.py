"""The gradient of 2 and of 3 processes is that of one, to a millionth of its norm, and each step goes the same way.

For every loss, all weights and adapters, rows in trees and padded rows. Real processes over gloo; the rows are of very
unequal lengths, in unequal numbers of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlvr.algorithms.loss_specs import LOSS_SPECS
from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams, MuonParams
from tests.kit.sharded_ranks import (
    LORA,
    group_rows,
    measure_difference,
    move_adapter,
    read_gradients,
    start,
    start_alone,
    tiny_policy,
    with_kl,
)
from tests.kit.tiny import gradients

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CLOSE = 5e-6  # of fp32 sums in other orders: up to 2.7e-6 on one processor of two
PLAIN = {"tree": False, "pack": False}
ROWS = group_rows([12, 9, 12, 40, 7, 8, 12, 12, 12, 3, 1])
LOSSES = [*LOSS_SPECS, "ppo with kl and entropy"]
SETTINGS = {
    "all weights, tree": ("qwen3", None, {}),
    "all weights, plain": ("qwen3", None, PLAIN),
    "adapter, tree": ("qwen3", LORA, {}),
    "adapter, plain": ("qwen3", LORA, PLAIN),
    "untied": ("llama", None, {}),
    "head inside, checkpointing": ("gemma2", None, {"gradient_checkpointing": True}),
}
PARAMS = [*((s, 2) for s in SETTINGS), *((s, 3) for s in SETTINGS if "weights" in s or "adapter" in s)]


class Pair:
    """One policy on ranks and alone."""

    def __init__(self, setting: str, ranks: int, folder: Path) -> None:
        kind, lora, limits = SETTINGS[setting]
        policy = tiny_policy(kind, lora, micro_tokens=24, logit_elements=17 * 9, **limits)
        self.folder = folder
        self.alone = start_alone(policy, folder)
        if lora:
            move_adapter(self.alone)
        self.start = self.alone.save_state("start").result().path
        self.sharded = start(policy, folder, ranks)

    def reset(self) -> None:
        for client in (self.alone, self.sharded):
            client.load_state(self.start).result()

    def read_gradients(self, name: str) -> dict[str, torch.Tensor]:
        """The ranks' gradients, as a checkpoint holds them."""
        return read_gradients(self.sharded, self.folder / name)


def name_setting(param: tuple[str, int]) -> str:
    return f"{param[1]} ranks {param[0]}".replace(",", "").replace(" ", "-")


@pytest.fixture(scope="module", params=PARAMS, ids=name_setting)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(*request.param, tmp_path_factory.mktemp("pair"))
    yield made
    made.sharded.close()


def call_both(pair: Pair, loss: str, rows: Any) -> list[Any]:
    name, config = loss.partition(" ")[0], {"temperature": 0.7}
    rows = with_kl(rows) if "kl" in loss else rows
    return [client.forward_backward(rows, name, config).result() for client in (pair.alone, pair.sharded)]


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_loss_and_logprobs_are_those_of_one_process(pair: Pair, loss: str) -> None:
    pair.reset()
    one, many = call_both(pair, loss, ROWS)
    found = measure_difference(pair.read_gradients(loss.replace(" ", "-")), gradients(pair.alone))
    print(f"difference {found:.2e}")
    assert found < CLOSE
    assert one.metrics.keys() == many.metrics.keys()
    for name, value in one.metrics.items():
        assert many.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5)
    for a, b in zip(one.loss_fn_outputs, many.loss_fn_outputs, strict=True):
        torch.testing.assert_close(b["logprobs"].to_torch(), a["logprobs"].to_torch(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[3:5]], ids=["one row", "two rows of 40 and 7 tokens"])
def test_fewer_rows_than_ranks_give_the_gradient_of_one_process(pair: Pair, rows: Any) -> None:
    pair.reset()
    call_both(pair, "importance_sampling", rows)
    call_both(pair, "cross_entropy", ROWS[5:6])  # and gradients add up over calls
    found = measure_difference(pair.read_gradients(f"rows-{len(rows)}"), gradients(pair.alone))
    assert found < CLOSE


# An eps as large as the entries of a clipped gradient: with the usual 1e-8, AdamW shows rounding whole where a gradient
# is 0 but for it.
ADAM = AdamParams(learning_rate=0.003, eps=1e-2, weight_decay=0.01, grad_clip_norm=5.0)
MUON = MuonParams(**vars(ADAM), matrix_learning_rate=0.003)


@pytest.mark.parametrize("params", [ADAM, MUON], ids=["adamw", "muon"])
def test_five_steps_are_those_of_one_process(pair: Pair, params: AdamParams) -> None:
    """Each from the weights and the optimizer's state that the ranks have by then. The norm is clipped in most steps.

    Clipping brings two gradients no further apart, and neither a moment nor its root is further apart than they are. As
    AdamW divides by eps at least, its steps are apart by 2 rate / eps times the gradients' distance at most, and by the
    rounding of a product and a sum of each weight. Muon makes a small part of a matrix up to 485 times larger.
    """
    is_muon = isinstance(params, MuonParams)
    if is_muon and pair.alone.policy.lora:
        pytest.skip("Muon is for whole weights")
    pair.reset()
    after = start_alone(pair.sharded._policy, pair.folder / "again")
    kind = type(params).__name__
    path = pair.sharded.save_state(f"{kind}-0").result().path
    for step in range(5):
        pair.alone.load_state_with_optimizer(path).result()
        before = read_weights(pair.alone)
        call_both(pair, LOSSES[step], group_rows([12, 9, 12, 20, 7, 8, 3], seed=step))
        assert measure_difference(pair.read_gradients(f"{kind}-{step}-gradients"), gradients(pair.alone)) < CLOSE
        norms = [c.optim_step(params).result().metrics["grad_norm"] for c in (pair.alone, pair.sharded)]
        assert norms[1] == pytest.approx(norms[0], rel=2 * CLOSE)
        path = pair.sharded.save_state(f"{kind}-{step + 1}").result().path
        after.load_state_with_optimizer(path).result()
        assert pair.sharded.weights_sha256() == after.weights_sha256()
        moved, found = ({k: w - before[k] for k, w in read_weights(c).items()} for c in (pair.alone, after))
        apart = 2 * params.learning_rate / params.eps * CLOSE * min(norms[0], params.grad_clip_norm)
        apart += 2 * torch.finfo(torch.float32).eps * measure_norm(before)
        bound = 485 * 2 * CLOSE if is_muon else apart / measure_norm(moved)
        difference = measure_difference(found, moved)
        print(f"difference {difference:.2e} of {bound:.2e}")
        assert difference < bound
    for client in (pair.sharded, after):  # the state of the optimizer is whole: one process goes on as the ranks do
        client.load_state_with_optimizer(path).result()
        client.forward_backward(ROWS, "ppo").result()
        client.optim_step(params).result()
    again = pair.sharded.save_weights_for_sampler(f"{kind}-6").result().path
    stored = load_file(f"{again}/{'adapter_' if after.policy.lora else ''}model.safetensors")
    stored = {name.removeprefix("base_model.model."): weight for name, weight in stored.items()}
    weights = read_weights(after)
    assert measure_difference({name: stored[name] for name in weights}, weights) < CLOSE


def read_weights(client: LocalTrainingClient) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in client.policy.parameters.items()}


def measure_norm(weights: dict[str, torch.Tensor]) -> float:
    return math.hypot(*(float(w.double().norm()) for w in weights.values()))
