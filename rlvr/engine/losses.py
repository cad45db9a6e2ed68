"""Token losses: plain functions in a dictionary, one per name, always summed.

Every loss maps (log-probs of the targets under the trained policy, the datum's inputs, thresholds) to one term per
token; the engine adds the terms up. There is no mean and no mask: the caller's reduction is a per-token weight folded
into `advantages` (or `weights`), so micro-batching cannot change a gradient.

Legend: p = `logprobs_N` (carries the gradient), q = `inputs["logprobs"]` (the sampler's), A = `inputs["advantages"]`,
r = exp(p - q) the importance ratio, sg = stop-gradient, N = tokens of the rows in this micro-batch laid end to end,
`row_N` = which datum a token belongs to. Thresholds are absolute ratios (0.8 / 1.28), as in the Tinker protocol.
Exercised by `tests/test_losses.py` with literals worked out by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LossFn = Callable[[Tensor, dict[str, Tensor], dict[str, float], Tensor], Tensor]

# Inputs that any loss may be given beside its own: a KL to a reference, an exact entropy bonus, dro's own weights.
KL_INPUTS = ("kl_weights", "reference_logprobs")
ENTROPY_INPUT = "entropy_weights"


@dataclass(frozen=True)
class Loss:
    """A named loss: its function, the inputs it needs besides `target_tokens`, its settings with defaults, and the
    inputs it may also be given (in every datum of a call, or in none).

    A `wide` loss also takes several targets per token: `target_tokens` and what it needs are then [T, K]. A token has
    a gradient where one of the inputs `carriers`, or a weight of the extras, is not 0; always where a datum lacks one
    of `carriers`.
    """

    terms: LossFn
    needs: tuple[str, ...]
    config: dict[str, float] = field(default_factory=dict[str, float])
    takes: tuple[str, ...] = (*KL_INPUTS, ENTROPY_INPUT)
    wide: bool = False
    carriers: tuple[str, ...] = ("advantages",)


def _ratio(p: Tensor, q: Tensor) -> Tensor:
    return torch.exp(p - q)


def cross_entropy(p: Tensor, inputs: dict[str, Tensor], config: dict[str, float], row_N: Tensor) -> Tensor:
    """-w p; of K targets per token (a teacher's distribution, say) -sum_k w_k p_k."""
    terms = -inputs["weights"] * p
    return terms if p.ndim == 1 else terms.sum(-1)


def importance_sampling(p: Tensor, inputs: dict[str, Tensor], config: dict[str, float], row_N: Tensor) -> Tensor:
    """-r A: the policy gradient with the sampler's weights corrected for, unclipped. On-policy it is REINFORCE."""
    return -_ratio(p, inputs["logprobs"]) * inputs["advantages"]


def ppo(p: Tensor, inputs: dict[str, Tensor], config: dict[str, float], row_N: Tensor) -> Tensor:
    """-min(r A, clip(r, lo, hi) A). Schulman et al. 2017, arXiv:1707.06347, eq. 7."""
    ratio, advantages = _ratio(p, inputs["logprobs"]), inputs["advantages"]
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo(p: Tensor, inputs: dict[str, Tensor], config: dict[str, float], row_N: Tensor) -> Tensor:
    """-sg(clip(r, lo, hi)) p A: the weight is clipped, no token loses its gradient. MiniMax-M1, arXiv:2506.13585."""
    ratio = _ratio(p.detach(), inputs["logprobs"])
    return -ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"]) * p * inputs["advantages"]


def dro(p: Tensor, inputs: dict[str, Tensor], config: dict[str, float], row_N: Tensor) -> Tensor:
    """-(p A - b beta (p - q)^2 / 2). Direct reward optimisation, arXiv:2405.19107, with A as the centred reward.

    The quadratic term is by token, as the Tinker protocol has it; the paper's is that of the whole answer.

    `beta_weights`, b, is 1 where it is not given: a reduction that differs from row to row belongs to both terms.
    """
    pull = 0.5 * config["beta"] * (p - inputs["logprobs"]) ** 2
    return -(p * inputs["advantages"] - (pull * inputs["beta_weights"] if "beta_weights" in inputs else pull))


def gspo(p: Tensor, inputs: dict[str, Tensor], config: dict[str, float], row_N: Tensor) -> Tensor:
    """PPO's clip on the sequence ratio s = exp(mean over the mask of (sg(p) - q)), with s_t = s exp(p - sg(p)).

    GSPO, arXiv:2507.18071, eq. 5 and 14. `sequence_ratio_mask` says which tokens the mean counts.
    """
    mask = (inputs["sequence_ratio_mask"] != 0).to(p.dtype)
    rows = int(row_N.max()) + 1
    total = p.new_zeros(rows).index_add(0, row_N, (p.detach() - inputs["logprobs"]) * mask)
    count = p.new_zeros(rows).index_add(0, row_N, mask).clamp(min=1)
    ratio = torch.exp(total / count)[row_N] * torch.exp(p - p.detach())
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


def kl_penalty(p: Tensor, inputs: dict[str, Tensor], estimator: float) -> Tensor:
    """w k with d = log reference - p: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. http://joschu.net/blog/kl-approx.html

    Added to any loss whose data have `reference_logprobs` and `kl_weights`, w (coefficient x reduction).
    """
    weights = inputs["kl_weights"]
    d = torch.where(weights != 0, inputs["reference_logprobs"] - p, 0.0)  # 0 x exp(95) would be nan
    k = -d if estimator == 1 else 0.5 * d**2 if estimator == 2 else torch.exp(d) - 1 - d
    return weights * k


_POLICY = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",), wide=True, carriers=("weights",)),
    "importance_sampling": Loss(importance_sampling, _POLICY),
    "ppo": Loss(ppo, _POLICY, _CLIP),
    "cispo": Loss(cispo, _POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(
        dro,
        _POLICY,
        {"beta": 0.05},
        (*KL_INPUTS, ENTROPY_INPUT, "beta_weights"),
        carriers=("advantages", "beta_weights"),
    ),
    "gspo": Loss(gspo, (*_POLICY, "sequence_ratio_mask"), _CLIP),
}


def carried(inputs: dict[str, Tensor], loss: Loss) -> Tensor:
    """Which tokens [N] have a gradient. The others' log-probs are told, and cost a forward pass."""
    weighing = [name for name in (*loss.carriers, KL_INPUTS[0], ENTROPY_INPUT) if name in inputs]
    if not set(loss.carriers) <= set(weighing):  # dro's pull, by default on every token
        return torch.ones_like(inputs[weighing[0]], dtype=torch.bool)
    any_N = torch.stack([inputs[name].reshape(len(inputs[name]), -1).ne(0).any(-1) for name in weighing])
    return any_N.any(0)


class _Chosen(torch.autograd.Function):
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
        flat = _Chosen.apply(logits, of.repeat_interleave(several), targets.reshape(-1))
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
