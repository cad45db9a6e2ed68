"""Builds and loads models: the device and dtype, the weights, and the probe of what the engine may rely on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from rlvr.core import rng
from rlvr.core.error_text import first_line, one_line
from rlvr.core.files import read_json
from rlvr.core.hub_status import describe_hub, reads_cache_only
from rlvr.core.machine import describe_processor
from rlvr.core.model_files import find_broken_file
from rlvr.core.registry import did_you_mean
from rlvr.core.weights_place import MODEL_CONFIG, is_model
from rlvr.engine.gguf_files import describe_origin, open_gguf, read_origin
from rlvr.engine.model import LanguageModel
from rlvr.engine.model_probe import probe_model

EXPECTED = "a decoder-only language model of text, such as Llama, Qwen or Gemma"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# While transformers makes a model, the process's default dtype, random generator and messages are changed: one thread
# at a time, so that runs in several threads have the weights of their seed.
_MAKING = RLock()


@contextmanager
def without_output() -> Iterator[None]:
    """Turn off the progress bar of `transformers`, which would break the live display, and its reports of weights that
    do not fit, which `load_model` describes itself."""
    from transformers.utils import logging

    with _MAKING:
        was_enabled, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if was_enabled:
                logging.enable_progress_bar()


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is CUDA if available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device={name}: no CUDA device is visible here; use model.device=cpu or auto")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)  # fails where this build of torch has no such device
    except RuntimeError as error:
        raise ValueError(f"model.device={name}: {first_line(error)}; use model.device=cpu or auto") from error
    return device


def describe_device(device: torch.device) -> dict[str, str | int]:
    """What the bits of a computation depend on: the version of torch, threads and device."""
    described: dict[str, str | int] = {"torch": str(torch.__version__), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        return {**described, "device": torch.cuda.get_device_name(device)}
    instructions = torch.backends.cpu.get_cpu_capability()  # they decide how a sum is rounded
    return {**described, "device": str(device), "cpu": describe_processor(), "capability": instructions}


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
    check_is_causal(full, "model.config")
    with _MAKING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.key("weights", seed))
        module = AutoModelForCausalLM.from_config(full, dtype=torch.float32)
    module = module.to(device=where, dtype=pick_dtype(dtype, where))
    return probe_model(LanguageModel(module, tokenizer, name=f"{model_type} from scratch"))


def check_is_causal(config: Any, where: str) -> None:
    """ValueError with the remedy unless `transformers` has a causal language model of text alone for this config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{where}: {kind} is an encoder-decoder model; expected {EXPECTED}")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if senses := _list_senses(config):
        # Some of these have a class of their own for the language model inside, which is then what loads.
        if model_class is None or model_class.config_class is type(config):
            raise ValueError(
                f"{where}: {kind} is a model of text and {senses}; expected {EXPECTED}; docs/start/models.md shows "
                "how to save the language model inside it to a folder of its own"
            )
    elif model_class is None:
        raise ValueError(f"{where}: {kind} is not a causal language model; expected {EXPECTED}")


def _list_senses(config: Any) -> str:
    """What a model reads beside text, in words; empty for a language model."""
    parts = {"vision_config": "images", "audio_config": "sound"}
    return " and ".join(word for name, word in parts.items() if getattr(config, name, None))


def check_model_type(folder: Path, where: str) -> None:
    """ValueError with the remedy if `transformers` does not know the kind of model that a folder's config names."""
    import transformers
    from transformers import CONFIG_MAPPING

    config = read_json(folder / MODEL_CONFIG, "the config of a model")
    if (kind := config["model_type"]) in CONFIG_MAPPING:
        return
    own_code = "; it brings code of its own (auto_map), which is not run" if config.get("auto_map") else ""
    near = did_you_mean(kind, CONFIG_MAPPING.keys(), 0.7)
    raise ValueError(
        f"{where}: {folder / MODEL_CONFIG} has model_type={kind!r}, which transformers {transformers.__version__} does "
        f"not know{near}{own_code}; correct it, install a version of transformers that knows it, or give another model"
    )


def load_model(name: str, tokenizer: Any, *, device: str, dtype: str) -> LanguageModel:
    """Load a pretrained model from a local folder, a GGUF file or the hub, without running remote code.

    `device` is auto, cpu, cuda or cuda:N; `dtype` auto, float32 or bfloat16. `auto` is a GPU with bfloat16 where there
    is one, else the CPU with float32. ValueError, with a remedy, for what the engine cannot train: another kind of
    model, weights that are missing or quantized.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM

    where = pick_device(device)
    name = open_gguf(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not is_model(Path(name).expanduser()):
        raise ValueError(
            f"model.name={name!r}: there is no such model folder (no config.json there); give a folder that "
            "save_pretrained wrote, or a hub name"
        )
    source = str(Path(name).expanduser()) if Path(name).expanduser().exists() else name
    if is_folder := is_model(Path(source)):
        if wrong := find_broken_file(Path(source)):
            raise ValueError(f"model.name={name!r}: {wrong}")
        check_model_type(Path(source), f"model.name={name!r}")
    cache_only = reads_cache_only(source)
    try:
        # Said outright: where it is left open, transformers asks on the terminal whether to run code of the folder.
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=cache_only)
    except Exception as error:  # a config may have any value: each kind of model checks its own, by its own errors
        why = describe_hub() if cache_only else one_line(error)
        if is_folder:
            raise ValueError(
                f"model.name={name!r}: {Path(source) / MODEL_CONFIG} is wrong: {why}; correct it"
            ) from error
        raise ValueError(f"model.name={name!r} cannot be loaded: {why}") from error
    check_is_causal(config, f"model.name={name!r}")
    is_quantized = False
    try:
        with without_output():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=pick_dtype(dtype, where),
                use_safetensors=True,  # loading a pickle can run code
                trust_remote_code=False,
                local_files_only=cache_only,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in `found`, with their names and shapes
            )
        module, found = loaded
        is_quantized = getattr(module, "is_quantized", False)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        is_quantized = isinstance(error, ImportError) and hasattr(config, "quantization_config")
        if not is_quantized:
            raise ValueError(f"model.name={name!r} cannot be loaded: {first_line(error)}") from error
    if is_quantized:  # some formats are dequantized as they are loaded, and trained like any other
        raise ValueError(
            f"model.name={name!r}: the weights are quantized, expected float32 or bfloat16: load the folder with "
            "transformers, call `dequantize()` on the model and save it to another folder"
        )
    module = module.to(where)
    if misfits := sorted(found["mismatched_keys"]):
        weight, stored, expected = misfits[0]
        raise ValueError(
            f"model.name={name!r}: the config and the weights do not belong together: {len(misfits)} weights have "
            f"another shape than the config says ({weight}: {list(stored)} in the file, {list(expected)} by the "
            "config); give both from one model"
        )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"model.name={name!r}: {len(missing)} weights of a {config.model_type} language model are not in the "
            f"folder and would be random ({', '.join(missing[:3])}); a reward model, for one, has no language head: "
            "give the folder of a language model"
        )
    if len(tokenizer) > module.get_input_embeddings().weight.shape[0]:
        raise ValueError(
            f"model.name={name!r}: the tokenizer has {len(tokenizer)} tokens but the model's embedding only "
            f"{module.get_input_embeddings().weight.shape[0]} rows; they do not belong together"
        )
    model = LanguageModel(module, tokenizer, name=name)
    if origin := read_origin(Path(source)):
        model.notes.append(describe_origin(origin))
    if senses := _list_senses(config):
        model.notes.append(f"of this model of text and {senses} only the language model is loaded, trained and saved")
    return probe_model(model)
