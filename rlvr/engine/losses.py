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

    A `wide` loss also takes several targets per token: `target_tokens` and what it needs are then [T, K].
    """

    terms: LossFn
    needs: tuple[str, ...]
    config: dict[str, float] = field(default_factory=dict[str, float])
    takes: tuple[str, ...] = (*KL_INPUTS, ENTROPY_INPUT)
    wide: bool = False


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
    "cross_entropy": Loss(cross_entropy, ("weights",), wide=True),
    "importance_sampling": Loss(importance_sampling, _POLICY),
    "ppo": Loss(ppo, _POLICY, _CLIP),
    "cispo": Loss(cispo, _POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(dro, _POLICY, {"beta": 0.05}, (*KL_INPUTS, ENTROPY_INPUT, "beta_weights")),
    "gspo": Loss(gspo, (*_POLICY, "sequence_ratio_mask"), _CLIP),
}


def token_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden_ND: Tensor,
    targets_N: Tensor,
    temperature: float,
    chunk: int,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(head(hidden) / T) at the targets, [N] in fp32, without ever holding the [N, vocabulary] matrix.

    Targets [N, K] give [N, K]. With `entropy` also the entropy of each distribution, [N]. Tokens are taken `chunk` at a
    time. With more than one chunk the backward pass computes each chunk's logits again instead of keeping them: a third
    more work in the head for O(chunk * vocabulary) memory.
    """

    def chunk_logprobs(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden).float() / temperature
        norm = logits.logsumexp(-1)
        if targets.ndim == 1:
            chosen = logits.gather(-1, targets[:, None])[:, 0] - norm
        else:
            chosen = logits.gather(-1, targets) - norm[:, None]
        spread = norm - (logits.softmax(-1) * logits).sum(-1) if entropy else norm.detach()
        return chosen, spread

    if hidden_ND.shape[0] <= chunk:
        logprobs, spread = chunk_logprobs(hidden_ND, targets_N)
        return logprobs, spread if entropy else None
    pieces: list[tuple[Tensor, Tensor]] = [
        checkpoint(chunk_logprobs, h, t, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportAssignmentType]
        for h, t in zip(hidden_ND.split(chunk), targets_N.split(chunk), strict=True)
    ]
    logprobs = torch.cat([piece[0] for piece in pieces])
    return logprobs, torch.cat([piece[1] for piece in pieces]) if entropy else None
