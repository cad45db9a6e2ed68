"""What is wrong with the files of a model folder, in a sentence that names the file and says what to do.

    if wrong := find_broken_file(Path("my-model")):
        raise ValueError(f"model.name=my-model: {wrong}")

Of weights only the header is read and compared with the size of the file, so a model of any size takes milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlvr.core.files import read_json
from rlvr.core.weights_place import MODEL_CONFIG, has_adapter

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = {
    MODEL_CONFIG: "the config of a model",  # which may name the class of its tokenizer
    "tokenizer.json": "a tokenizer",
    "tokenizer_config.json": "the config of a tokenizer",
}
_AGAIN = "copy or download it again"
_LFS = b"version https://git-lfs"  # with which a file begins that stands for one that Git did not fetch
_LONGEST = 100_000_000  # bytes of a header, beyond which the format has none


def find_broken_file(folder: Path) -> str:
    """What is wrong with the config or the weights of a model folder, with the remedy; '' if they can be read."""
    try:
        _check_config(folder / MODEL_CONFIG)
        for file in _list_weights(folder):
            _check_weights(file)
    except ValueError as error:
        return str(error)
    return ""


def find_broken_tokenizer(folder: Path) -> str:
    """What is wrong with the files of a tokenizer, with the remedy; '' if they can be read, or are not there."""
    try:
        for name, what in TOKENIZER_FILES.items():
            if (folder / name).exists():
                _read(folder / name, what)
    except ValueError as error:
        return str(error)
    return ""


def _read(file: Path, what: str) -> dict[str, Any]:
    """The object in a JSON file; ValueError with the remedy."""
    if _begins_as_pointer(file):
        raise ValueError(_describe_pointer(file, what))
    return read_json(file, what, _AGAIN)


def _check_config(file: Path) -> None:
    kind = _read(file, "the config of a model").get("model_type")
    if not isinstance(kind, str):
        found = "has no model_type" if kind is None else f"has model_type={kind!r}, expected text"
        raise ValueError(f"{file} {found}; it is no config of transformers, or not a whole one: {_AGAIN}")


def _list_weights(folder: Path) -> Iterator[Path]:
    """The files of weights that transformers loads; ValueError if they are not there."""
    if (folder / WEIGHTS).exists():
        yield folder / WEIGHTS
    elif (index := folder / INDEX).exists():
        table = _read(index, "the shards of a model's weights").get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise ValueError(f"{index} has no weight_map, which names the file of each weight; {_AGAIN}")
        names = sorted(set(table.values()))
        if missing := [name for name in names if not (folder / name).exists()]:
            raise ValueError(
                f"{index} names {len(names)} files of weights, of which {len(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not there ({', '.join(missing[:3])}); copy or download "
                f"{'it' if len(missing) == 1 else 'them'} into the folder"
            )
        yield from (folder / name for name in names)
    elif not has_adapter(folder):
        pickles = sorted(file.name for file in folder.glob("*.bin"))
        remedy = (
            f"{pickles[0]} is a pickle, which can run code as it is loaded: load it with transformers and save it with "
            "`save_pretrained`"
            if pickles
            else "copy or download the weights into the folder, or save them with `save_pretrained`"
        )
        raise ValueError(f"{folder} holds no weights (no {WEIGHTS} and no {INDEX}); {remedy}")


def _check_weights(file: Path) -> None:
    """ValueError unless the file of safetensors has a whole header, and the bytes that the header promises."""
    if _begins_as_pointer(file):
        raise ValueError(_describe_pointer(file, "weights"))
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or (length <= _LONGEST and 8 + length > size):
            raise ValueError(f"{file} is cut short: it ends after {size:,} bytes, within its header; {_AGAIN}")
        try:
            header: Any = json.loads(opened.read(length)) if length <= _LONGEST else None
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            needed = 8 + length + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise ValueError(
                f"{file} is no file of safetensors, or a damaged one: its header cannot be read; {_AGAIN}"
            ) from None
    if size < needed:
        raise ValueError(f"{file} is cut short: it has {size:,} bytes of {needed:,}; {_AGAIN}")


def _begins_as_pointer(file: Path) -> bool:
    if not file.is_file():
        return False
    with open(file, "rb") as opened:
        return opened.read(len(_LFS)) == _LFS


def _describe_pointer(file: Path, what: str) -> str:
    return f"{file} is a pointer of Git LFS and not {what}; run `git lfs pull` in its repository"
