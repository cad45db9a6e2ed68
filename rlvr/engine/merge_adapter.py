"""Merges a low-rank adapter into the weights of its base model, and writes models that need nothing of this package.

    merge_adapter(model, folder)               # W becomes W + (alpha / rank) B A, each computed in float32
    write_model(folder, model, "bfloat16")

The merged model is rounded once, to the dtype of its weights. An adapter on a head that is tied to the embedding
changes the head alone, so the two are parted first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from rlvr.core.files import read_json
from rlvr.core.weights_place import MODEL_CONFIG
from rlvr.engine.adapter_files import read_adapter
from rlvr.engine.checkpoint import name_failed_write
from rlvr.engine.lora import LoraBank
from rlvr.engine.model import LanguageModel
from rlvr.engine.model_loading import without_output

WRITTEN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_dtype(folder: Path) -> str | None:
    """The dtype that a model folder names for its weights; None if it names none."""
    config = read_json(folder / MODEL_CONFIG, "the config of a model")
    for part in (config, config.get("text_config") or {}):
        if isinstance(name := part.get("dtype") or part.get("torch_dtype"), str):
            return name
    return None


def pick_written(name: str | None, stored: str | None) -> str:
    """The dtype to write: the one that is given, else that of the stored weights. ValueError if it is unknown."""
    dtype = name or (stored if stored in WRITTEN else "float32")
    if dtype not in WRITTEN:
        raise ValueError(f"dtype={dtype!r}: expected {', '.join(WRITTEN)}")
    return dtype


def pick_loaded(written: str, stored: str | None) -> str:
    """The dtype to load a model in: float32, unless bfloat16 weights are written as such, which halves the memory."""
    return "bfloat16" if written == stored == "bfloat16" else "float32"


@torch.no_grad()
def merge_adapter(model: LanguageModel, folder: Path) -> None:
    """Add the adapter in a folder to the model's weights. ValueError naming what does not fit."""
    bank = LoraBank(model)
    config, weights, _ = read_adapter(folder, bank)
    scale = config.alpha / config.rank
    for name in sorted({key.rsplit(".lora_", 1)[0] for key in weights}):
        layer = bank.linears[name]
        if name == bank.head_name:
            _untie_head(model)
        change = scale * (weights[f"{name}.lora_B.weight"] @ weights[f"{name}.lora_A.weight"])
        change = change.T if isinstance(layer, Conv1D) else change
        layer.weight.copy_(layer.weight.float() + change)


def _untie_head(model: LanguageModel) -> None:
    """Give the head weights of its own, if it shares those of the embedding."""
    head, embedding = model.module.get_output_embeddings(), model.module.get_input_embeddings()
    if head.weight is not embedding.weight:
        return
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    for config in (model.module.config, model.module.config.get_text_config()):
        config.tie_word_embeddings = False


def write_model(folder: Path, model: LanguageModel, dtype: str) -> None:
    """Write weights, config, tokenizer and chat template in the form of `transformers`, in one of the dtypes WRITTEN.

    ValueError if a weight is beyond the range of the dtype; OSError if the disk is full.
    """
    module: Any = model.module
    was_finite = {name: bool(p.isfinite().all()) for name, p in module.named_parameters()} if dtype == "float16" else {}
    module.to(WRITTEN[dtype])
    for name, is_finite in was_finite.items():
        if is_finite and not module.get_parameter(name).isfinite().all():
            raise ValueError(f"dtype={dtype}: {name} has values beyond its range; use bfloat16 or float32")
    with name_failed_write(folder), without_output():
        module.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
    add_older_keys(folder)


def add_older_keys(folder: Path) -> None:
    """Give a config the keys of the rotary embedding that programs older than transformers 5 read, beside its own.

    They know no `rope_parameters` and would take a default base without a word: transformers 4, and llama.cpp's
    converter and vLLM of that time. Embeddings that differ between kinds of layers have no such keys.
    """
    config = read_json(folder / MODEL_CONFIG, "the config of a model")
    for part in (config, config.get("text_config") or {}):
        rope = part.get("rope_parameters") or {}
        if "rope_theta" in rope:
            part |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
            if rope.get("rope_type", "default") != "default":
                part["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    (folder / MODEL_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
