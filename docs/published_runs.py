"""What others measured and published, and what `rlvr plan` computes for it: the table of docs/dev/log.md.

The defaults of `ClusterOptions` everywhere: nothing is fitted to a single row. `test_capacity.py` holds the
ratios.
"""

from __future__ import annotations

from rlvr.engine.capacity import KNOWN_MODELS, ClusterOptions, StepWork, estimate_step, read_planned_shape
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.memory import ModelShape

# (model, tokens of a row, GPUs, adapter, tokens/s): prime-rl's benchmarks of January 2026, RL, FlashAttention 3, H100.
TRAINING = (
    ("Qwen3-0.6B", 16_384, 1, False, 11_900),
    ("Qwen3-0.6B", 65_536, 1, False, 10_147),
    ("Qwen3-0.6B", 16_384, 1, True, 13_342),
    ("Qwen3-0.6B", 65_536, 1, True, 9_970),
    ("Qwen3-4B", 16_384, 1, True, 6_230),
    ("Qwen3-4B", 65_536, 1, True, 4_164),
    ("Qwen3-4B", 16_384, 8, False, 26_030),
    ("Qwen3-4B", 65_536, 8, False, 28_970),
    ("Qwen3-4B", 16_384, 8, True, 48_720),
    ("Qwen3-30B-A3B", 16_384, 8, False, 6_110),
    ("Qwen3-30B-A3B", 16_384, 8, True, 33_100),
)
# (completions at once, tokens/s): vLLM, Qwen3-4B, completions of 512 tokens, one B200, unsloth#5108.
SAMPLING = ((32, 7_224), (64, 7_775))
# (model, GPUs, GPUs an engine, mean tokens, seconds a step): NeMo RL, GRPO on H100, 2,048 completions of 64 prompts, at
# most 4,096 tokens, on the GPUs that also train; 30B-A3B of version 0.6, the others of an earlier page.
STEPS = (
    ("Llama-3.1-8B", 16, 1, 1_060, 97.7),
    ("Qwen3-32B", 32, 4, 3_206, 393.0),
    ("Qwen3-30B-A3B", 32, 2, 3_203, 192.0),
)


def shape_of(name: str) -> ModelShape:
    shape = read_planned_shape(KNOWN_MODELS[name])
    assert shape is not None
    return shape


def predict_training(name: str, row: int, gpus: int, has_adapter: bool) -> float:
    """Tokens/s of passes over full rows with checkpointing."""
    work = StepWork(8 * gpus, 1, 1, row - 1, row - 1, lora=LoraConfig(16) if has_adapter else None)
    limits = EngineLimits(gradient_checkpointing=True, micro_tokens=row, tree=False)
    one = estimate_step(shape_of(name), work, limits, ClusterOptions(trainers=gpus, samplers=gpus))
    return work.rows * row / one.phases["training"]


def predict_sampling(rows: int) -> float:
    """Tokens/s of vLLM on a B200."""
    work = StepWork(rows, 1, 128, 512, 512)
    cluster = ClusterOptions(device="b200", samplers=1)
    return rows * 512 / estimate_step(shape_of("Qwen3-4B"), work, EngineLimits(), cluster).phases["sampling"]


def predict_step(name: str, gpus: int, wide: int, mean: int) -> float:
    """Seconds; prompts are taken as 100 tokens. Each batch is scored by two models, and trained on in 4 updates. The
    engines have the trainers' GPUs, so new weights take the GPUs' own network."""
    work = StepWork(64, 32, 100, mean - 100, 3_996, references=2, updates=4)
    limits = EngineLimits(micro_tokens=16_384, tree=False, gradient_checkpointing=True)
    cluster = ClusterOptions(trainers=gpus, samplers=gpus // wide, tensor_parallel=wide, transfer_gb_s=50.0)
    return estimate_step(shape_of(name), work, limits, cluster).seconds
