"""The named losses in torch, and log-probs of targets without the whole matrix of logits.

Every loss maps (log-probs of the targets under the trained policy, the datums' inputs, settings) to one term per token;
the engine adds the terms up. There is no mean and no mask: the caller's reduction is a per-token weight folded into
`advantages` (or `weights`), so micro-batching cannot change a gradient. What each loss computes, with its paper, and
which inputs and settings it has, is its spec in `rlvr.algorithms.loss_specs`.

Legend: p = `logprobs_N` (carries the gradient), N = tokens of the rows in this micro-batch laid end to end, `row_N` =
which datum a token belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlvr.algorithms.losses import TokenLossAttribute
from rlvr.algorithms.losses.dro import find_pull_weights
from rlvr.algorithms.losses.loss import CROSS_ENTROPY_INPUT, ENTROPY_INPUT, KL_INPUTS, LossSpec, exp_torch

LossFn = Callable[[Tensor, dict[str, Tensor], dict[str, float], Tensor], Tensor]


def kl_penalty(p: Tensor, inputs: dict[str, Tensor], estimator: float) -> Tensor:
    """w k with d = log reference - p: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. http://joschu.net/blog/kl-approx.html

    Added to any loss whose data have `reference_logprobs` and `kl_weights`, w (coefficient x reduction).
    """
    weights = inputs["kl_weights"]
    d = torch.where(weights != 0, inputs["reference_logprobs"] - p, 0.0)  # 0 x exp(95) would be nan
    k = -d if estimator == 1 else 0.5 * d**2 if estimator == 2 else exp_torch(d) - 1 - d
    return weights * k


def add_extra_terms(terms: Tensor, p: Tensor, inputs: dict[str, Tensor], kl_estimator: float | None) -> Tensor:
    """The terms of a loss with those of the inputs that any loss takes: a KL, and -w p with w the cross-entropy's."""
    if KL_INPUTS[0] in inputs:
        assert kl_estimator is not None
        terms = terms + kl_penalty(p, inputs, kl_estimator)
    return terms - inputs[CROSS_ENTROPY_INPUT] * p if CROSS_ENTROPY_INPUT in inputs else terms


def value_loss(v: Tensor, inputs: dict[str, Tensor], config: dict[str, float], row_N: Tensor) -> Tensor:
    """The loss of a critic's values `v` [N], which carry the gradient."""
    old, returns, clip = inputs["values"], inputs["returns"], config["value_clip"]
    clipped = old + (v - old).clamp(-clip, clip)
    return 0.5 * inputs["weights"] * torch.maximum((v - returns) ** 2, (clipped - returns) ** 2)


TERMS: Mapping[str, LossFn] = TokenLossAttribute("torch_terms")


def find_gradient_tokens(inputs: dict[str, Tensor], spec: LossSpec) -> Tensor:
    """Which tokens [N] have a gradient. The log-probs of the others are returned too, at the cost of a forward pass."""
    names = ("advantages" if spec.uses_advantages else "weights", KL_INPUTS[0], ENTROPY_INPUT, CROSS_ENTROPY_INPUT)
    weights = [inputs[name] for name in names if name in inputs]
    if spec.weight_inputs:
        weights.append(find_pull_weights(inputs))
    return torch.stack([weight.reshape(len(weight), -1).ne(0).any(-1) for weight in weights]).any(0)


class _TargetLogprobs(torch.autograd.Function):
    """log softmax(logits) of [U, V] at (of_N, targets_N). The gradient takes one more table of that size, not four."""

    @staticmethod
    def forward(ctx: Any, logits_UV: Tensor, of_N: Tensor, targets_N: Tensor) -> Tensor:
        norm_U = logits_UV.logsumexp(-1)
        ctx.save_for_backward(logits_UV, norm_U, of_N, targets_N)
        return logits_UV[of_N, targets_N] - norm_U[of_N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_N,), (logits_UV, norm_U, of_N, targets_N) = grads, ctx.saved_tensors
        sums_U = grad_N.new_zeros(len(norm_U)).index_add_(0, of_N, grad_N)
        table_UV = (logits_UV - norm_U[:, None]).exp_().mul_(-sums_U[:, None])
        places_N = of_N * logits_UV.shape[1] + targets_N
        table_UV.view(-1).index_add_(0, places_N, grad_N)
        return table_UV, None, None


def token_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_UD: Tensor,
    targets_N: Tensor,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    of_N: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(head(hidden) / T) at the targets, [N] in fp32, without ever holding the [U, vocabulary] matrix.

    Target n belongs to hidden state `of_N[n]`, by default the n-th: a state may have several, as the end of a prompt
    has with many answers. Targets [N, K] give [N, K]. With `entropy` also that of each target's distribution, [N].
    States are taken `chunk` at a time. With more than one chunk the backward pass computes each chunk's logits again
    instead of keeping them: a third more work in the head for O(chunk * vocabulary) memory. It is for `backward()`
    alone then: `torch.autograd.grad` is refused.
    """
    count, several = targets_N.shape[0], targets_N.shape[1:].numel()
    of_N = torch.arange(count, device=targets_N.device) if of_N is None else of_N

    def chunk_logprobs(hidden: Tensor, of: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float()
        logits = logits if temperature == 1 else logits / temperature
        flat = _TargetLogprobs.apply(logits, of.repeat_interleave(several), targets.reshape(-1))
        if not entropy:
            return flat.view(targets.shape), flat  # pyright: ignore[reportAttributeAccessIssue]
        spread = logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)
        return flat.view(targets.shape), spread[of]  # pyright: ignore[reportAttributeAccessIssue]

    if hidden_UD.shape[0] <= chunk:
        logprobs, spread = chunk_logprobs(hidden_UD, of_N, targets_N)
        return logprobs, spread if entropy else None
    # Each chunk adds to the head's gradient itself, else a second table of the head's size would hold their sum.
    at_once = hidden_UD.requires_grad
    order_N = of_N.argsort(stable=True)
    sizes = torch.bincount(of_N // chunk).tolist()
    pieces: list[tuple[Tensor, Tensor]] = [
        checkpoint(chunk_logprobs, h, o - first, t, use_reentrant=at_once, preserve_rng_state=False)  # pyright: ignore[reportAssignmentType]
        for h, o, t, first in zip(
            hidden_UD.split(chunk),
            of_N[order_N].split(sizes),
            targets_N[order_N].split(sizes),
            range(0, hidden_UD.shape[0], chunk),
            strict=True,
        )
    ]
    back_N = order_N.argsort()
    logprobs = torch.cat([piece[0] for piece in pieces])[back_N]
    return logprobs, torch.cat([piece[1] for piece in pieces])[back_N] if entropy else None
