"""The named losses in numpy, each with its exact derivative: what the mock client trains by.

Every function maps (p, inputs, settings, row) to (terms, slopes), one of each per token: the loss is the sum of the
terms, and slopes = d(terms)/dp. p [N] are the log-probs of the targets of all datums laid end to end, row [N] says
which datum a token belongs to. The specs are in `rlvr.algorithms.loss_specs`; `tests/test_clients_mock.py`
compares with `rlvr.engine.losses` by automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlvr.algorithms.loss_specs import MAX_LOG_RATIO, find_pull_weights

Inputs = dict[str, np.ndarray]
Terms = tuple[np.ndarray, np.ndarray]
Formula = Callable[[np.ndarray, Inputs, dict[str, float], np.ndarray], Terms]


def _exp(d: np.ndarray) -> np.ndarray:
    """exp(min(d, MAX_LOG_RATIO)); its slope is itself."""
    return np.exp(np.minimum(d, MAX_LOG_RATIO))


def _cross_entropy(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    return -x["weights"] * p, -x["weights"]


def _importance_sampling(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    term = -_exp(p - x["logprobs"]) * x["advantages"]
    return term, term


def _clip(ratio: np.ndarray, advantages: np.ndarray, c: dict[str, float]) -> Terms:
    """-min(min(ratio, c) A, clip(ratio) A) for a ratio whose derivative in p is itself."""
    clipped = np.clip(ratio, c["clip_low_threshold"], c["clip_high_threshold"]) * advantages
    bounded = np.minimum(ratio, c["dual_clip_threshold"]) * advantages
    free = (bounded <= clipped) & (ratio <= c["dual_clip_threshold"])
    return -np.minimum(bounded, clipped), np.where(free, -bounded, 0.0)


def _ppo(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    return _clip(_exp(p - x["logprobs"]), x["advantages"], c)


def _cispo(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    weight = np.clip(_exp(p - x["logprobs"]), c["clip_low_threshold"], c["clip_high_threshold"]) * x["advantages"]
    return -weight * p, -weight


def _dro(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    beta, gap = c["beta"] * find_pull_weights(x), p - x["logprobs"]
    return -(p * x["advantages"] - 0.5 * beta * gap**2), -(x["advantages"] - beta * gap)


def _gspo(p: np.ndarray, x: Inputs, c: dict[str, float], row: np.ndarray) -> Terms:
    mask = (x["sequence_ratio_mask"] != 0).astype(np.float64)
    total, count = np.bincount(row, (p - x["logprobs"]) * mask), np.bincount(row, mask)
    return _clip(_exp(total / np.maximum(count, 1))[row], x["advantages"], c)


def kl_terms(p: np.ndarray, reference: np.ndarray, estimator: int) -> Terms:
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
            rise = np.expm1(np.minimum(d, MAX_LOG_RATIO))
            return rise - d, -rise


FORMULAS: dict[str, Formula] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}
