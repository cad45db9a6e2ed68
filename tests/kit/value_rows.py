"""Rows of training for a critic, shared by the tests of the engine and of the server."""

from __future__ import annotations

import numpy as np

from rlvr.core.messages import Datum, ModelInput


def value_rows(lengths: tuple[int, ...] = (4, 9, 2, 7), seed: int = 0) -> list[Datum]:
    """Rows with old values, returns and weights; all begin with the same two tokens, and the first place has no
    weight."""
    rng = np.random.default_rng(seed)
    data: list[Datum] = []
    for n in lengths:
        tokens = [3, 5, *rng.integers(0, 17, n - 2).tolist()]
        inputs = {name: rng.normal(size=n) for name in ("values", "returns")}
        weights = np.array([0.0, *rng.random(n - 1)])
        data.append(Datum(ModelInput(tokens), {"target_tokens": [*tokens[1:], 0], **inputs, "weights": weights}))
    return data
