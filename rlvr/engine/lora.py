"""Low-rank adapters: y = W x + (alpha / rank) B A x. Hu et al. 2021, arXiv:2106.09685.

Each row of a batch names its adapter, so rows of different adapters share one pass over the base weights (peft's own
mixed path cannot train). The model is not rewritten: every linear layer gets one forward hook that adds the low-rank
terms of the current route. The head has no hook. It reads selected tokens of a batch, not its rows, and runs again in
the backward pass, so `LoraBank.head` gives it as a function that includes its adapters. Parameters are fp32 whatever
the model's dtype. Files are in peft's format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlvr.core import rng
from rlvr.engine.engine_options import LoraConfig
from rlvr.engine.model import LanguageModel
from rlvr.engine.policy import Snapshot, use_full_weights

Route = list[tuple["BatchRows | None", Mapping[str, Tensor], float]]  # rows (None: all), adapter weights, scale
ATTENTION = ("attn", "attention")  # names of an attention block's modules
EXPERT_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class BatchRows:
    """Some rows of a batch of `size` rows."""

    rows_M: Tensor
    size: int

    def find(self, layer: str, inputs: Tensor) -> Tensor:
        """Where these rows are in the inputs of a layer, [B, T, D] or, where the model flattens them, [B x T, D]."""
        count, rest = divmod(len(inputs), self.size)
        if rest:
            raise NotImplementedError(
                f"lora: {layer} receives {len(inputs)} tokens of a batch of {self.size} rows, so rows of different "
                "adapters cannot share a pass; leave this layer out of lora.targets"
            )
        if count == 1:
            return self.rows_M
        return (self.rows_M[:, None] * count + torch.arange(count, device=inputs.device)).flatten()


class LoraBank:
    """The adapters' hooks on one model, and the route of the current pass. Its owner is the engine.

    Hooks are installed with the first adapter: without one a pass costs nothing more.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        head = model.module.get_output_embeddings() if hasattr(model.module, "get_output_embeddings") else None
        self.linears = find_linears(model.module)
        self.head_name = next((name for name, layer in self.linears.items() if layer is head), None)
        self.installed = False
        self.route: Route = []

    def install(self) -> None:
        """Add the hooks, once; ValueError if the model has no linear layer to adapt."""
        if self.installed:
            return
        if not self.linears.keys() - {self.head_name}:
            raise ValueError("lora: this model has no linear layer to adapt; use full fine-tuning")
        for name, layer in self.linears.items():
            # A model without a plain head runs it inside its own pass: there it is a layer like any other.
            if name != self.head_name or not self.model.has_plain_head:
                layer.register_forward_hook(self._hook(name))
        self.installed = True

    def _hook(self, name: str):
        def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            return apply_adapters(name, self.route, inputs[0], output)

        return add

    def head(self, rows: Sequence[Snapshot]) -> Callable[[Tensor], Tensor]:
        """The head with its adapters: one snapshot for all inputs, else `rows[i]` for input i."""
        down = f"{self.head_name}.lora_A.weight"
        if not self.model.has_plain_head or not any(down in s.tensors for s in rows):
            return self.model.head
        route, name = self._route(rows), self.head_name
        assert name is not None
        return lambda hidden_ND: apply_adapters(name, route, hidden_ND, self.model.head(hidden_ND))

    def find_layers(self, targets: Sequence[str]) -> list[str]:
        """Full names of the layers that match `targets`, as peft reads them; ValueError for a target without a match.

        A target is a layer's own name (`q_proj`), the end of its path (`attn.c_proj`) or all of it. Without targets:
        every layer that loads in peft (`find_portable`) but the head.
        """
        if not targets:
            return [name for name in find_portable(self.model.module) if name != self.head_name]
        ends = {target: [n for n in self.linears if n == target or n.endswith(f".{target}")] for target in targets}
        if missing := [target for target, names in ends.items() if not names]:
            known = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in self.linears}))
            raise ValueError(f"lora.targets: {', '.join(missing)} not among this model's linear layers: {known}")
        matches = {name for names in ends.values() for name in names}
        return [name for name in self.linears if name in matches]

    def init_weights(self, config: LoraConfig, seed: int) -> dict[str, nn.Parameter]:
        """New adapter weights: A uniform (Kaiming, a = sqrt 5, as peft), B zero, so the policy starts as the base."""
        self.install()
        weights: dict[str, nn.Parameter] = {}
        for name in self.find_layers(config.targets):
            width_in, width_out = self.widths(name)
            device = self.linears[name].weight.device
            generator = torch.Generator().manual_seed(rng.key("lora", seed, name))
            bound = 1 / math.sqrt(width_in)
            down = (torch.rand(config.rank, width_in, generator=generator) * 2 - 1) * bound
            weights[f"{name}.lora_A.weight"] = nn.Parameter(down.to(device))
            weights[f"{name}.lora_B.weight"] = nn.Parameter(torch.zeros(width_out, config.rank, device=device))
        return weights

    def widths(self, name: str) -> tuple[int, int]:
        """Input and output width of layer `name`. GPT-2's Conv1D is a linear layer with its weight transposed."""
        layer = self.linears[name]
        first, second = layer.weight.shape
        return (first, second) if isinstance(layer, Conv1D) else (second, first)

    def _route(self, rows: Sequence[Snapshot]) -> Route:
        """Each adapter with its rows. A row of the base model is in no entry."""
        distinct = list({id(s.tensors): s for s in rows}.values())
        if len(distinct) == 1:
            return [(None, distinct[0].tensors, distinct[0].scale)] if distinct[0].tensors else []
        members = {id(s.tensors): [i for i, r in enumerate(rows) if r.tensors is s.tensors] for s in distinct}
        device = self.model.device
        return [
            (BatchRows(torch.tensor(members[id(s.tensors)], device=device), len(rows)), s.tensors, s.scale)
            for s in distinct
            if s.tensors
        ]

    @contextmanager
    def use_adapters(self, rows: Sequence[Snapshot]) -> Iterator[None]:
        """Send a batch through its adapters: one snapshot for all rows, or one per row."""
        self.route = self._route(rows)
        try:
            yield
        finally:
            self.route = []


def apply_adapters(name: str, route: Route, inputs: Tensor, output: Tensor) -> Tensor:
    """Add the low-rank terms of the route's adapters to the `output` of layer `name` for `inputs`."""
    down_name, up_name = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
    for rows, weights, scale in route:
        if down_name not in weights:
            continue
        down, up = weights[down_name].to(output.dtype), weights[up_name].to(output.dtype)
        at = None if rows is None else rows.find(name, inputs)
        x = inputs if at is None else inputs[at]
        term = nn.functional.linear(nn.functional.linear(x, down), up) * scale
        output = output + term if at is None else output.index_add(0, at, term)
    return output


def find_linears(module: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers by name. A subclass that multiplies in another way (DeepSeek-V4's groups) is none."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D)) and type(layer).forward in (nn.Linear.forward, Conv1D.forward)
    }


def find_portable(module: nn.Module) -> dict[str, nn.Linear | Conv1D]:
    """The linear layers, by name, whose adapters load in peft.

    Two kinds do not. In a mixture of experts peft takes a dense layer or a shared expert for the experts, if it has a
    name of theirs. And it refuses the `out_proj` of a state-space mixer, which fused kernels read without calling it.
    """
    modules = list(module.modules())
    is_mixture = any(hasattr(m, "is_transposed") for m in modules)
    outputs = [getattr(m, "out_proj", None) for m in modules if hasattr(m, "A_log") and hasattr(m, "D")]
    return {
        name: layer
        for name, layer in find_linears(module).items()
        if not any(layer is output for output in outputs)
        and not (is_mixture and name.rsplit(".", 1)[-1] in EXPERT_PARTS)
    }


@contextmanager
def use_weights(model: LanguageModel, bank: LoraBank, rows: Sequence[Snapshot]) -> Iterator[Callable[[Tensor], Tensor]]:
    """Run the model with the weights of one snapshot, or of one per row of the batch; yields the head with adapters.

    With adapters the head may be used after the context too: the backward pass runs it again.
    """
    with use_full_weights(rows[0]):
        if not bank.installed or rows[0].is_full:
            yield model.head
        else:
            with bank.use_adapters(rows):
                yield bank.head(rows)


def lora_targets(model: LanguageModel, *, attn: bool, mlp: bool, unembed: bool) -> tuple[str, ...]:
    """`LoraConfig.targets` by role: the linear layers of attention blocks, all other layers, the head.

    A layer's path decides: `h.0.attn.c_proj` is attention, `h.0.mlp.c_proj` and a layer outside any attention block
    (OPT's `fc1`) are not. An adapter on a head that is tied to the embedding changes the head alone.
    """
    head = model.module.get_output_embeddings()
    targets: list[str] = []
    for name, layer in find_portable(model.module).items():
        attends = any(word in part for part in name.split(".")[:-1] for word in ATTENTION)
        if unembed if layer is head else attn if attends else mlp:
            targets.append(name)
    if not targets:
        raise ValueError(
            f"lora: attn={attn}, mlp={mlp}, unembed={unembed} adapts no linear layer of this model; choose another part"
        )
    return tuple(targets)
