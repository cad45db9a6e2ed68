"""The memory estimate against what torch holds: weights exactly, a pass by its saved tensors, a step by its peak."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr.algorithms.optimizers import AdamW, Muon
from rlvr.core.messages import AdamParams, Datum, ModelInput, MuonParams, TensorData
from rlvr.engine.capacity import KNOWN_MODELS
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.memory import ModelShape, estimate_memory, read_shape
from tests.kit.peak_memory import make_engine, make_rows

# As their makers publish them.
PARAMETERS = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-0.6B": 596_049_920,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen3-32B": 32_762_123_264,
    "Llama-3.1-70B": 70_553_706_496,
    "Qwen2.5-72B": 72_706_203_648,
}
SIZES = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 300,
}  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def make_config(family: str, **fields: Any) -> dict[str, Any]:
    """A small config; qwen3's heads are wider than its hidden states, as in the published ones."""
    return {"model_type": family, **SIZES, **({"head_dim": 32} if family == "qwen3" else {}), **fields}


def shape_of(config: dict[str, Any]) -> ModelShape:
    shape = read_shape(config)
    assert shape is not None
    return shape


def count_bytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("name", PARAMETERS)
def test_known_models_have_their_published_number_of_parameters(name: str) -> None:
    assert shape_of(KNOWN_MODELS[name]).parameters == PARAMETERS[name]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_and_matrices_are_those_of_the_transformers_model(
    family: str, is_tied: bool, tokenizer: Any
) -> None:
    from rlvr.engine.muon import hidden_matrices

    config = make_config(family, tie_word_embeddings=is_tied)
    module = make_engine(tokenizer, config).model.module
    shape = shape_of(config)
    weights = dict(module.named_parameters())
    assert shape.parameters == sum(p.numel() for p in weights.values())
    assert shape.linear_weights == sum(weights[name].numel() for name in hidden_matrices(module))


@pytest.mark.parametrize("config", [{}, {"model_type": "gpt2"}, {"model_type": "llama", "hidden_size": 8}])
def test_a_model_of_another_kind_has_no_estimate(config: dict[str, Any]) -> None:
    assert read_shape(config) is None


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    shape = shape_of(make_config("llama"))
    with pytest.raises(ValueError, match=r"up.*expected .*up_proj"):
        shape.count_adapter(LoraConfig(4, targets=("up",)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["adamw", "muon", "lora", "lora on some layers"])
def test_weights_gradients_and_optimizer_state_are_exact(dtype: str, how: str, tokenizer: Any) -> None:
    """What a policy holds after one step, tensor by tensor."""
    config = make_config("qwen3")
    engine = make_engine(tokenizer, config, dtype)
    lora = {"lora": LoraConfig(4), "lora on some layers": LoraConfig(4, targets=("q_proj", "lm_head"))}.get(how)
    policy = engine.create_policy("policy", lora=lora)
    rows = make_rows(2, 8, 300)
    engine.forward_backward(policy, rows, "cross_entropy", None)
    gradients = count_bytes(m.grad for m in policy.masters.values() if m.grad is not None)
    engine.optim_step(policy, MuonParams(matrix_learning_rate=0.01) if how == "muon" else AdamParams())
    moments = [t for s in policy.optimizer.state.values() for t in s.values() if t.ndim]  # not the step counters
    masters = [m for name, m in policy.masters.items() if m is not policy.parameters[name]]
    estimate = estimate_memory(
        shape_of(config), engine.limits, dtype=dtype, row_tokens=8, rows=2, lora=lora,
        optimizer=Muon(matrix_learning_rate=0.02) if how == "muon" else AdamW(),
    )  # fmt: skip
    low = 2 * sum(p.numel() for p in masters)  # gradients in the weights' dtype, gone by now
    assert estimate.weights == count_bytes(engine.model.module.parameters())
    assert estimate.adapter == (count_bytes(policy.parameters.values()) if lora else 0)
    assert estimate.gradients == gradients + low
    assert estimate.state == count_bytes(moments) + count_bytes(masters) + count_bytes(policy.momenta.values())


def count_saved(engine: Engine, rows: list[Datum]) -> int:
    """Bytes of the distinct tensors that autograd keeps in a pass, weights apart."""
    policy = engine.create_policy("policy")
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters.values()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage  # held, so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.forward_backward(policy, rows, "cross_entropy", None)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_three_more_layers_keep_what_is_counted(family: str, dtype: str, checkpointing: bool, tokenizer: Any) -> None:
    """Rows padded side by side: within a hundredth."""
    found: list[int] = []
    estimated: list[int] = []
    limits = {"gradient_checkpointing": checkpointing, "tree": False, "pack": False}
    for layers in (1, 4):
        config = make_config(family, hidden_size=128, intermediate_size=384, num_hidden_layers=layers)
        engine = make_engine(tokenizer, config, dtype, **limits)
        found.append(count_saved(engine, make_rows(4, 64, 17)))
        estimate = estimate_memory(shape_of(config), engine.limits, dtype=dtype, row_tokens=64, rows=4)
        estimated.append(estimate.activations)
    assert estimated[1] - estimated[0] == pytest.approx(found[1] - found[0], rel=0.01)


@pytest.mark.parametrize("prompt", [1, 200])
def test_rows_that_share_a_prompt_keep_about_what_is_counted(prompt: int, tokenizer: Any) -> None:
    """Attention over a prefix tree, with as many tokens in the tree as the limit allows: 0.9 to 1.5 times it."""
    config = make_config("qwen3", hidden_size=128, intermediate_size=384)
    shared, rows = make_rows(1, prompt, 17)[0].model_input.tokens, make_rows(8, 256 - prompt, 17)
    rows = [Datum(ModelInput([*shared, *row.model_input.tokens]), lengthen(row, prompt)) for row in rows]
    tokens = prompt + 8 * (256 - prompt)
    engine = make_engine(tokenizer, config, micro_tokens=tokens)
    found = count_saved(engine, rows)
    estimate = estimate_memory(shape_of(config), engine.limits, dtype="float32", row_tokens=256, rows=8)
    print(prompt, estimate.activations / found)
    assert 0.9 < estimate.activations / found < 1.5


def lengthen(row: Datum, count: int) -> dict[str, TensorData]:
    """The loss inputs of a row with `count` tokens before it, without weight."""
    before = {"target_tokens": [0] * count, "weights": [0.0] * count}
    return {name: TensorData.of([*before[name], *data.data.tolist()]) for name, data in row.loss_fn_inputs.items()}


MEDIUM = {
    "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 8000,
    "tie_word_embeddings": True,
}  # fmt: skip
PLAIN = {"micro_tokens": 512, "tree": False, "pack": False}
CASES = {
    "all weights": ("float32", 0, PLAIN),
    "all weights, bfloat16": ("bfloat16", 0, PLAIN),
    "checkpointing": ("float32", 0, {**PLAIN, "gradient_checkpointing": True}),
    "adapter": ("float32", 8, PLAIN),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_peak_of_two_training_steps_is_near_the_estimate(case: str) -> None:
    """Resident memory of a process of its own, beyond what the libraries take: 0.85 to 1.25 times it.

    Two micro-batches a step, so that gradients and activations meet. Larger blocks are mapped one by one: memory that
    malloc keeps between blocks is not counted.
    """
    dtype, rank, limits = CASES[case]
    script, arguments = Path(__file__).parents[1] / "kit" / "peak_memory.py", [MEDIUM, dtype, rank, limits, 2, 512]
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    estimate = estimate_memory(
        shape_of(MEDIUM), EngineLimits(**limits), dtype=dtype, row_tokens=512, rows=2,
        lora=LoraConfig(rank) if rank else None,
    )  # fmt: skip
    without_cache = replace(estimate, cache=0).total
    print(f"{case}: {without_cache / 2**20:.0f} MiB estimated, {int(done.stdout) / 2**20:.0f} measured")
    assert 0.85 < without_cache / int(done.stdout) < 1.25


def test_the_kv_cache_grows_as_counted(tokenizer: Any) -> None:
    """The cache after sampling holds at least the places of the rows, and at most twice (it grows by doubling)."""
    from rlvr.core.messages import SamplingParams

    config = make_config("qwen3")
    engine = make_engine(tokenizer, config)
    policy = engine.create_policy("policy")
    prompts = make_rows(4, 16, 17)
    futures = [
        engine.sample(policy.snapshot(), row.model_input, 2, SamplingParams(max_tokens=48, stop=[])) for row in prompts
    ]
    for future in futures:
        future.result()
    held = count_bytes(t for layer in engine._sampler.cache.layers for t in (layer.keys, layer.values))
    estimate = estimate_memory(shape_of(config), engine.limits, dtype="float32", row_tokens=64, rows=8)
    assert estimate.cache <= held <= 2 * estimate.cache


def test_limits_bound_the_cache_the_logits_and_the_rows_of_a_pass() -> None:
    """By hand: 8 rows of 100 tokens, 2 layers of 2 x 32 keys and values in fp32, a vocabulary of 1,000."""
    shape = shape_of(make_config("llama", vocab_size=1000, num_hidden_layers=2))

    def estimate(**limits: Any) -> Any:
        return estimate_memory(shape, EngineLimits(**limits), dtype="float32", row_tokens=100, rows=8)

    assert estimate().cache == 8 * 100 * 2 * 2 * 32 * 4
    assert estimate(cache_tokens=300).cache == 300 * 2 * 2 * 32 * 4
    assert estimate(cache_tokens=30).cache == 100 * 2 * 2 * 32 * 4, "one row always runs"
    assert estimate(max_rows=2).cache == 2 * 100 * 2 * 2 * 32 * 4
    head = 1000 * 64 * 4
    assert estimate().logits - head == 800 * 1000 * 8
    assert estimate(micro_tokens=200).logits - head == 200 * 1000 * 8
    assert estimate(logit_elements=50_000).logits - head == 50 * 1000 * 8
    assert estimate(micro_tokens=256).activations * 7 == estimate().activations * 2, "of 7 blocks of 128 tokens, 2"


def test_the_plan_has_the_memory_of_a_model_whose_config_is_here(tmp_path: Path) -> None:
    """From `config.json` alone: nothing is loaded. A model of another kind has no line."""
    from rlvr.config import load
    from rlvr.config.build_config import build_config
    from rlvr.runs.run_plan import describe_memory

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(KNOWN_MODELS["Qwen2.5-1.5B"]))
    words = [f"model.name={folder}", "model.device=cpu", "training.max_prompt_tokens=100", "env.kwargs.path=x"]
    said = describe_memory(build_config(load("jsonl", None, words)))
    held = (1_543_714_304 * 4 + 36_929_536 * 16) / 2**30  # in fp32; the adapter's rank is 32
    assert said.startswith("about ") and "float32" in said and "up to 100 tokens" in said
    assert f"optimizer {held - 36_929_536 * 4 / 2**30:.1f}" in said, "gradients are a part of the pass"
    assert f"KV cache {512 * 356 * 28 * 2 * 256 * 4 / 2**30:.1f}" in said, (
        "an evaluation samples engine.max_rows at once"
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert describe_memory(build_config(load("jsonl", None, words))) == ""


def test_the_plan_says_before_loading_that_a_model_does_not_fit(tmp_path: Path) -> None:
    """Ten thousand layers are more than a machine holds, and a model that fits everywhere."""
    from rlvr.config import load
    from rlvr.config.build_config import build_config
    from rlvr.runs.run_plan import describe_memory

    words = [f"model.name={tmp_path}", "model.device=cpu", "env.kwargs.path=x", "rollout.max_tokens=8"]
    words += ["training.prompts_per_step=1", "engine.micro_tokens=64", "training.max_prompt_tokens=8"]
    small = {**KNOWN_MODELS["Qwen2.5-0.5B"], "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 100}
    for layers, fits in ((1, True), (10_000, False)):
        size = {} if fits else {**KNOWN_MODELS["Qwen2.5-1.5B"], "num_hidden_layers": layers}
        (tmp_path / "config.json").write_text(json.dumps({**small, **size}))
        said = describe_memory(build_config(load("jsonl", None, words)))
        assert ("GiB are free here" in said) != fits, said
        assert fits or ("engine.micro_tokens (now 64)" in said and "(now 8 are assumed)" in said)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8)], ids=["all weights", "adapter"])
def test_a_critic_has_weights_and_an_optimizer_of_its_own(lora: LoraConfig | None) -> None:
    """A second adapter, or a second model; a pass takes no more, since the two are never at once."""
    shape, limits = shape_of(make_config("qwen3")), EngineLimits()
    how: dict[str, Any] = {"dtype": "bfloat16", "row_tokens": 64, "rows": 8, "lora": lora}
    alone, both = (estimate_memory(shape, limits, critic=critic, **how) for critic in (False, True))
    assert both.weights == (1 if lora else 2) * alone.weights
    assert (both.adapter, both.state) == (2 * alone.adapter, 2 * alone.state)
    assert (both.cache, both.gradients, both.activations) == (alone.cache, alone.gradients, alone.activations)
