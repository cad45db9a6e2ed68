"""Builds and loads models: the device and dtype, the weights, and the probe of what the engine may rely on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlvr.core import rng
from rlvr.engine.model import LanguageModel
from rlvr.engine.model_probe import probe
from rlvr.engine.tokenizer import first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Turn off the progress bar of `transformers`, which would break the live display."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is CUDA if available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device={name}: no CUDA device is visible here; use model.device=cpu or auto")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"model.device={name!r}: {first_line(error)}") from error


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; `auto` is bfloat16 on a CUDA device that supports it, else float32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if name not in DTYPES:
        raise ValueError(f"model.dtype={name!r}: expected auto, {' or '.join(DTYPES)}")
    return DTYPES[name]


def build_model(config: dict[str, Any], tokenizer: Any, *, seed: int, device: str, dtype: str) -> LanguageModel:
    """Build a model with random weights from `config` (`model_type` and fields of its `transformers` config).

    The vocabulary and the special tokens come from the tokenizer. The weights depend on `seed` alone. `device` and
    `dtype` as in `load_model`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    where = pick_device(device)
    fields = dict(config)
    model_type = fields.pop("model_type", None)
    if not model_type:
        raise ValueError("model.config: model_type is missing; give one that transformers knows, e.g. qwen3 or llama")
    try:
        defaults = AutoConfig.for_model(model_type)
        unknown = [name for name in fields if not hasattr(defaults, name)]
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)}: not a field of a {model_type} config; correct or remove it in model.config"
            )
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        full = AutoConfig.for_model(model_type, **{"vocab_size": len(tokenizer), **ids, **fields})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"model.config: {first_line(error)}") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key("weights", seed))
        module = AutoModelForCausalLM.from_config(full, dtype=torch.float32)
    module = module.to(device=where, dtype=pick_dtype(dtype, where))
    return probe(LanguageModel(module, tokenizer, name=f"{model_type} from scratch"))


def load_model(name: str, tokenizer: Any, *, device: str, dtype: str) -> LanguageModel:
    """Load a pretrained model from a local folder or the hub, without running remote code.

    `device` is auto, cpu, cuda or cuda:N; `dtype` auto, float32 or bfloat16. `auto` is a GPU with bfloat16 where there
    is one, else the CPU with float32.
    """
    from transformers import AutoModelForCausalLM

    where = pick_device(device)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not (Path(name).expanduser() / "config.json").exists():
        raise ValueError(f"model.name={name!r}: no such model folder (no config.json there)")
    try:
        with without_progress_bar():
            module: Any = AutoModelForCausalLM.from_pretrained(  # safetensors only: loading a pickle can run code
                str(Path(name).expanduser()) if Path(name).expanduser().exists() else name,
                dtype=pick_dtype(dtype, where),
                use_safetensors=True,
            )
        module = module.to(where)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model.name={name!r} cannot be loaded: {first_line(error)}") from error
    if len(tokenizer) > module.get_input_embeddings().weight.shape[0]:
        raise ValueError(
            f"model.name={name!r}: the tokenizer has {len(tokenizer)} tokens but the model's embedding only "
            f"{module.get_input_embeddings().weight.shape[0]} rows; they do not belong together"
        )
    return probe(LanguageModel(module, tokenizer, name=name))
