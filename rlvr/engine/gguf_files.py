"""Models in GGUF files (those of llama.cpp), read once into an ordinary model folder.

`model.name` may be a file, a folder with one, or the name of an installed package that ships one. The folder is made in
the user's cache with dequantized float32 weights, so whatever reads a model folder reads this one: the engine, peft,
vLLM, a plan. Its `origin.json` names the file, its SHA-256 and how the weights were quantized.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlvr.core.error_text import first_line
from rlvr.core.files import find_damage, new_folder, sha256
from rlvr.core.machine import free_memory
from rlvr.core.weights_place import GGUF_MAGIC, find_gguf, read_magic

ORIGIN = "origin.json"
EXTRA = "pip install 'rlvr[gguf]'"
PACKAGES = ("accelerate", "gguf")  # with which `transformers` reads a file
UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, RuntimeError, NotImplementedError)


def open_gguf(name: str) -> str:
    """The folder of the model that a GGUF file holds, made on the first call; other names are returned as they are.

    ValueError, with the remedy, for a file that is missing, damaged, or of a kind that `transformers` cannot read, and
    where the machine has too little memory for its weights in float32.
    """
    file = find_gguf(name)
    if file is None:
        return name
    where = f"model.name={name!r}"
    try:
        magic = read_magic(file)
    except OSError as error:
        raise ValueError(f"{where}: {file} cannot be read: {error.strerror}") from None
    if magic != GGUF_MAGIC:
        raise ValueError(f"{where}: {file} is not a GGUF file (it begins with {magic!r} and not with b'GGUF')")
    folder = _cache() / f"{file.stem}-{sha256(file)[:12]}"
    if not (folder / ORIGIN).exists() or find_damage(folder):
        if missing := [name for name in PACKAGES if find_spec(name) is None]:
            raise ValueError(f"{where}: reading a GGUF file needs the package {' and '.join(missing)}: {EXTRA}")
        _convert(file, folder, where)
    return str(folder)


def read_origin(folder: Path) -> dict[str, Any]:
    """What `origin.json` says of a folder made from a GGUF file; empty for another folder."""
    try:
        return json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def describe_origin(origin: dict[str, Any]) -> str:
    """Where the weights come from, as a sentence."""
    return (
        f"the weights were read from {origin['file']}, quantized as {origin['quantization']}, into float32: they "
        "keep that rounding, and what a run saves is an ordinary model folder"
    )


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rlvr" / "gguf"


def _convert(file: Path, folder: Path, where: str) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    try:
        kinds, weights = _count_weights(file)
        _check_memory(weights, where)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
        module: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    except ImportError as error:  # some tokenizers need further packages
        raise ValueError(f"{where}: {file.name} needs a package that is missing: {first_line(error)}") from error
    except UNREADABLE as error:
        raise ValueError(
            f"{where}: transformers {transformers.__version__} cannot read {file.name}: {first_line(error)}; the file "
            "may be cut short, or its architecture or quantization unknown: download it again, or give the model's "
            "own folder or hub name"
        ) from error
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config  # the weights are no longer quantized
    module.hf_quantizer = None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(folder) as made:
        module.save_pretrained(made)
        tokenizer.save_pretrained(made)
        quantization = max(kinds, key=lambda kind: kinds[kind])
        origin = {"file": file.name, "sha256": sha256(file), "quantization": quantization, "weights": kinds}
        (made / ORIGIN).write_text(json.dumps(origin, indent=2), encoding="utf-8")


def _count_weights(file: Path) -> tuple[dict[str, int], int]:
    """Weights by their type in the file (Q4_1, F32, ...), and their sum."""
    from gguf import GGUFReader

    kinds = Counter[str]()
    for tensor in GGUFReader(file).tensors:
        kinds[tensor.tensor_type.name] += int(tensor.n_elements)
    if not kinds:
        raise ValueError("it holds no weights")
    return dict(kinds), sum(kinds.values())


def _check_memory(weights: int, where: str) -> None:
    """ValueError unless the machine has the memory that the conversion takes: two copies in float32."""
    needed, free = 2 * 4 * weights, free_memory()
    if free < needed:
        raise ValueError(
            f"{where}: reading {weights / 1e6:,.0f} M weights takes {needed / 2**30:.1f} GiB of memory, and "
            f"{free / 2**30:.1f} GiB are free; end other programs or take a smaller model"
        )
