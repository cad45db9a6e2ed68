"""`TensorData`: the arrays that travel between loops and engines, as numpy holds them.

Built from whatever the code of a loop has at hand: lists, numpy arrays, torch tensors, the sparse rows of the public
`tinker` SDK. Left out on purpose: any other dtype than float32 and int64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

DTYPES = {"float32": np.float32, "int64": np.int64}


@dataclass(frozen=True, eq=False, init=False)
class TensorData:
    """A numeric array on its way to or from an engine: float32 or int64, any shape.

    From anything array-like: `TensorData.of([0.5, 1.0])`, `TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2])`.
    Given rows in CSR form (`sparse_crow_indices`, `sparse_col_indices`, `shape`), it holds the dense array.
    """

    data: np.ndarray

    def __init__(
        self,
        data: Any = None,
        dtype: str | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | None = None,
        sparse_col_indices: Sequence[int] | None = None,
    ) -> None:
        if dtype not in (None, *DTYPES):
            raise ValueError(f"TensorData: dtype={dtype!r}, expected {' or '.join(DTYPES)}")
        array = as_array([] if data is None else data)
        if array.dtype.kind not in "iubf":
            raise ValueError(f"TensorData: {array.dtype} values, expected a rectangular array of numbers")
        array = array.astype(DTYPES[dtype or ("int64" if array.dtype.kind in "iub" else "float32")], copy=False)
        if sparse_crow_indices is not None:
            array = _dense(array, sparse_crow_indices, sparse_col_indices or (), shape or ())
        elif shape is not None:
            if math.prod(shape) != array.size:
                raise ValueError(f"TensorData: {array.size} values do not fill the shape {list(shape)}")
            array = array.reshape(shape)
        object.__setattr__(self, "data", array)

    @classmethod
    def of(cls, values: Any) -> TensorData:
        """A copy of a list, a numpy array or anything array-like (a torch tensor too)."""
        return cls(np.array(as_array(values)))

    @classmethod
    def from_numpy(cls, array: np.ndarray) -> TensorData:
        return cls.of(array)

    @classmethod
    def from_torch(cls, tensor: Any) -> TensorData:
        return cls.of(tensor)

    def to_numpy(self) -> np.ndarray:
        return self.data

    def to_torch(self) -> Any:
        """A copy as a torch tensor on the CPU."""
        import torch

        return torch.from_numpy(self.data.copy())  # pyright: ignore[reportUnknownMemberType]

    def tolist(self) -> list[Any]:
        return self.data.tolist()

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> str:
        return "int64" if self.data.dtype.kind == "i" else "float32"


def as_array(values: Any) -> np.ndarray:
    """As numpy sees it; a torch tensor (on any device, of any float type, with gradients or not) by its values."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(f"TensorData: not a rectangular array of numbers ({error})") from error


def _dense(
    values_N: np.ndarray, crow_indices: Sequence[int], col_indices: Sequence[int], shape: Sequence[int]
) -> np.ndarray:
    """A dense matrix from compressed sparse rows; entries that are not listed are 0."""
    starts, columns = np.asarray(crow_indices, dtype=np.int64), np.asarray(col_indices, dtype=np.int64)
    counts = np.diff(starts)
    fits = len(shape) == 2 and len(starts) == shape[0] + 1 and values_N.shape == columns.shape == (counts.sum(),)
    if not fits or starts[0] != 0 or (counts < 0).any() or ((columns < 0) | (columns >= shape[1])).any():
        raise ValueError(
            f"TensorData: {values_N.size} values with {len(starts)} row starts and {columns.size} columns are not a "
            f"CSR matrix of shape {list(shape)}"
        )
    array = np.zeros(shape, dtype=values_N.dtype)
    array[np.repeat(np.arange(shape[0]), counts), columns] = values_N
    return array
