"""Low-rank adapters: y = W x + (alpha / rank) B A x. Hu et al. 2021, arXiv:2106.09685.

Adapters are addressed per row: each row of a batch names its adapter, so that rows of different adapters share one
pass over the base weights (the reason this is ours: peft's own mixed path cannot train). The model is not rewritten;
every adapted linear layer gets one forward hook that adds the low-rank term of the current route. Parameters are fp32
whatever the model's dtype. Files are in peft's format and load there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlvr import draws
from rlvr.engine.options import LoraConfig

Route = list[tuple[Tensor | None, Mapping[str, Tensor], float]]  # rows (None: all), adapter weights, scale


class LoraBank:
    """The hooks on one model, and the route that rows take through them."""

    def __init__(self, module: nn.Module) -> None:
        head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None  # pyright: ignore
        self.linears = {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, (nn.Linear, Conv1D)) and layer is not head
        }
        if not self.linears:
            raise ValueError("lora: this model has no linear layer to adapt; use full fine-tuning")
        self.route: Route = []
        for name, layer in self.linears.items():
            layer.register_forward_hook(self._hook(name))

    def _hook(self, name: str):
        down_name, up_name = f"{name}.lora_A.weight", f"{name}.lora_B.weight"

        def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            for rows, weights, scale in self.route:
                if down_name not in weights:
                    continue
                down, up = weights[down_name].to(output.dtype), weights[up_name].to(output.dtype)
                x = inputs[0] if rows is None else inputs[0][rows]
                term = nn.functional.linear(nn.functional.linear(x, down), up) * scale
                output = output + term if rows is None else output.index_add(0, rows, term)
            return output

        return add

    def targets(self, config: LoraConfig) -> list[str]:
        """Full names of the layers `config` adapts; a target that matches nothing is a ValueError."""
        known = sorted({name.rsplit(".", 1)[-1] for name in self.linears})
        if missing := [t for t in config.targets if t not in known]:
            raise ValueError(
                f"lora.targets: {', '.join(missing)} not among this model's linear layers: {', '.join(known)}"
            )
        return [n for n in self.linears if not config.targets or n.rsplit(".", 1)[-1] in config.targets]

    def new(self, config: LoraConfig, seed: int) -> dict[str, nn.Parameter]:
        """Fresh adapter weights: A uniform (Kaiming, a = sqrt 5, as peft), B zero, so the policy starts as the base."""
        weights: dict[str, nn.Parameter] = {}
        for name in self.targets(config):
            layer = self.linears[name]
            # GPT-2's Conv1D is a linear layer with its weight transposed.
            width_in, width_out = layer.weight.shape if isinstance(layer, Conv1D) else layer.weight.shape[::-1]
            generator = torch.Generator().manual_seed(draws.key("lora", seed, name))
            bound = 1 / math.sqrt(width_in)
            down = (torch.rand(config.rank, width_in, generator=generator) * 2 - 1) * bound
            weights[f"{name}.lora_A.weight"] = nn.Parameter(down.to(layer.weight.device))
            weights[f"{name}.lora_B.weight"] = nn.Parameter(
                torch.zeros(width_out, config.rank, device=layer.weight.device)
            )
        return weights

    @contextmanager
    def routed(self, route: Route) -> Iterator[None]:
        self.route = route
        try:
            yield
        finally:
            self.route = []
