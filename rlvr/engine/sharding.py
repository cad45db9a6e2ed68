"""One model sharded over several processes (ranks): each holds a part of every weight, gradient and optimizer state.

    ranks = Ranks(rank=0, size=2)             # after `torch.distributed.init_process_group`
    shard_model(model, ranks)

torch's `fully_shard` (FSDP2, arXiv:2304.11277) gathers the weights of a block just before the block computes, and
reduce-scatters its gradients right after. Its default is to average gradients; a loss here is a sum, so they are
summed. Every rank takes part in every collective: all of them run the same number of passes (`Ranks.reduce_max`) and
take the same decisions (`Ranks.reduce_all`). On a GPU the same calls go over NCCL; that has not been run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rlvr.engine.model import LanguageModel

T = TypeVar("T")


class Ranks:
    """The processes that compute one optimizer step together, and the `rank` of this one. With `size` 1 no call waits.

    `waited` counts seconds inside collectives: for slower ranks, and for the transfer itself. It stays 0 on a GPU,
    where collectives overlap with computation.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, device
        self.waited = 0.0

    def reduce_max(self, count: int) -> int:
        """The largest `count` of all ranks."""
        return count if self.size == 1 else int(self._reduce(torch.tensor([count]), "MAX"))

    def reduce_all(self, flag: bool) -> bool:
        """Whether `flag` is true on every rank."""
        return flag if self.size == 1 else bool(self._reduce(torch.tensor([int(flag)]), "MIN"))

    def reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        return tensor if self.size == 1 else self._reduce(tensor, "SUM")

    def _reduce(self, tensor: Tensor, how: str) -> Tensor:
        import torch.distributed as dist

        tensor = tensor.to(self.device)
        self.measure(dist.all_reduce, tensor, op=getattr(dist.ReduceOp, how))
        return tensor

    def measure(self, collective: Callable[..., T], *given: Any, **options: Any) -> T:
        """Call a collective, and add its seconds to `waited`."""
        began = time.perf_counter()
        result = collective(*given, **options)
        if self.device == "cpu":
            self.waited += time.perf_counter() - began
        return result


class MeasuredCollective:
    """The collective `name` of torch.distributed, as `fully_shard` calls it; adds its seconds to `ranks.waited`."""

    def __init__(self, ranks: Ranks, name: str) -> None:
        self.ranks, self.name = ranks, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **options: Any) -> Any:
        import torch.distributed as dist

        return self.ranks.measure(getattr(dist, self.name), output_tensor, input_tensor, group=group, **options)


def shard_model(model: LanguageModel, ranks: Ranks) -> None:
    """Keep this rank's part of every weight. Each block is gathered as one unit, and all that is outside as another.

    All ranks call it, with equal weights. A tied embedding is in the same unit as the head, so its gradient is one sum.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    module: Any = model.module
    mesh = init_device_mesh(model.device.type, (ranks.size,))
    blocks = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]
    for unit in (*reversed(blocks), module):
        sharded: Any = fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        if ranks.device == "cpu":
            sharded.set_custom_all_gather(MeasuredCollective(ranks, "all_gather_single"))
            sharded.set_custom_reduce_scatter(MeasuredCollective(ranks, "reduce_scatter_single"))
    module.set_reduce_scatter_unused_params(True)  # a rank whose rows do not reach a weight adds zeros
    module.compute_pass = lambda compute: compute()
    if model.has_plain_head:  # else the head is inside the module's own pass
        register_fsdp_forward_method(module, "compute_pass")
    model.is_sharded = True


def local_part(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds: all of it, unless it is sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def is_sharded(tensor: Any) -> bool:
    """Whether the tensor is a `DTensor`. (Their module takes a second to load, which one process never needs.)"""
    return hasattr(tensor, "to_local")


def take_part(whole: Tensor, like: Any) -> Tensor:
    """The part of `whole` that this process holds if it is sharded (along dimension 0) as `like` is."""
    if not is_sharded(like):
        return whole
    mesh = like.device_mesh
    each = -(-len(whole) // mesh.size())
    return whole[each * mesh.get_local_rank() : each * (mesh.get_local_rank() + 1)]


def gather_whole(part: Tensor, like: Any) -> Tensor:
    """The whole tensor, on every rank; this process holds `part` of it, sharded as `like` is. A collective."""
    return gather_all([part], [like])[0]


def gather_all(parts: Sequence[Tensor], likes: Sequence[Any]) -> list[Tensor]:
    """`gather_whole` of several tensors of one dtype, in one collective."""
    if not is_sharded(likes[0]):
        return list(parts)
    import torch.distributed as dist

    mesh = likes[0].device_mesh
    shapes = [(mesh.size(), -(-len(like) // mesh.size()), *like.shape[1:]) for like in likes]  # ranks, rows of each
    padded = [part.new_zeros(shape[1:]) for part, shape in zip(parts, shapes, strict=True)]
    for place, part in zip(padded, parts, strict=True):
        place[: len(part)] = part
    mine = torch.cat([place.flatten() for place in padded])
    everything = mine.new_empty(mesh.size(), mine.numel())
    dist.all_gather_single(everything.view(-1), mine, group=mesh.get_group())
    pieces = everything.split([place.numel() for place in padded], dim=1)
    return [
        piece.reshape(shape).flatten(0, 1)[: len(like)].contiguous()
        for piece, shape, like in zip(pieces, shapes, likes, strict=True)
    ]
