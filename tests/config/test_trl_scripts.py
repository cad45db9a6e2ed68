"""Settings as ten published GRPO scripts for TRL have them, typed as `key=value`.

Each word is translated, or refused at once together with every other that is, and what is left builds a config.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from rlvr.config.build_config import build_config
from rlvr.config.choices import full_key
from tests.kit.composing import BASE, compose_base, refusal_of


@dataclass(frozen=True)
class Script:
    """The words of a script, those of them that are refused with a part of the remedy, and what the rest becomes."""

    words: str
    refused: dict[str, str]
    becomes: dict[str, Any]


UNSLOTH = (
    "adam_beta1=0.9 adam_beta2=0.99 weight_decay=0.1 warmup_ratio=0.1 lr_scheduler_type=cosine logging_steps=1 "
    "max_grad_norm=0.1 report_to=none"
)
UNSLOTH_BECOMES = {
    "training.optimizer.beta2": 0.99, "training.optimizer.weight_decay": 0.1, "training.optimizer.decay": "cosine",
    "training.optimizer.grad_clip": 0.1,
}  # fmt: skip

SCRIPTS = {
    "the trainer's first example": Script(
        "output_dir=Qwen2-0.5B-GRPO logging_steps=10 per_device_train_batch_size=8 bf16=true",
        {"output_dir": "run.root", "logging_steps": "metrics.jsonl"},
        {"training.prompts_per_step": 1, "training.group_size": 8, "model.dtype": "bfloat16"},
    ),
    "a summary demo with vLLM": Script(
        "output_dir=Qwen2-0.5B-GRPO logging_steps=1 use_vllm=true vllm_mode=colocate vllm_tensor_parallel_size=1 "
        "vllm_gpu_memory_utilization=0.3 max_prompt_length=512 max_completion_length=1024 max_steps=2 "
        "num_generations=4 per_device_train_batch_size=4 push_to_hub=false report_to=null",
        {
            "output_dir": "run.root", "use_vllm": "built in", "vllm_mode": "built in",
            "vllm_tensor_parallel_size": "built in", "vllm_gpu_memory_utilization": "built in",
        },
        {
            "training.max_prompt_tokens": 512, "rollout.max_tokens": 1024, "training.steps": 2,
            "training.group_size": 4, "training.prompts_per_step": 1,
        },
    ),
    "a small Gemma": Script(
        f"{UNSLOTH} learning_rate=5e-6 optim=adamw_torch_fused per_device_train_batch_size=4 "
        "gradient_accumulation_steps=1 num_generations=4 max_prompt_length=256 max_completion_length=768 max_steps=50 "
        "save_steps=50 output_dir=outputs",
        {"output_dir": "run.root"},
        UNSLOTH_BECOMES | {"training.optimizer.warmup_steps": 0.1, "run.checkpoint_every": 50, "training.steps": 50},
    ),
    "an 8-bit optimizer": Script(
        f"{UNSLOTH} learning_rate=5e-6 optim=paged_adamw_8bit per_device_train_batch_size=6 num_generations=6 "
        "max_prompt_length=256 max_completion_length=768 max_steps=250 save_steps=250 output_dir=outputs",
        {"optim": "AdamW", "output_dir": "run.root"},
        UNSLOTH_BECOMES | {"training.optimizer.warmup_steps": 0.1, "training.group_size": 6},
    ),
    "scores of a text, with a KL": Script(
        f"{UNSLOTH} seed=3407 learning_rate=5e-5 optim=adamw_8bit per_device_train_batch_size=8 "
        "gradient_accumulation_steps=4 num_generations=8 max_steps=100 save_steps=10 save_strategy=steps "
        "save_total_limit=5 beta=0.005 use_vllm=true",
        {"optim": "AdamW", "use_vllm": "built in"},
        UNSLOTH_BECOMES
        | {
            "seed": 3407, "training.prompts_per_step": 4, "run.keep_checkpoints": 5, "algorithm.kl_coef": 0.005,
            "algorithm.kl_in": "loss", "algorithm.kl_estimator": "k3",
        },
    ),
    "questions about finance, LoRA in 8 bits": Script(
        "learning_rate=5e-6 optim=adamw_torch_fused adam_beta1=0.9 adam_beta2=0.99 weight_decay=0.1 warmup_ratio=0.1 "
        "lr_scheduler_type=cosine logging_steps=1 fp16=true per_device_train_batch_size=8 save_steps=100 "
        "gradient_accumulation_steps=4 num_generations=8 max_prompt_length=512 max_completion_length=768 "
        "max_grad_norm=0 log_on_each_node=false lora_r=16 lora_alpha=64 lora_dropout=0.05 load_in_8bit=true",
        {"fp16": "model.dtype", "lora_dropout": "log-probs", "load_in_8bit": "quantized"},
        {"model.lora.rank": 16, "model.lora.alpha": 64, "training.optimizer.grad_clip": 0.0},
    ),
    "Qwen3 on one A100": Script(
        "output_dir=qwen3-grpo-gsm8k run_name=qwen3 logging_steps=5 learning_rate=1e-5 beta=0.04 num_generations=8 "
        "max_completion_length=512 temperature=0.8 top_p=0.95 top_k=50 generation_batch_size=96 use_vllm=true "
        "vllm_mode=colocate bf16=true gradient_checkpointing=false epsilon=0.2 loss_type=grpo",
        {"output_dir": "run.root", "logging_steps": "metrics.jsonl", "use_vllm": "built in", "vllm_mode": "built in"},
        {
            "run.name": "qwen3", "rollout.temperature": 0.8, "rollout.top_p": 0.95, "rollout.top_k": 50,
            "training.prompts_per_step": 12, "algorithm.clip_low": 0.2, "algorithm.reduction": "sequence_mean",
            "algorithm.kl_coef": 0.04,
        },
    ),
    "agents behind a vLLM server": Script(
        "learning_rate=3e-6 lr_scheduler_type=constant warmup_steps=0 max_steps=60 per_device_train_batch_size=1 "
        "gradient_accumulation_steps=16 num_generations=8 max_completion_length=16384 max_tool_calling_iterations=16 "
        "temperature=0.8 top_p=1.0 top_k=0 beta=0.0 loss_type=dapo optim=paged_adamw_8bit bf16=true "
        "gradient_checkpointing=true use_vllm=true vllm_mode=server vllm_server_timeout=900 report_to=none",
        {
            "max_tool_calling_iterations": "environment", "optim": "AdamW", "use_vllm": "built in",
            "vllm_mode": "built in", "vllm_server_timeout": "built in",
        },
        {
            "training.prompts_per_step": 2, "training.steps": 60, "algorithm.reduction": "token_mean",
            "algorithm.kl_coef": 0.0, "engine.gradient_checkpointing": True, "rollout.max_tokens": 16384,
        },
    ),
    "a hybrid model with an adapter": Script(
        "use_vllm=false learning_rate=2e-5 adam_beta1=0.9 adam_beta2=0.99 weight_decay=0.1 warmup_ratio=0.1 "
        "lr_scheduler_type=cosine optim=adamw_torch logging_steps=1 bf16=true gradient_checkpointing=true "
        "per_device_train_batch_size=8 gradient_accumulation_steps=1 num_generations=8 max_completion_length=320 "
        "temperature=1.0 max_steps=300 save_steps=300 max_grad_norm=0.1 report_to=none log_completions=false",
        {},
        {"training.steps": 300, "training.optimizer.warmup_steps": 0.1, "training.prompts_per_step": 1},
    ),
    "an environment behind HTTP": Script(
        "use_vllm=true vllm_mode=colocate num_generations=8 max_completion_length=2048 per_device_train_batch_size=8 "
        "gradient_accumulation_steps=4 reward_weights=[0.2,0.8]",
        {"use_vllm": "built in", "vllm_mode": "built in", "reward_weights": "reward.type"},
        {"training.prompts_per_step": 4, "training.group_size": 8, "rollout.max_tokens": 2048},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, with base.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_is_translated_and_the_rest_refused_at_once(script: Script) -> None:
    words = script.words.split()
    if script.refused:
        lines = refusal_of("", *words).splitlines()
        named = {line.split("=")[0]: line for line in lines}
        assert set(named) == set(script.refused)
        assert all(remedy in named[word] for word, remedy in script.refused.items()), lines
    kept = [word for word in words if word.split("=")[0] not in script.refused]
    settings = asdict(build_config(compose_base("", *kept)))
    assert {key: reduce(getitem, full_key(key).split("."), settings) for key in script.becomes} == script.becomes
