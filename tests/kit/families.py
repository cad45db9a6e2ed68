"""Tiny random models of the families that people train, and what the engine does with each.

`FAMILIES` are built from the config classes of `transformers`, so a test needs no weights. `describe` finds out which
ways the engine takes with a model; `tests/kit/families.json` keeps that, `docs/start/models.md` shows it, and
`tests/engine/test_families.py` holds the numbers behind it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.tiny import LLAMA_LIKE

GOLDEN = Path(__file__).with_suffix(".json")
WINDOW = 8  # shorter than the prompts
HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
ALTERNATING = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Family:
    """One architecture: its `model_type`, the fields of its tiny config, and models that have it."""

    model_type: str
    models: str
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    quick: bool = True

    @property
    def config(self) -> dict[str, Any]:
        """The config to build. Weights of 0.2 keep the distributions of a tiny model away from uniform."""
        base = {} if self.model_type == "gpt2" else LLAMA_LIKE
        return {"model_type": self.model_type, **base, "initializer_range": 0.2, **self.fields}


FAMILIES = {
    f.model_type: f
    for f in (
        Family("llama", "Llama 2 and 3, Yi, SmolLM2, DeepSeek-R1-Distill-Llama"),
        Family("mistral", "Mistral 7B", {"sliding_window": WINDOW}),
        Family("qwen2", "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen"),
        Family("qwen3", "Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
        Family("qwen3_moe", "Qwen3-30B-A3B", MIXTURE),
        Family("mixtral", "Mixtral", {"num_local_experts": 4}, quick=False),
        Family("gemma", "Gemma 1", {"head_dim": 16}, quick=False),
        Family(
            "gemma2", "Gemma 2",
            {**ALTERNATING, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0},
        ),
        Family("gemma3_text", "Gemma 3 (text)", {**ALTERNATING, "query_pre_attn_scalar": 16}),
        Family("phi", "Phi 1, 1.5 and 2"),
        Family("phi3", "Phi 3, Phi 4", {"sliding_window": WINDOW}),
        Family("gpt_oss", "gpt-oss", {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2}),
        Family("olmo3", "OLMo 3", {"sliding_window": WINDOW, "layer_types": ALTERNATING["layer_types"]}, quick=False),
        Family("granite", "Granite 3", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}, quick=False),
        Family(
            "deepseek_v3", "DeepSeek-V3, Moonlight",
            {
                "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16, "v_head_dim": 12, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
                "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            },
        ),
        Family("qwen3_next", "Qwen3-Next", {**HYBRID, **MIXTURE, "shared_expert_intermediate_size": 16}),
        Family("qwen3_5_text", "Qwen3.5 (text)", HYBRID, quick=False),
        Family("falcon_h1", "Falcon-H1", {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}, quick=False),
        Family("lfm2", "LFM2", {"layer_types": ["conv", "full_attention"]}, quick=False),
        Family(
            "granitemoehybrid", "Granite 4",
            {**MAMBA, "num_local_experts": 4, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"],
             "logits_scaling": 4.0},
            quick=False,
        ),
        Family("gpt2", "GPT-2", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}),
    )
}  # fmt: skip


def build(name: str, tokenizer: Any, **more: Any) -> Any:
    """The engine's model of a family, in fp32 on the CPU."""
    from rlvr.engine.model_loading import build_model

    return build_model({**FAMILIES[name].config, **more}, tokenizer, seed=1, device="cpu", dtype="float32")


def describe(name: str, model: Any) -> dict[str, Any]:
    """What the engine does with a model, in the words of `docs/start/models.md`."""
    from rlvr.engine.lora import LoraBank

    bank, module = LoraBank(model), model.module
    adapted = bank.find_layers(())
    left_out = {n.rsplit(".", 1)[-1] for n in bank.linears.keys() - {*adapted, bank.head_name}}
    experts = {n for owner in module.modules() if hasattr(owner, "is_transposed") for n, p in owner.named_parameters()}
    routers = {"router" for m in module.modules() if type(m).__name__.lower().endswith("router")}
    return {
        "models": FAMILIES[name].models,
        "sampling": "cache, shared prompts"
        if model.can_share_prompts
        else "cache"
        if model.can_cache
        else "recomputed",
        "training": "tree rows" if model.can_pack else "padded rows",
        "logits": "in chunks" if model.has_plain_head else "all at once",
        "lora": sorted({layer.rsplit(".", 1)[-1] for layer in adapted}),
        "without_lora": sorted(left_out | {n for n in experts if "bias" not in n}) + sorted(routers),
    }


def read_golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))
