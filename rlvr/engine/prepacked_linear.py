"""Linear layers with weights in oneDNN's layout, while the sampler runs.

torch reorders a weight for the processor's matrix kernels in every product. A decoding step has few rows, so that is a
good part of its work: with weights prepacked once, a product of 16 rows takes about 0.6 of the time in fp32 and half in
bf16, one of 256 rows 0.85. Layers with the same input (queries, keys and values; gate and up) become one product,
because a product of few rows takes about as long as waking the threads for it. The cost is a copy of the weights, kept
while rows run and steps are ahead. Hooks stay (adapters add to the product), and modules are as before after each pass.
Left out on purpose: other devices, and layers that are not exactly `nn.Linear`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlvr.core.machine import total_memory
from rlvr.engine.model import LanguageModel

# Prepacking costs about what it saves in this many steps, or in this many rows of one pass.
STEPS_AHEAD, TOKENS_AHEAD = 8, 2048
ROWS = 256  # the layout is chosen for this many; it serves any number
JOINED_ROWS = 512  # of a joint product: more save nothing, and all parts stay in memory until the last is used
MEMORY_SHARE = 1 / 8  # of the machine's memory: the most that the copy may take


class PrepackedLinears:
    """The prepacked weights of one model, made on demand and dropped when nothing runs."""

    def __init__(self, model: LanguageModel) -> None:
        layers = [m for m in model.module.modules() if type(m) is nn.Linear]
        size = sum(layer.weight.nbytes for layer in layers)
        supported = model.device.type == "cpu" and size <= MEMORY_SHARE * total_memory() and _works(model.dtype)
        self.groups = _group_by_input(model, layers) if supported else []
        self.layers = [layer for group in self.groups for layer in group]
        self._version: tuple[Any, ...] = ()  # of the weights that are packed
        self._products: list[_Product] = []

    @property
    def is_packed(self) -> bool:
        return bool(self._products)

    @contextmanager
    def use(self, weights: str, *, steps: int, tokens: int) -> Iterator[None]:
        """Use prepacked weights in this context, if `steps` passes or `tokens` tokens make that worthwhile.

        Enter it with the weights in the model; `weights` names them.
        """
        version = (
            weights,
            *(
                (part.data_ptr(), part._version)
                for layer in self.layers
                for part in (layer.weight, layer.bias)
                if part is not None
            ),
        )
        if version != self._version:
            self.drop()
            if self.layers and (steps >= STEPS_AHEAD or tokens >= TOKENS_AHEAD):
                self._products = [_Product(group) for group in self.groups]
                self._version = version
        for product in self._products:
            for layer, forward in zip(product.layers, product.forwards, strict=True):
                layer.__dict__["forward"] = forward  # setting the attribute would search the parameters
        try:
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)
            for product in self._products:
                product.clear()

    def drop(self) -> None:
        self._version, self._products = (), []


def _group_by_input(model: LanguageModel, layers: list[nn.Linear]) -> list[list[nn.Linear]]:
    """Group the layers that receive the same tensor one after the other in a pass, which this runs."""
    calls: list[tuple[Any, Any, int]] = []  # layer, input, version of the input (which tells whether it was changed)

    def record(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        calls.append((layer, inputs[0], inputs[0]._version) if inputs else (layer, None, 0))

    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        with torch.no_grad():
            model.hidden_states(torch.zeros(1, 1, dtype=torch.long))
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(layer for layer, *_ in calls)
    groups: list[list[nn.Linear]] = [[layer] for layer in layers if times[layer] != 1]
    previous: tuple[Any, int] = (None, 0)
    for layer, inputs, version in calls:
        if times[layer] != 1:
            previous = (None, 0)
            continue
        same = inputs is not None and inputs is previous[0] and version == previous[1]
        if same and (layer.bias is None) == (groups[-1][0].bias is None):
            groups[-1].append(layer)
        else:
            groups.append([layer])
            previous = (inputs, version)
    return groups


class _Product:
    """Linear layers with the same input (q, k, v) as one product: the first layer called computes it for all."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        weights, biases = [layer.weight.detach() for layer in layers], [layer.bias for layer in layers]
        self.layers = layers
        self.sizes = [layer.out_features for layer in layers]
        alone = len(layers) == 1
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weights[0] if alone else torch.cat(weights), ROWS)
        self.bias = biases[0] if alone or biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self.multiply = torch.ops.mkldnn._linear_pointwise.default
        self.forwards = [self.run] if alone else [partial(self.run_part, which=i) for i in range(len(layers))]
        self.clear()

    def clear(self) -> None:
        self.inputs: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def run(self, inputs: Tensor) -> Tensor:
        return self.multiply(inputs, self.weight, self.bias, "none", [], "")

    def run_part(self, inputs: Tensor, which: int) -> Tensor:
        if self.inputs is not inputs:
            if inputs.numel() > JOINED_ROWS * inputs.shape[-1]:
                return nn.functional.linear(inputs, self.layers[which].weight, self.layers[which].bias)
            self.inputs, self.parts = inputs, self.run(inputs).split(self.sizes, -1)
        part = self.parts[which]
        if which == len(self.sizes) - 1:
            self.clear()
        return part


def _works(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operation for this dtype; tries it."""
    layer = nn.Linear(48, 32).to(dtype)
    inputs = torch.ones(3, 1, 48, dtype=dtype)
    with suppress(AttributeError, RuntimeError, NotImplementedError), torch.no_grad():
        return torch.allclose(_Product([layer]).run(inputs), layer(inputs), rtol=0.02, atol=0.02)
    return False
