"""Adapters on disk, in peft's format: `adapter_config.json` and `adapter_model.safetensors`.

Adapters written by peft load here, and ours load in peft. Variants that change the formula (DoRA, rsLoRA, ranks that
differ between layers, trained biases or whole modules) are refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rlvr.core.files import find_damage, read_json
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.lora import LoraBank
from rlvr.engine.model import LanguageModel
from rlvr.engine.policy import VALUE_HEAD, VALUE_HEAD_FILE, Policy, name_weights, tensors_sha256

PEFT_PREFIX = "base_model.model."
REMEDY = "load another checkpoint, or train anew"
_VARIANTS = (
    "use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "target_parameters",
    "alora_invocation_tokens", "layer_replication", "trainable_token_indices", "use_qalora", "use_bdlora",
    "arrow_config", "corda_config", "eva_config", "loftq_config",
)  # fmt: skip
_PLAIN_STARTS = (None, True, False, "gaussian")  # of `init_lora_weights`: the others change the weights of the base
_PARTS = (".lora_A.weight", ".lora_B.weight")


def write_adapter(folder: Path, policy: Policy, model: LanguageModel) -> None:
    parameters = {key: p for key, p in policy.parameters.items() if key != VALUE_HEAD}
    weights = {PEFT_PREFIX + key: p.detach().cpu().contiguous() for key, p in parameters.items()}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(_config(policy, model), indent=2))


def _config(policy: Policy, model: LanguageModel) -> dict[str, Any]:
    assert policy.lora is not None
    names = sorted({_layer_name(key) for key in policy.parameters if key != VALUE_HEAD})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": policy.lora.rank,
        "lora_alpha": policy.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": short_names(names, [name for name, _ in model.module.named_modules()]),
        "inference_mode": True,
        "fan_in_fan_out": any(isinstance(model.module.get_submodule(name), Conv1D) for name in names),
    }


def short_names(chosen: Sequence[str], known: Sequence[str]) -> list[str]:
    """The shortest path ends that match the `chosen` of the `known` modules and no other: `q_proj`."""
    others = set(known) - set(chosen)

    def shortest(name: str) -> str:
        parts = name.split(".")
        ends = [".".join(parts[-n:]) for n in range(1, len(parts))]
        return next((end for end in ends if not any(o == end or o.endswith(f".{end}") for o in others)), name)

    return sorted({shortest(name) for name in chosen})


def read_lora_config(folder: Path) -> LoraConfig:
    """The `LoraConfig` with which to create the policy of a saved adapter; `targets` are its layers' full names."""
    config = _read_config(folder)
    try:
        with safe_open(folder / "adapter_model.safetensors", "pt") as file:
            layers = {_layer_name(key.removeprefix(PEFT_PREFIX)) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"adapter {folder} cannot be read ({error}); {REMEDY}") from error
    return LoraConfig(config.rank, config.alpha, tuple(sorted(layers)))


def read_adapter(folder: Path, bank: LoraBank) -> tuple[LoraConfig, dict[str, Tensor], str]:
    """Read an adapter for the bank's model: its config, its fp32 weights on the model's device, its fingerprint.

    Checksums and the hash in the folder, if any, must match. ValueError naming what does not fit.
    """
    if (folder / "checksums.json").exists() and (wrong := find_damage(folder)):
        raise ValueError(f"adapter {folder} is damaged: {wrong}; give another one")
    if (folder / VALUE_HEAD_FILE).exists():
        raise ValueError(f"adapter {folder} is a critic's, which predicts values and no tokens; give the policy's")
    config = _read_config(folder)
    try:
        stored = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"adapter {folder} cannot be read ({error}); {REMEDY}") from error
    weights = {key.removeprefix(PEFT_PREFIX): value.float() for key, value in stored.items()}
    layers = {_layer_name(key) for key in weights}
    for key in sorted({layer + part for layer in layers for part in _PARTS} ^ weights.keys()):
        problem = "is missing" if key not in weights else "is not a weight of a low-rank adapter"
        raise ValueError(f"adapter {folder} does not fit this model: {key} {problem}")
    for layer in sorted(layers):
        if layer not in bank.linears:
            raise ValueError(f"adapter {folder} does not fit this model: it has no linear layer {layer}")
        width_in, width_out = bank.widths(layer)
        for part, expected in zip(_PARTS, ((config.rank, width_in), (width_out, config.rank)), strict=True):
            if (shape := tuple(weights[layer + part].shape)) != expected:
                raise ValueError(
                    f"adapter {folder} does not fit this model: {layer}{part} has shape {list(shape)}, expected "
                    f"{list(expected)}"
                )
    sha256 = tensors_sha256(weights)
    fingerprint = f"{folder.name}@{sha256[:12]}"
    if (folder / "policy.json").exists():
        counters = read_json(folder / "policy.json", "the counters of a policy", REMEDY)
        if counters.get("weights_sha256") != sha256:
            raise ValueError(
                f"adapter {folder}: the weights do not have the hash recorded in policy.json; give another one"
            )
        fingerprint = name_weights(str(counters.get("name")), counters.get("version"), counters.get("edits"))
    return config, {key: value.to(bank.model.device) for key, value in weights.items()}, fingerprint


def _read_config(folder: Path) -> LoraConfig:
    config = read_json(folder / "adapter_config.json", "the config of an adapter", REMEDY)
    if variants := [name for name in _VARIANTS if config.get(name)]:
        raise ValueError(f"adapter {folder}: {', '.join(variants)} is not supported, expected plain LoRA")
    if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise ValueError(
            f"adapter {folder} has init_lora_weights={start!r}, which changes the weights of its base model; merge it "
            "into the base with peft (`merge_and_unload`), or convert it to plain LoRA there"
        )
    if config.get("bias", "none") != "none":
        raise ValueError(
            f"adapter {folder} has bias={config['bias']!r}, expected 'none': trained biases are not supported"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)) or rank < 1 or not 0 < alpha < math.inf:
        raise ValueError(f"adapter {folder} has rank {rank!r} and alpha {alpha!r}, expected numbers above 0; {REMEDY}")
    return LoraConfig(rank, float(alpha))


def _layer_name(key: str) -> str:
    return key.rsplit(".lora_", 1)[0]
