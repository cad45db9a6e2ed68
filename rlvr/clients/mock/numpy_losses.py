"""The named losses in numpy, each with its exact derivative: what the mock client trains by.

Every function maps (p, inputs, settings, row) to (terms, slopes), one of each per token: the loss is the sum of the
terms, and slopes = d(terms)/dp. p [N] are the log-probs of the targets of all datums laid end to end, row [N] says
which datum a token belongs to. The specs are in `rlvr.algorithms.loss_specs`; `tests/test_clients_mock.py`
compares with `rlvr.engine.losses` by automatic differentiation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rlvr.algorithms.losses import TokenLosses
from rlvr.algorithms.losses.loss import MAX_LOG_RATIO

Inputs = dict[str, np.ndarray]
Terms = tuple[np.ndarray, np.ndarray]
Formula = Callable[[np.ndarray, Inputs, dict[str, float], np.ndarray], Terms]


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


FORMULAS: Mapping[str, Formula] = TokenLosses("numpy_terms")
