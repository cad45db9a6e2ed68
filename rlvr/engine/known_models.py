"""Published configs of known models: what a plan needs of them, where none of their files is on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _make_config(kind: str, vocabulary: int, sizes: tuple[int, ...], is_tied: bool, **more: Any) -> Mapping[str, Any]:
    named = dict(zip(_SIZES, sizes, strict=True))
    return {"model_type": kind, "vocab_size": vocabulary, **named, "tie_word_embeddings": is_tied, **more}


KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": _make_config("qwen2", 151936, (896, 4864, 24, 14, 2), True),
    "Qwen3-0.6B": _make_config("qwen3", 151936, (1024, 3072, 28, 16, 8), True, head_dim=128),
    "Llama-3.2-1B": _make_config("llama", 128256, (2048, 8192, 16, 32, 8), True),
    "Qwen2.5-1.5B": _make_config("qwen2", 151936, (1536, 8960, 28, 12, 2), True),
    "Qwen2.5-3B": _make_config("qwen2", 151936, (2048, 11008, 36, 16, 2), True),
    "Qwen3-4B": _make_config("qwen3", 151936, (2560, 9728, 36, 32, 8), True, head_dim=128),
    "Qwen2.5-7B": _make_config("qwen2", 152064, (3584, 18944, 28, 28, 4), False),
    "Llama-3.1-8B": _make_config("llama", 128256, (4096, 14336, 32, 32, 8), False),
    "Qwen2.5-14B": _make_config("qwen2", 152064, (5120, 13824, 48, 40, 8), False),
    "Qwen3-30B-A3B": _make_config(
        "qwen3_moe", 151936, (2048, 6144, 48, 32, 4), False,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "Qwen3-32B": _make_config("qwen3", 151936, (5120, 25600, 64, 64, 8), False, head_dim=128),
    "Llama-3.1-70B": _make_config("llama", 128256, (8192, 28672, 80, 64, 8), False),
    "Qwen2.5-72B": _make_config("qwen2", 152064, (8192, 29568, 80, 64, 8), False),
}  # fmt: skip


def find_known_config(name: str) -> Mapping[str, Any] | None:
    """The config of a known model by its name, with or without its maker's: `Qwen2.5-0.5B`, `qwen/qwen2.5-0.5b`."""
    wanted = name.rpartition("/")[2].lower()
    return next((config for known, config in KNOWN_MODELS.items() if known.lower() == wanted), None)
