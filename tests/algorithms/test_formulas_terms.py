"""Each named loss, KL estimator, advantage and preference loss against its paper's formula, written out here by cases.

Rows of uneven length, masks, ratios of 1 and far from it. Gradients by torch's autograd of the formula, in float64.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rlvr.algorithms.advantages import ADVANTAGES, RunningBaseline
from rlvr.algorithms.losses.preferences import dpo, ipo, kto
from rlvr.core.types import Trajectory
from rlvr.engine.losses import TERMS, kl_penalty

LENGTHS = [1, 4, 2, 7]
LOW, HIGH, DUAL, BETA = 0.8, 1.28, 3.0, 0.4
POSITIVE, NEGATIVE = 0.7, 1.6
CONFIG = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH, "dual_clip_threshold": DUAL, "beta": BETA}
CONFIG |= {"positive_temperature": POSITIVE, "negative_temperature": NEGATIVE}


def batch(spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probs p and q, advantages with a sign of its own in each token, mask, row of each token."""
    rng = np.random.default_rng(3)
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    p = torch.tensor(rng.normal(-2, 1, len(row)))
    mask = torch.tensor((rng.random(len(row)) > 0.25).astype(float))
    A = torch.tensor(rng.normal(size=len(row))) * mask
    return p.requires_grad_(), p.detach() - spread * torch.tensor(rng.normal(size=len(row))), A, mask, row


def clip_loss(ratio: Tensor, A: float) -> Tensor:
    """Schulman 2017, arXiv:1707.06347, with the dual clip of arXiv:1912.09729: at most c |A| is lost where A < 0."""
    if A >= 0:
        return -A * (ratio if ratio.item() <= HIGH else torch.tensor(HIGH))
    if ratio.item() < LOW:
        return torch.tensor(-A * LOW)
    return -A * (ratio if ratio.item() <= DUAL else torch.tensor(DUAL))


def formula(loss: str, p: Tensor, q: Tensor, A: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for i, a in enumerate(A.tolist()):
        r = (p[i] - q[i]).exp()
        if loss == "ppo":
            total = total + clip_loss(r, a)
        elif loss == "importance_sampling":
            total = total - r * a
        elif loss == "cispo":
            total = total - min(max(r.item(), LOW), HIGH) * a * p[i]
        elif loss == "sapo":  # arXiv:2511.20347: a gate (4 / tau) sigmoid(tau (r - 1)) for the ratio
            tau = POSITIVE if a > 0 else NEGATIVE
            total = total - a * 4 / tau / (1 + (-tau * (r - 1)).exp())
        elif loss == "dro":
            total = total - (a * p[i] - mask[i] * BETA / 2 * (p[i] - q[i]) ** 2)
        elif loss == "gspo":  # GSPO-token, arXiv:2507.18071: sg(s) p / sg(p)
            own = [j for j in range(len(p)) if row[j] == row[i] and mask[j]]
            s = math.exp(sum(float(p[j].detach() - q[j]) for j in own) / len(own)) if own else 1.0
            total = total + clip_loss(s * (p[i] - p[i].detach()).exp(), a)
        else:
            total = total - a * p[i]
    return total


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("loss", list(TERMS))
def test_a_loss_and_its_gradient(loss: str, spread: float) -> None:
    p, q, A, mask, row = batch(spread)
    inputs = {"logprobs": q, "advantages": A, "weights": A, "sequence_ratio_mask": mask, "beta_weights": mask}
    found = TERMS[loss](p, inputs, CONFIG, row).sum()
    expected = formula(loss, p, q, A, mask, row)
    (own,), (other,) = (torch.autograd.grad(x, p) for x in (found, expected))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own, other)


@pytest.mark.parametrize("estimator", [1, 2, 3])
def test_a_kl_estimator_and_its_gradient(estimator: int) -> None:
    """k1 = log p/ref, k2 = its half square, k3 = ref/p - 1 - log ref/p; gradients by hand."""
    p, ref, _, mask, _ = batch(1.0)
    found = kl_penalty(p, {"reference_logprobs": ref, "kl_weights": 0.3 * mask}, float(estimator))
    gap = (p - ref).detach()
    value = {1: gap, 2: gap**2 / 2, 3: (-gap).exp() - 1 + gap}[estimator]
    slope = {1: torch.ones_like(gap), 2: gap, 3: 1 - (-gap).exp()}[estimator]
    torch.testing.assert_close(found.detach(), 0.3 * mask * value)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), p)[0], 0.3 * mask * slope)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "importance_sampling", "cispo"])
@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_a_log_ratio_of_100_is_finite(loss: str, gap: float) -> None:
    p = torch.tensor([-1.0, -1.0], requires_grad=True)
    inputs = {
        "logprobs": p.detach() - gap,
        "advantages": torch.tensor([1.0, 0.0]),
        "sequence_ratio_mask": torch.ones(2),
    }
    terms = TERMS[loss](p, inputs, CONFIG, torch.tensor([0, 1]))
    terms.sum().backward()
    assert torch.isfinite(terms).all() and p.grad is not None and torch.isfinite(p.grad).all()


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1.0, 100.0])
def test_preference_losses_and_their_gradients(scale: float) -> None:
    """DPO, arXiv:2305.18290; IPO, arXiv:2310.12036; KTO, arXiv:2402.01306: gradients by hand."""
    m = (scale * torch.tensor([-2.0, -0.5, 0.0, 0.7, 3.0], dtype=torch.float64)).requires_grad_()
    x = m.detach().numpy()

    def s(v: np.ndarray) -> np.ndarray:
        return np.exp(-np.logaddexp(0, -v))

    preferred = np.array([True, False, True, False, False])
    side = np.where(preferred, 1.0, -1.0)
    z = max(0.0, x.mean())
    u = s(BETA * side * (x - z))
    cases = [
        (dpo(m, BETA), np.logaddexp(0, -BETA * x), -BETA * s(-BETA * x)),
        (ipo(m, BETA), (x - 1 / (2 * BETA)) ** 2, 2 * (x - 1 / (2 * BETA))),
        (kto(m, torch.tensor(preferred), BETA)[0], np.mean(1 - u), -BETA * side * u * (1 - u) / len(x)),
    ]
    for found, value, slope in cases:
        np.testing.assert_allclose(found.detach().numpy(), value, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(torch.autograd.grad(found.sum(), m)[0].numpy(), slope, rtol=1e-12, atol=1e-14)


REWARDS = [[1.0, 0.0, 0.5, 0.5], [0.25, 0.25], [2.0], [0.0, 1.0, -3.0]]  # mixed, no variance, alone


def advantages(name: str, **options: int) -> list[np.ndarray]:
    rows = [
        Trajectory("p", [1], "r", [2] * (1 + i), [0.0] * (1 + i), reward=r, group_id=str(g), rollout_id=f"{g}.{i}")
        for g, group in enumerate(REWARDS)
        for i, r in enumerate(group)
    ]
    ADVANTAGES.find(name)(**options).estimate(rows, RunningBaseline())
    found = iter(t.advantage for t in rows)
    return [np.array([next(found) for _ in group]) for group in REWARDS]


@pytest.mark.parametrize("name", ["group_mean", "group_normalized", "group_mean_batch_std", "batch_mean", "raw",
                                  "batch_normalized", "leave_one_out", "ema", "zero"])  # fmt: skip
def test_an_advantage(name: str) -> None:
    every = np.concatenate(REWARDS)
    for found, group in zip(advantages(name), map(np.array, REWARDS), strict=True):
        others = [np.delete(group, i).mean() if len(group) > 1 else group[i] for i in range(len(group))]
        expected = {
            "group_mean": group - group.mean(),
            "group_normalized": (group - group.mean()) / (group.std() + 1e-6),
            "group_mean_batch_std": (group - group.mean()) / (every.std() + 1e-6),
            "batch_mean": group - every.mean(),
            "ema": group - every.mean(),
            "raw": group,
            "batch_normalized": (group - every.mean()) / (every.std() + 1e-6),
            "leave_one_out": group - np.array(others),
            "zero": 0 * group,
        }[name]
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [2, 3])
def test_pass_at_k_by_every_set(k: int) -> None:
    """PKPO's leave-one-out form: n sum over sets S of k with i of (max S - max S without i) / C(n, k)."""
    for found, group in zip(advantages("pass_at_k", k=k), REWARDS, strict=True):
        n = len(group)
        expected = [
            sum(max(group[j] for j in S) - max(group[j] for j in S if j != i)
                for S in itertools.combinations(range(n), k) if i in S) * n / math.comb(n, k) if n >= k else 0.0
            for i in range(n)
        ]  # fmt: skip
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
