"""`fully_shard` with one rank, in this process: results are those without it, and checkpoints go both ways.

Several ranks are tested, slowly, by `tests/engine/test_sharded_gradient.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr.clients.local import LocalTrainingClient
from rlvr.core.messages import AdamParams, MuonParams
from rlvr.engine.engine import Engine
from rlvr.engine.sharding import Ranks, is_sharded, local_part, shard_model
from tests.kit.rounding import assert_gradients_close, tolerance
from tests.kit.sharded_ranks import LORA, group_rows, tiny_policy
from tests.kit.tiny import gradients

ROWS = group_rows([12, 9, 12, 7, 3])
ADAM = AdamParams(0.01, grad_clip_norm=1.0)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_client(folder: Path, *, sharded: bool, lora: Any = None, dtype: str = "float32") -> LocalTrainingClient:
    """A client whose whole model is one shard, or none."""
    policy = tiny_policy("qwen3", lora, dtype, micro_tokens=24)
    engine = Engine(policy.model.load(), policy.limits)
    if sharded:
        shard_model(engine.model, Ranks())
    return LocalTrainingClient(engine, engine.create_policy("policy", lora=lora), folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapter"])
def test_gradient_and_steps_are_those_without_shards(lora: Any, dtype: str, tmp_path: Path) -> None:
    """The steps are those of one gradient: then weights are apart by the rounding of its norm and of a few products."""
    one, other = (make_client(tmp_path / str(s), sharded=s, lora=lora, dtype=dtype) for s in (False, True))
    for loss in ("ppo", "cross_entropy"):
        other.load_state_with_optimizer(one.save_state(loss).result().path).result()
        outputs = [client.forward_backward(ROWS, loss).result() for client in (one, other)]
        assert outputs[0].metrics == pytest.approx(outputs[1].metrics)
        for name, gradient in gradients(other).items():
            assert not is_sharded(gradient), f"{name}: the optimizer's part is an ordinary tensor"
        known = gradients(one)
        assert_gradients_close(gradients(other), known)
        share_gradients(one, other)
        norms = [client.optim_step(ADAM).result().metrics["grad_norm"] for client in (one, other)]
        rounding = tolerance(sum(g.numel() for g in known.values()))
        assert norms[1] == pytest.approx(norms[0], rel=rounding)
        for name, p in one.policy.masters.items():
            size = float(p.detach().abs().max())
            bound = tolerance(20, size) + rounding * ADAM.learning_rate
            assert float((other.policy.masters[name] - p).detach().abs().max()) <= bound, name


def share_gradients(one: LocalTrainingClient, other: LocalTrainingClient) -> None:
    for name, gradient in gradients(one).items():
        other.policy.masters[name].grad = gradient.clone()


def test_muon_steps_whole_matrices(tmp_path: Path) -> None:
    """Of the same gradients: an orthogonalized step makes rounding in a small singular value up to 485 times larger."""
    one, other = (make_client(tmp_path / str(s), sharded=s) for s in (False, True))
    for _ in range(3):
        for client in (one, other):
            client.forward_backward(ROWS, "cross_entropy").result()
        share_gradients(one, other)
        for client in (one, other):
            client.optim_step(MuonParams(0.01, weight_decay=0.1, matrix_learning_rate=0.05)).result()
    assert other.policy.momenta and other.policy.momenta.keys() == one.policy.momenta.keys()
    for name, p in one.policy.parameters.items():
        found = local_part(other.policy.parameters[name].detach())
        torch.testing.assert_close(found, p.detach(), rtol=1e-4, atol=1e-5)


def test_checkpoints_go_from_shards_to_one_process_and_back(tmp_path: Path) -> None:
    """To the bit: shards that one process saved after it had loaded them go on as those that it loaded."""
    whole, sharded, again = (make_client(tmp_path / n, sharded=n != "whole") for n in ("whole", "sharded", "again"))
    paths: list[str] = []
    for client in (sharded, whole, again):
        if paths:
            client.load_state_with_optimizer(paths[-1]).result()
        else:
            client.forward_backward(ROWS, "cross_entropy").result()
            client.optim_step(ADAM).result()
        paths.append(client.save_state("state").result().path)
    files = [sorted(file.name for file in Path(path).iterdir()) for path in paths]
    assert files[0] == files[1] == files[2]
    assert len({client.policy.sha256() for client in (sharded, whole, again)}) == 1
    for client in (sharded, whole, again):
        client.forward_backward(ROWS, "cross_entropy").result()
    assert_gradients_close(gradients(sharded), gradients(whole))
    for client in (sharded, again):
        client.optim_step(ADAM).result()
    assert again.policy.sha256() == sharded.policy.sha256() != whole.policy.sha256()
    assert all(is_sharded(p) for p in sharded.policy.parameters.values())
    from transformers import AutoModelForCausalLM

    module: Any = AutoModelForCausalLM.from_pretrained(paths[0])
    assert type(module).__name__ == "Qwen3ForCausalLM"  # not that of its sharded form


def test_a_forward_pass_leaves_no_whole_weights_behind(tmp_path: Path) -> None:
    """Else the next pass would use them, and not those of a step or a checkpoint in between."""
    client = make_client(tmp_path, sharded=True)
    before = client.forward(ROWS, "cross_entropy").result().metrics["loss:sum"]
    assert all(is_sharded(p) for p in client._engine.model.module.parameters())
    client.forward_backward(ROWS, "cross_entropy").result()
    client.forward(ROWS, "cross_entropy").result()
    client.optim_step(ADAM).result()
    assert client.forward(ROWS, "cross_entropy").result().metrics["loss:sum"] < before - 0.1
