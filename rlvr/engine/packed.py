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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
                self._forwards = [forward for group in self.groups for forward in _packed(group)]
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


def _together(model: LanguageModel, layers: list[nn.Linear]) -> list[list[nn.Linear]]:
    """The layers, those in one list that a pass gives the same tensor one after the other: found out by a pass."""
    calls: list[tuple[Any, Any]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, given: calls.append((module, given[0] if given else None)))
        for layer in layers
    ]
    try:
        with torch.no_grad():
            model.hidden(torch.zeros(1, 1, dtype=torch.long))
    finally:
        for hook in hooks:
            hook.remove()
    times = Counter(layer for layer, _ in calls)
    groups: list[list[nn.Linear]] = [[layer] for layer in layers if times[layer] != 1]
    before: Any = None
    for layer, given in calls:
        if times[layer] != 1:
            before = None
        elif given is not None and given is before and (layer.bias is None) == (groups[-1][0].bias is None):
            groups[-1].append(layer)
        else:
            groups.append([layer])
            before = given
    return groups


def _packed(group: list[nn.Linear]) -> list[Callable[[Tensor], Tensor]]:
    """What each layer of a group is to do instead. The first that is given a tensor computes it for all of them."""
    product, biases = torch.ops.mkldnn._linear_pointwise.default, [layer.bias for layer in group]
    joined = group[0].weight.detach() if len(group) == 1 else torch.cat([layer.weight.detach() for layer in group])
    weight = torch.ops.mkldnn._reorder_linear_weight(joined, ROWS)
    if len(group) == 1:
        return [lambda given: product(given, weight, biases[0], "none", [], "")]
    bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
    sizes, held = [layer.out_features for layer in group], _Held()

    def part(given: Tensor, which: int) -> Tensor:
        if held.given is not given:
            held.given, held.parts = given, product(given, weight, bias, "none", [], "").split(sizes, -1)
        found = held.parts[which]
        if which == len(sizes) - 1:
            held.given, held.parts = None, ()
        return found

    return [partial(part, which=which) for which in range(len(group))]


@dataclass
class _Held:
    """What a group was given last, until the last of its layers has been asked, and its products."""

    given: Tensor | None = None
    parts: tuple[Tensor, ...] = ()


def _works(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operation, and for this type of number: found out by trying it."""
    layer = nn.Linear(48, 32).to(dtype)
    given = torch.ones(3, 1, 48, dtype=dtype)
    with suppress(AttributeError, RuntimeError, NotImplementedError), torch.no_grad():
        return torch.allclose(_packed([layer])[0](given), layer(given), rtol=0.02, atol=0.02)
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
