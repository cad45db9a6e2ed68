"""What has to be on a GPU, on which, and how much of it, held without a card: a pretended GPU
(`tests/kit/pretend_gpu.py`), fake CUDA tensors, and a `torch.cuda` that is recorded.

A kernel that runs is what `test_gpu.py` asks a real device for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.files import read_json
from rlvr.core.messages import AdamParams, ModelInput
from rlvr.engine.capacity import KNOWN_MODELS
from rlvr.engine.checkpoint import _load_optimizer
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.model_loading import build_model
from rlvr.engine.policy import Policy
from rlvr.runs.run_plan import describe_memory
from tests.kit.local_ray import open_cluster
from tests.kit.pretend_gpu import pretend_gpu
from tests.kit.tiny import CONFIGS, PROMPTS, data, params, texts

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


# On a pretended GPU


@pytest.mark.parametrize(
    ("name", "mix"),
    [
        ("add", lambda x: x + torch.ones(3)),
        ("cat", lambda x: torch.cat([x, torch.ones(1)])),
        ("index", lambda x: torch.ones(4)[x.long()]),
        ("embedding", lambda x: torch.nn.functional.embedding(torch.tensor([0]), x[:, None])),
        ("_fused_adamw", lambda x: step_fused(x, torch.tensor(1.0))),
    ],
)
def test_a_pretended_gpu_refuses_tensors_of_both_places(name: str, mix: Callable[[torch.Tensor], Any]) -> None:
    """As a real one; and it lets through what a real one does: a number, an index, a copy."""
    with pretend_gpu() as gpu:
        x = torch.zeros(3, device="cuda")
        with pytest.raises(RuntimeError, match=rf"same device, but aten\.{name}"):
            mix(x)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        step_fused(x.clone(), torch.tensor(1.0, device="cuda"))
        assert not gpu.waits
        results = [x + torch.tensor(1.0), x[torch.tensor([0, 1])], torch.ones(3).to(x), x.new_zeros(2), x[None].mT]
        assert all(result.device == torch.device("cuda", 0) for result in results)
        assert x.cpu().numpy().tolist() == x.tolist() == [0.0] * 3 and gpu.waits.total() == 2


def step_fused(x: torch.Tensor, step: torch.Tensor) -> None:
    """AdamW's fused kernel, with its count of steps in `step`."""
    moments = [[torch.zeros_like(x)] for _ in range(3)]
    fused: Any = torch.ops.aten._fused_adamw_.default
    fused(
        [x], *moments, [], [step], lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False,
        maximize=False,
    )  # fmt: skip


def test_without_a_limit_the_cache_takes_a_share_of_the_free_memory(fresh: Callable[..., Any]) -> None:
    """On a GPU alone, where more would end the run: completions then take turns, and are the same."""
    asked = [(PROMPTS[i % 5], 3, params(i, 20)) for i in range(8)]
    place = 2 * 2 * 1 * 16 * 4  # bytes: keys and values, layers, heads, width of a head, fp32
    total = 300 * place * 10 // 7

    def sample(engine: Any, gpu: Any = None) -> tuple[list[Any], int]:
        snapshot, most = engine.create_policy("p").snapshot(), 0
        requests = [engine.enqueue(snapshot, ModelInput(prompt), count, how) for prompt, count, how in asked]
        while not engine.idle:
            engine.advance()
            rows, length = engine._sampler.cache.shape
            most = max(most, rows * length)
            if gpu is not None:
                gpu.free_bytes = total - rows * length * place
        return [texts(request.response()) for request in requests], most

    expected, unbounded = sample(fresh("qwen3"))
    with pretend_gpu() as gpu:
        engine = fresh("qwen3", device="cuda")
        gpu.free_bytes = total
        found, most = sample(engine, gpu)
        assert found == expected and most <= 300 < unbounded
        gpu.free_bytes = 1 << 30  # it is read anew where nothing runs
        snapshot = engine.policies["p"].snapshot()
        engine.sample(snapshot, ModelInput(PROMPTS[0]), 20, params(0, 20)).result()
        assert engine._sampler.cache.max_tokens > 300


def test_training_gets_the_memory_of_the_cache(client: Callable[..., Any], fresh: Callable[..., Any]) -> None:
    """All of it where nothing runs; of rows under way what they do not fill, and their answers stay the same."""
    prompt = ModelInput([t % 15 for t in range(40)])

    def run(trainer: Any) -> tuple[list[Any], list[tuple[int, int]]]:
        cache_shapes = list[tuple[int, int]]()
        sampler = trainer.create_sampling_client()
        done = sampler.sample(ModelInput([1] * 60), 3, params(0, 60)).result()
        trainer.forward_backward(data(), "ppo").result()
        cache_shapes.append(trainer._engine._sampler.cache.shape)
        future = sampler.sample(prompt, 5, params(1, 30))
        for _ in range(4):
            trainer._engine.advance()
        trainer.forward_backward(data(seed=1), "ppo").result()
        cache_shapes.append(trainer._engine._sampler.cache.shape)
        return [texts(done), texts(future.result())], cache_shapes

    answers, kept = run(client("qwen3", name="host"))
    with pretend_gpu():
        found, left = run(client("qwen3", name="gpu", device="cuda"))
    assert found == answers
    assert left[0] == (0, 0) and left[1][0] == 5 and left[1][1] < 40, "five rows of few tokens of their own"
    assert kept[0] != (0, 0), "on a processor, where memory is kept between passes"


def test_a_step_of_decoding_waits_for_the_device_no_more_often_than_it_did(fresh: Callable[..., Any]) -> None:
    """The host reads tokens, log-probs and two flags; each read ends what runs ahead on the device."""
    with pretend_gpu() as gpu:
        engine = fresh("qwen3", device="cuda")
        snapshot = engine.create_policy("p").snapshot()
        request = engine.enqueue(snapshot, ModelInput([t % 15 for t in range(40)]), 5, params(0, 12))
        for _ in range(3):
            engine.advance()
        gpu.waits.clear()
        for _ in range(5):
            engine.advance()
        assert not request.is_done
        assert gpu.waits.total() <= 5 * 4, gpu.waits


def test_the_plan_compares_a_run_with_the_free_memory_of_its_gpu(tmp_path: Path) -> None:
    """All but the KV cache, which takes what is left. A plan for a GPU that is not here has no such words."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen2.5-1.5B"]))
    words = [f"model.name={folder}", "model.device=cuda", "env.kwargs.path=x", "training.max_prompt_tokens=100"]
    config = build_config(load("jsonl", None, words))
    assert "free on the GPU" not in describe_memory(config)
    with pretend_gpu() as gpu:
        gpu.free_bytes = 4 << 30
        assert "only 4.0 GiB are free on the GPU: a smaller engine.micro_tokens" in describe_memory(config)
        gpu.free_bytes = 79 << 30
        assert "GiB are free" not in describe_memory(config)
