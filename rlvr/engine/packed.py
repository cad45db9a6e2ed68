"""Linear layers with their weights laid out for the processor's matrix kernels, while the sampler runs.

torch multiplies by a weight as it lies, transposed, and lays it out for the kernel in every product. A decoding step
has few rows, so that is a good part of its work: with oneDNN's own layout, made once, a product of 16 rows takes about
0.6 of the time in fp32 and half in bf16, one of 256 rows 0.85. It costs a copy of the weights, kept while something
runs and some steps are ahead. Hooks stay (adapters add to the product), and modules are as before after each pass.
Exercised by `tests/test_engine_speed_paths.py`. Left out on purpose: other devices, and layers that are no plain
`nn.Linear`; they go on as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlvr.cores import CGROUP
from rlvr.engine.model import LanguageModel

# Laying a weight out costs about what it saves in so many steps, or in so many rows of one pass.
STEPS_AHEAD, TOKENS_AHEAD = 8, 2048
ROWS = 256  # the layout is chosen for so many; it serves any number
MEMORY_SHARE = 1 / 8  # of the machine's memory: what the copy may take at most


class PackedLinears:
    """The packed weights of one model, made when asked for and dropped when nothing runs."""

    def __init__(self, model: LanguageModel) -> None:
        self.layers = [m for m in model.module.modules() if type(m) is nn.Linear]
        held = sum(layer.weight.nbytes for layer in self.layers)
        if model.device.type != "cpu" or held > MEMORY_SHARE * _memory() or not _works(model.dtype):
            self.layers = []
        self._of: tuple[Any, ...] = ()  # which weights are packed
        self._forwards: list[Callable[[Tensor], Tensor]] = []

    @property
    def holds(self) -> bool:
        return bool(self._forwards)

    @contextmanager
    def used(self, weights: str, *, steps: int, tokens: int) -> Iterator[None]:
        """Run the block's products by packed weights, if `steps` passes or `tokens` in all make that worth while.

        To be entered with the weights in their place; `weights` names them.
        """
        now = (weights, *((layer.weight.data_ptr(), layer.weight._version) for layer in self.layers))
        if now != self._of:
            self.drop()
            if self.layers and (steps >= STEPS_AHEAD or tokens >= TOKENS_AHEAD):
                self._forwards = [_packed(layer) for layer in self.layers]
                self._of = now
        for layer, forward in zip(self.layers, self._forwards, strict=False):
            layer.__dict__["forward"] = forward  # as setting the attribute, without a search among the parameters
        try:
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)

    def drop(self) -> None:
        self._of, self._forwards = (), []


def _packed(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
    product, bias = torch.ops.mkldnn._linear_pointwise.default, layer.bias
    return lambda given: product(given, weight, bias, "none", [], "")


def _works(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operation, and for this type of number: found out by trying it."""
    layer = nn.Linear(48, 32).to(dtype)
    given = torch.ones(3, 1, 48, dtype=dtype)
    with suppress(AttributeError, RuntimeError, NotImplementedError), torch.no_grad():
        return torch.allclose(_packed(layer)(given), layer(given), rtol=0.02, atol=0.02)
    return False


def _memory(group: Path = CGROUP) -> int:
    """What this process may have: the machine's, or its container's limit; 0 where nobody says."""
    found = 0
    with suppress(AttributeError, ValueError, OSError):
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in (group / "memory.max", group / "memory" / "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return min(found, int(limit.read_text()))
    return found
