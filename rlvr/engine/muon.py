"""Muon: steps of orthogonalized momentum for the weight matrices inside a model (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/).

Embeddings, the output layer, norms and biases stay with AdamW, as there. This is not `torch.optim.Muon`, because that
one multiplies in bfloat16, which processors without such instructions emulate (14 times slower, and rounded otherwise),
and it takes no stacked matrices (the experts of a mixture). Exercised by `python -m pytest tests/test_muon.py`, which
holds it against `torch.optim.Muon` and against a singular value decomposition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration: steep at 0, so five rounds do
ROUNDS = 5


def hidden_matrices(module: nn.Module) -> frozenset[str]:
    """The names of the weights that Muon steps: matrices, single or stacked, of neither embedding nor output layer."""
    output = getattr(module, "get_output_embeddings", lambda: None)()
    others = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d))]
    excluded = {id(p) for m in (*others, output) if m is not None for p in m.parameters()}
    return frozenset(n for n, p in module.named_parameters() if p.ndim in (2, 3) and id(p) not in excluded)


def orthogonalize(matrices_BMN: Tensor) -> Tensor:
    """The matrices with all singular values moved close to 1 (0.7 to 1.2), by a Newton-Schulz iteration.

    [B, M, N] -> [B, M, N]. A matrix of zeros stays one.
    """
    a, b, c = COEFFICIENTS
    tall = matrices_BMN.shape[-2] > matrices_BMN.shape[-1]
    X = matrices_BMN.mT if tall else matrices_BMN
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        S = X @ X.mT
        X = a * X + (b * S + c * (S @ S)) @ X
    return X.mT if tall else X


@torch.no_grad()
def muon_step(
    matrices: Mapping[str, nn.Parameter],
    momenta: dict[str, Tensor],
    *,
    learning_rate: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Step each matrix by its gradient, with Nesterov's momentum. `momenta` is the state, by name; it is written here.

    The step of a matrix [M, N] is `learning_rate` x sqrt(max(1, M / N)), so that outputs change alike in all shapes.
    Weight decay is decoupled.
    """
    same_shape: dict[tuple[torch.Size, torch.device], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
    for name, matrix in matrices.items():
        gradient = matrix.grad
        if gradient is None:
            continue
        buffer = momenta.setdefault(name, torch.zeros_like(gradient)).lerp_(gradient, 1 - momentum)
        same_shape[matrix.shape, matrix.device].append((matrix, gradient.lerp(buffer, momentum)))
    for (shape, _), entries in same_shape.items():
        # One product for all layers: those of a small model cost more to start than to compute.
        updates = orthogonalize(torch.stack([update for _, update in entries]).reshape(-1, *shape[-2:]))
        scale = learning_rate * max(1.0, shape[-2] / shape[-1]) ** 0.5
        for (matrix, _), update in zip(entries, updates.reshape(len(entries), *shape), strict=True):
            matrix.mul_(1 - learning_rate * weight_decay).add_(update, alpha=-scale)
