"""Writes a safetensors file one tensor at a time, so that not all of them are in memory at once.

The format is a length, a header in JSON, and the bytes: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor to be written; `load` gives its values when its turn has come."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


def write_tensors(path: Path | None, tensors: Mapping[str, StoredTensor]) -> None:
    """Write the tensors in the order of their names. Without a path they are only loaded: `load` may be a collective.

    OSError if the disk is full.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        stored = tensors[name]
        begin, end = end, end + math.prod(stored.shape) * stored.dtype.itemsize
        header[name] = {"dtype": _NAMES[stored.dtype], "shape": list(stored.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the bytes of the tensors begin at a multiple of 8
    file = None if path is None else open(path, "wb")  # noqa: SIM115
    try:
        if file is not None:
            file.write(len(text).to_bytes(8, "little") + text)
        for name in sorted(tensors):
            values = tensors[name].load()
            if file is not None:
                file.write(values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    finally:
        if file is not None:
            file.close()
