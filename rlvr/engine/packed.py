"""Linear layers with their weights laid out for the processor's matrix kernels, while the sampler runs.

torch multiplies by a weight as it lies, transposed, and lays it out for the kernel in every product. A decoding step
has few rows, so that is a good part of its work: with oneDNN's own layout, made once, a product of 16 rows takes about
0.6 of the time in fp32 and half in bf16, one of 256 rows 0.85. Layers that are given the same rows (queries, keys and
values; gate and up) are one product, for a product of few rows takes about as long as waking the threads for it. It
costs a copy of the weights, kept while something runs and some steps are ahead. Hooks stay (adapters add to the
product), and modules are as before after each pass.
Exercised by `tests/test_engine_speed_paths.py`. Left out on purpose: other devices, and layers that are no plain
`nn.Linear`; they go on as they are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlvr.cores import CGROUP
from rlvr.engine.model import LanguageModel

# Laying a weight out costs about what it saves in so many steps, or in so many rows of one pass.
STEPS_AHEAD, TOKENS_AHEAD = 8, 2048
ROWS = 256  # the layout is chosen for so many; it serves any number
JOINED_ROWS = 512  # of a joint product: with more it saves nothing, and all its parts are held until the last is used
MEMORY_SHARE = 1 / 8  # of the machine's memory: what the copy may take at most


class PackedLinears:
    """The packed weights of one model, made when asked for and dropped when nothing runs."""

    def __init__(self, model: LanguageModel) -> None:
        layers = [m for m in model.module.modules() if type(m) is nn.Linear]
        held = sum(layer.weight.nbytes for layer in layers)
        able = model.device.type == "cpu" and held <= MEMORY_SHARE * _memory() and _works(model.dtype)
        self.groups = _together(model, layers) if able else []
        self.layers = [layer for group in self.groups for layer in group]
        self._of: tuple[Any, ...] = ()  # which weights are packed
        self._products: list[_Product] = []

    @property
    def holds(self) -> bool:
        return bool(self._products)

    @contextmanager
    def used(self, weights: str, *, steps: int, tokens: int) -> Iterator[None]:
        """Run the block's products by packed weights, if `steps` passes or `tokens` in all make that worth while.

        To be entered with the weights in their place; `weights` names them.
        """
        now = (
            weights,
            *(
                (part.data_ptr(), part._version)
                for layer in self.layers
                for part in (layer.weight, layer.bias)
                if part is not None
            ),
        )
        if now != self._of:
            self.drop()
            if self.layers and (steps >= STEPS_AHEAD or tokens >= TOKENS_AHEAD):
                self._products = [_Product(group) for group in self.groups]
                self._of = now
        for product in self._products:
            for layer, forward in zip(product.layers, product.forwards, strict=True):
                layer.__dict__["forward"] = forward  # as setting the attribute, without a search among the parameters
        try:
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)
            for product in self._products:
                product.clear()

    def drop(self) -> None:
        self._of, self._products = (), []


def _together(model: LanguageModel, layers: list[nn.Linear]) -> list[list[nn.Linear]]:
    """The layers, those in one list that a pass gives the same tensor one after the other: found out by a pass."""
    calls: list[tuple[Any, Any, int]] = []  # the tensor's version tells whether it was changed in between

    def called(layer: nn.Module, given: tuple[Any, ...]) -> None:
        calls.append((layer, given[0], given[0]._version) if given else (layer, None, 0))

    hooks = [layer.register_forward_pre_hook(called) for layer in layers]
    try:
        with torch.no_grad():
            model.hidden(torch.zeros(1, 1, dtype=torch.long))
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(layer for layer, *_ in calls)
    groups: list[list[nn.Linear]] = [[layer] for layer in layers if times[layer] != 1]
    before: tuple[Any, int] = (None, 0)
    for layer, given, version in calls:
        if times[layer] != 1:
            before = (None, 0)
            continue
        same = given is not None and given is before[0] and version == before[1]
        if same and (layer.bias is None) == (groups[-1][0].bias is None):
            groups[-1].append(layer)
        else:
            groups.append([layer])
            before = (given, version)
    return groups


class _Product:
    """What layers that are given the same are to do instead: the first that is given a tensor does it for all."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        weights, biases = [layer.weight.detach() for layer in layers], [layer.bias for layer in layers]
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        alone = len(layers) == 1
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weights[0] if alone else torch.cat(weights), ROWS)
        self.bias = biases[0] if alone or biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self.multiply = torch.ops.mkldnn._linear_pointwise.default
        self.forwards = [self.whole] if alone else [partial(self.part, which=i) for i in range(len(layers))]
        self.clear()

    def clear(self) -> None:
        self.given: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def whole(self, given: Tensor) -> Tensor:
        return self.multiply(given, self.weight, self.bias, "none", [], "")

    def part(self, given: Tensor, which: int) -> Tensor:
        if self.given is not given:
            if given.numel() > JOINED_ROWS * given.shape[-1]:
                return nn.functional.linear(given, self.layers[which].weight, self.layers[which].bias)
            self.given, self.parts = given, self.whole(given).split(self.sizes, -1)
        found = self.parts[which]
        if which == len(self.sizes) - 1:
            self.clear()
        return found


def _works(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operation, and for this type of number: found out by trying it."""
    layer = nn.Linear(48, 32).to(dtype)
    given = torch.ones(3, 1, 48, dtype=dtype)
    with suppress(AttributeError, RuntimeError, NotImplementedError), torch.no_grad():
        return torch.allclose(_Product([layer]).whole(given), layer(given), rtol=0.02, atol=0.02)
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
