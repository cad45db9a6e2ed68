"""`target_prompt_logprobs`: the tensor of token ids whose log-probs a client asks for, and the tensor of its answer.

Row i is about place i + 1 of the prompt. The tensor is dense or of compressed sparse rows, and so is its answer, in the
same shape; a cell of -1 asks for nothing and gets 0. A sparse tensor is never expanded. Exercised by
tests/test_tinker_wire.py and, with the real SDK, by tests/test_tinker_sdk.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr.core.messages import PromptTargets
from rlvr.tinker_server.protocol import proto
from rlvr.tinker_server.protocol.wire import find_sparse_cells

NOTHING = -1
_FIELDS = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")


@dataclass(frozen=True, eq=False)
class RequestedTargets:
    """Ids [N] in the cells [N], counted row by row, of a tensor of this shape; `csr`: the indices of a sparse one."""

    shape: tuple[int, int]
    ids_N: np.ndarray
    cells_N: np.ndarray
    csr: tuple[np.ndarray, np.ndarray] | None

    @property
    def asked_N(self) -> np.ndarray:
        return self.ids_N != NOTHING

    @property
    def targets(self) -> PromptTargets:
        """What the engine is to score."""
        return PromptTargets(self.cells_N[self.asked_N] // self.shape[1] + 1, self.ids_N[self.asked_N])

    @property
    def content(self) -> bytes:
        """Equal for equal tensors."""
        indices = b"".join(part.tobytes() for part in self.csr or ())
        return f"{self.shape} {self.csr is not None}".encode() + self.ids_N.tobytes() + indices

    def encode(self, logprobs: Sequence[float]) -> Any:
        """The answer: a `Tensor` message."""
        values_N = np.zeros(len(self.ids_N), "<f4")
        values_N[self.asked_N] = logprobs
        message = proto.Tensor(dtype=proto.DTYPE_FLOAT32, shape=self.shape)
        if self.csr is None:
            message.dense = values_N.tobytes()
        else:
            starts, columns = self.csr
            message.sparse_csr.values = values_N.tobytes()
            message.sparse_csr.crow_indices, message.sparse_csr.col_indices = starts.tobytes(), columns.tobytes()
        return message


def read_targets(given: Any) -> RequestedTargets | None:
    """Check and read the JSON of such a tensor; ValueError if it is none."""
    if given is None:
        return None
    if not isinstance(given, dict) or not set(given) <= {*_FIELDS, "type"}:
        raise ValueError(f"expected a tensor with {', '.join(_FIELDS)}")
    if given.get("dtype") != "int64":
        raise ValueError(f"dtype {given.get('dtype')!r:.40}, expected 'int64'")
    shape, ids_N = _integers(given, "shape").tolist(), _integers(given, "data")
    if len(shape) != 2 or any(not 0 < size <= 1 << 31 for size in shape):
        raise ValueError(f"shape {shape[:3]}, expected [tokens of the prompt - 1, ids per token], each at least 1")
    csr = None
    if given.get("sparse_crow_indices") is None:
        if len(ids_N) != math.prod(shape):
            raise ValueError(f"{len(ids_N)} ids do not fill the shape {shape}")
        cells_N = np.arange(len(ids_N))
    else:
        csr = (_integers(given, "sparse_crow_indices"), _integers(given, "sparse_col_indices"))
        cells_N = find_sparse_cells(*csr, len(ids_N), shape, "the tensor")
    if not (ids_N != NOTHING).any():
        raise ValueError(
            f"every id is {NOTHING}, which asks for no log-prob; give at least one token id, or leave the field out"
        )
    return RequestedTargets((shape[0], shape[1]), ids_N, cells_N, csr)


def _integers(given: dict[str, Any], name: str) -> np.ndarray:
    values = given.get(name)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{name}: expected a list of integers")
    try:
        return np.array(values, dtype="<i8")
    except OverflowError:
        raise ValueError(f"{name}: an integer beyond 64 bits") from None
