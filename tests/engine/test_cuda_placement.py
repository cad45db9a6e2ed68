"""What has to be on a GPU, and on which, held without a card: fake CUDA tensors, and a `torch.cuda` that is recorded.

A kernel that runs is what `test_gpu.py` asks a real device for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rlvr.clients.local import LocalTrainingClient
from rlvr.clients.sharded.rank_worker import RankWorker
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.clients.sharded.split_call import open_group
from rlvr.core.files import read_json
from rlvr.core.messages import AdamParams
from rlvr.engine.checkpoint import _load_optimizer
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.model_loading import build_model
from rlvr.engine.policy import Policy
from tests.kit.local_ray import open_cluster
from tests.kit.tiny import CONFIGS, data

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["all weights", "adapter"])
def test_a_loaded_optimizer_lies_where_its_weights_lie(lora: Any, dtype: str, tokenizer: Any, tmp_path: Path) -> None:
    """Moments and count of steps, as AdamW makes them itself: its fused kernel reads all by device pointer."""
    engine = Engine(build_model(CONFIGS["qwen3"], tokenizer, seed=1, device="cpu", dtype=dtype), EngineLimits())
    client = LocalTrainingClient(engine, engine.create_policy("policy", lora=lora), tmp_path)
    client.forward_backward(data(), "ppo").result()
    client.optim_step(AdamParams(1e-2)).result()
    saved = Path(client.save_state("one").result().path)
    state, steps = (
        load_file(saved / "optimizer.safetensors"),
        read_json(saved / "policy.json", "", "")["optimizer_steps"],
    )
    assert steps.keys() == client.policy.masters.keys()
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = {key: (p.shape, p.dtype) for key, p in client.policy.parameters.items()}
        loaded, fresh = (
            Policy(
                name,
                {key: nn.Parameter(torch.empty(like[0], dtype=like[1], device=CUDA)) for key, like in shapes.items()},
                lora,
            )
            for name in ("loaded", "fresh")
        )
        _load_optimizer(loaded, state, steps)
        for master in fresh.masters.values():
            master.grad = torch.empty_like(master)
        fresh.optimizer.step()
        for key, master in loaded.masters.items():
            found, expected = loaded.optimizer.state[master], fresh.optimizer.state[fresh.masters[key]]
            assert describe(found) == describe(expected)
            assert found["step"].device == master.device == CUDA


def describe(state: dict[str, Any]) -> dict[str, Any]:
    return {name: (value.device, value.dtype, value.shape) for name, value in state.items()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Two GPUs as torch reports them; the calls that choose one and that open NCCL, in order."""
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(("set_device", str(device))))

    def init(backend: str, *, device_id: Any, **rest: Any) -> None:
        seen.append((backend, str(device_id)))

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    return seen


def join(worker: RankWorker, rank: int, size: int = 2, device: str = "auto") -> str:
    host, port = worker.listen(0)
    return worker.join(rank, size, host, port, device, torch.get_num_threads(), 20.0)


@pytest.mark.parametrize(("own", "rank", "expected"), [(None, 0, "cuda:0"), (None, 1, "cuda:1"), (1, 1, "cuda:0")])
def test_a_rank_makes_its_gpu_the_current_one_before_it_joins(
    own: int | None, rank: int, expected: str, calls: list[tuple[str, str]]
) -> None:
    """FSDP moves parameters to the current device. A rank of Ray's sees only the GPUs that it was given."""
    worker = RankWorker(own_gpus=own)
    assert join(worker, rank) == "nccl"
    assert calls == [("set_device", expected), ("nccl", expected)]
    assert worker.device == worker.ranks.device == expected


def test_more_ranks_than_gpus_are_refused_on_every_rank(calls: list[tuple[str, str]]) -> None:
    for rank in range(3):
        with pytest.raises(ValueError, match=r"sharding\.ranks=3: this machine has 2 GPUs"):
            join(RankWorker(), rank, size=3)
    assert calls == []


def test_a_rank_that_was_given_a_gpu_does_not_compute_without_it() -> None:
    with pytest.raises(ValueError, match=r"gave this rank a GPU.* CUDA build of torch"):
        join(RankWorker(own_gpus=1), 0, 1)


def test_automatic_ranks_never_leave_the_gpus_of_a_cluster_idle() -> None:
    options = ShardingOptions(ray="auto")
    for device, gpus in (("auto", 0), ("cpu", 8)):
        options.check_device(device, gpus)
    ShardingOptions(ray="auto", gpus_per_rank=1).check_device("auto", 8)
    with pytest.raises(ValueError, match=r"device=auto with .*=0 .* 8 GPUs; give .*gpus_per_rank=1, or .*=cpu"):
        options.check_device("auto", 8)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_cluster_that_says_it_has_gpus_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray takes the number that it is told: no rank is started."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # Ray refuses to count more than these
    with open_cluster(1, gpus=2), pytest.raises(ValueError, match=r"has 2 GPUs; give sharding.gpus_per_rank=1"):
        open_group(ShardingOptions(1, ray="local"), "auto", 1)
