"""Muon: steps of orthogonalized momentum for the weight matrices inside a model (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/).

Embeddings, the output layer, norms and biases stay with AdamW, as there. This is not `torch.optim.Muon`, because that
one multiplies in bfloat16, which processors without such instructions emulate (14 times slower, and rounded otherwise),
and it takes no stacked matrices (the experts of a mixture). It has not been timed on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlvr.core.messages import MuonParams
from rlvr.engine.policy import Policy
from rlvr.engine.sharding import gather_all, take_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration: steep at 0, so five rounds do
ROUNDS = 5
CHUNK_BYTES = 1 << 26  # of updates that are orthogonalized at once: a step takes about ten times as much beside


def hidden_matrices(module: nn.Module) -> dict[str, bool]:
    """The names of the weights that Muon steps, each with whether it is stored as [in, out].

    These are the weights of linear layers, without the output layer and what is tied to an embedding, and the stacked
    experts of transformers' mixtures. Weights of any other kind of layer stay with AdamW.
    """
    output = getattr(module, "get_output_embeddings", lambda: None)()
    embeddings = [m for m in (*module.modules(), output) if isinstance(m, nn.Embedding) or (m is output and m)]
    excluded = {id(p) for m in embeddings for p in m.parameters()}
    found: dict[str, bool] = {}
    for path, owner in module.named_modules():
        for name, p in owner.named_parameters(path, recurse=False):
            if id(p) in excluded or name.endswith("bias"):
                continue
            if isinstance(owner, (nn.Linear, Conv1D)):
                found[name] = isinstance(owner, Conv1D)
            elif p.ndim == 3 and hasattr(owner, "is_transposed"):
                found[name] = bool(owner.is_transposed)
    return found


def orthogonalize(matrices_BMN: Tensor) -> Tensor:
    """The matrices with their larger singular values moved close to 1, by a Newton-Schulz iteration.

    Those above about 1/300 of a matrix's Frobenius norm become 0.68 to 1.2; smaller ones grow up to 485 times.
    [B, M, N] -> [B, M, N].
    """
    a, b, c = COEFFICIENTS
    tall = matrices_BMN.shape[-2] > matrices_BMN.shape[-1]
    X = matrices_BMN.mT if tall else matrices_BMN
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        S = X @ X.mT
        X = a * X + (b * S + c * (S @ S)) @ X
    return X.mT if tall else X


def step_matrices(policy: Policy, params: MuonParams) -> Iterable[str]:
    """Step a policy's matrices; their names. The other weights are AdamW's."""
    step = partial(sharded_muon_step, likes=policy.parameters) if policy.is_sharded else muon_step
    step(
        {name: policy.masters[name] for name in policy.matrices},
        policy.momenta,
        transposed=policy.matrices,
        learning_rate=params.matrix_learning_rate,
        momentum=params.momentum,
        weight_decay=params.weight_decay,
    )
    return policy.matrices


@torch.no_grad()
def muon_step(
    matrices: Mapping[str, nn.Parameter],
    momenta: dict[str, Tensor],
    *,
    transposed: Mapping[str, bool],
    learning_rate: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Step each matrix by its gradient, with Nesterov's momentum. `momenta` is the state, by name; it is written here.

    The step of a matrix from N inputs to M outputs is `learning_rate` x sqrt(max(1, M / N)). Weight decay is decoupled,
    at `learning_rate`. A matrix without a gradient, or whose gradient is exactly 0 (an expert that no token reached),
    stays as it is: an orthogonalized step has the same size however small the momentum is.
    """
    alike: dict[tuple[torch.Size, torch.device, bool], list[str]] = defaultdict(list)
    for name, matrix in matrices.items():
        if matrix.grad is not None:
            alike[matrix.shape, matrix.device, transposed[name]].append(name)
    for (shape, _, is_transposed), names in alike.items():
        inputs, outputs = shape[-2:] if is_transposed else (shape[-1], shape[-2])
        rate = learning_rate * max(1.0, outputs / inputs) ** 0.5
        # Many at once: the products of a small model's layers cost more to start than to compute.
        most = max(1, CHUNK_BYTES // (4 * shape[-2] * shape[-1]))
        for stacks in _chunks([_as_stacks(n, matrices[n], momenta) for n in names], most):
            _step_stacks(stacks, rate, momentum, learning_rate * weight_decay)


@torch.no_grad()
def sharded_muon_step(
    matrices: Mapping[str, nn.Parameter], momenta: dict[str, Tensor], *, likes: Mapping[str, Any], **options: Any
) -> None:
    """`muon_step` for matrices that are split over processes, in the same way as the tensors `likes`.

    Some at a time are gathered whole, and every rank steps them alike: the work of Muon is not divided.
    """
    batches: list[list[str]] = []
    size = CHUNK_BYTES
    for name, matrix in matrices.items():
        if matrix.grad is not None:
            if size >= CHUNK_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(name)
            size += 4 * likes[name].numel()
    for names in batches:
        parts = [part for name in names for part in _list_parts(name, matrices[name], momenta)]
        whole = iter(gather_all(parts, [likes[name] for name in names for _ in range(3)]))
        weights: dict[str, nn.Parameter] = {}
        averages: dict[str, Tensor] = {}
        for name in names:
            weights[name] = nn.Parameter(next(whole))
            weights[name].grad, averages[name] = next(whole), next(whole)
        muon_step(weights, averages, **options)
        for name in names:
            matrices[name].copy_(take_part(weights[name], likes[name]))
            momenta[name].copy_(take_part(averages[name], likes[name]))


def _as_stacks(name: str, matrix: nn.Parameter, momenta: dict[str, Tensor]) -> list[Tensor]:
    """The weight, gradient and momentum [E, M, N] of a matrix (E = 1) or a stack of them."""
    return [t[None] if t.ndim == 2 else t for t in _list_parts(name, matrix, momenta)]


def _list_parts(name: str, matrix: nn.Parameter, momenta: dict[str, Tensor]) -> list[Tensor]:
    """The weight, its gradient, and its momentum, which begins at zero."""
    assert matrix.grad is not None
    if name not in momenta:
        momenta[name] = torch.zeros_like(matrix.grad)
    return [matrix.detach(), matrix.grad, momenta[name]]


def _chunks(entries: Sequence[list[Tensor]], most: int) -> Iterator[list[tuple[Tensor, ...]]]:
    """Cut and join the entries' stacks into lists that hold at most so many matrices together."""
    chunk: list[tuple[Tensor, ...]] = []
    for part in (part for tensors in entries for part in zip(*(t.split(most) for t in tensors), strict=True)):
        if chunk and sum(len(weights) for weights, *_ in chunk) + len(part[0]) > most:
            yield chunk
            chunk = []
        chunk.append(part)
    yield chunk


def _step_stacks(stacks: Sequence[tuple[Tensor, ...]], rate: float, momentum: float, decay: float) -> None:
    weights, gradients, buffers = (torch.cat(parts) for parts in zip(*stacks, strict=True))
    has_gradient = (gradients != 0).any(-1).any(-1)[:, None, None]
    averages = buffers.lerp(gradients, 1 - momentum)
    updates = orthogonalize(gradients.lerp(averages, momentum))
    stepped = (weights * (1 - decay)).add_(updates, alpha=-rate)
    sizes = [len(part[0]) for part in stacks]
    new_weights, new_buffers = (
        torch.where(has_gradient, new, old).split(sizes) for new, old in ((stepped, weights), (averages, buffers))
    )
    for (weight, _, buffer), new_weight, new_buffer in zip(stacks, new_weights, new_buffers, strict=True):
        weight.copy_(new_weight)
        buffer.copy_(new_buffer)
