"""Files of tensors written one by one are what the safetensors library reads."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from rlvr.engine.checkpoint import StoredTensor, write_tensors


def store(tensor: torch.Tensor) -> StoredTensor:
    return StoredTensor(tensor.dtype, tuple(tensor.shape), lambda: tensor)


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6.0).view(2, 3).T,  # not contiguous
        "a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4),
    }
    write_tensors(tmp_path / "ours", {name: store(tensor) for name, tensor in tensors.items()})
    read = load_file(tmp_path / "ours")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)


def test_tensors_are_loaded_one_at_a_time_and_also_without_a_file(tmp_path: Path) -> None:
    loaded: list[str] = []

    def load(name: str) -> torch.Tensor:
        loaded.append(name)
        return torch.zeros(2)

    lazy = {name: StoredTensor(torch.float32, (2,), lambda name=name: load(name)) for name in "ba"}
    write_tensors(None, lazy)
    write_tensors(tmp_path / "file", lazy)
    assert loaded == ["a", "b", "a", "b"]
