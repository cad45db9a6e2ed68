"""The named losses of `rlvr.engine.losses` in numpy, each with its exact slope: what the mock client trains by.

Every function maps (p, inputs, settings, row) to (terms, slopes), one of each per token: the loss is the sum of the
terms and slopes = d(terms)/dp. p [N] are the log-probs of the targets of all datums laid end to end, row [N] says which
datum a token belongs to, q = `inputs["logprobs"]`, A = `inputs["advantages"]`, r = exp(p - q). The formulas and their
papers stand in the engine's file; `tests/test_clients_mock.py` holds both together by automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Inputs = dict[str, np.ndarray]
Terms = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Slope:
    """A named loss: its function, the inputs it needs, those it may be given, and its settings with defaults."""

    terms: Callable[[np.ndarray, Inputs, dict[str, float], np.ndarray], Terms]
    needs: tuple[str, ...]
    config: dict[str, float] = field(default_factory=dict[str, float])


def _cross_entropy(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    return -x["weights"] * p, -x["weights"]


def _importance_sampling(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    term = -np.exp(p - x["logprobs"]) * x["advantages"]
    return term, term


def _clipped(ratio: np.ndarray, advantages: np.ndarray, c: dict[str, float]) -> Terms:
    """-min(ratio A, clip(ratio) A) for a ratio whose derivative in p is itself."""
    clipped = np.clip(ratio, c["clip_low_threshold"], c["clip_high_threshold"]) * advantages
    free = ratio * advantages <= clipped
    return -np.minimum(ratio * advantages, clipped), np.where(free, -ratio * advantages, 0.0)


def _ppo(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    return _clipped(np.exp(p - x["logprobs"]), x["advantages"], c)


def _cispo(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    weight = np.clip(np.exp(p - x["logprobs"]), c["clip_low_threshold"], c["clip_high_threshold"]) * x["advantages"]
    return -weight * p, -weight


def _dro(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    beta, gap = c["beta"] * x.get("beta_weights", np.ones_like(p)), p - x["logprobs"]
    return -(p * x["advantages"] - 0.5 * beta * gap**2), -(x["advantages"] - beta * gap)


def _gspo(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    mask = (x["sequence_ratio_mask"] != 0).astype(np.float64)
    total, count = np.bincount(row, (p - x["logprobs"]) * mask), np.bincount(row, mask)
    return _clipped(np.exp(total / np.maximum(count, 1))[row], x["advantages"], c)


def divergence(p: np.ndarray, reference: np.ndarray, estimator: int) -> Terms:
    """The estimators k1, k2 and k3 of the divergence from a reference, with d = reference - p, and their slopes.

    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (http://joschu.net/blog/kl-approx.html).
    """
    d = reference - p
    match estimator:
        case 1:
            return -d, np.ones_like(d)
        case 2:
            return d**2 / 2, -d
        case _:
            return np.expm1(d) - d, -np.expm1(d)


_POLICY = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
SLOPES: dict[str, Slope] = {
    "cross_entropy": Slope(_cross_entropy, ("weights",)),
    "importance_sampling": Slope(_importance_sampling, _POLICY),
    "ppo": Slope(_ppo, _POLICY, _CLIP),
    "cispo": Slope(_cispo, _POLICY, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Slope(_dro, _POLICY, {"beta": 0.05}),
    "gspo": Slope(_gspo, (*_POLICY, "sequence_ratio_mask"), _CLIP),
}
