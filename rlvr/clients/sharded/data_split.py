"""Splits the datums of a call over the ranks: about the same work for each, rows with a common prefix together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlvr.core.messages import Datum
from rlvr.engine.packing import common_prefix


def split_data(data: Sequence[Datum], ranks: int) -> list[list[int]]:
    """The indices into `data` for each rank, a function of the tokens alone; with few datums a rank may get none.

    The datums are sorted by their tokens, which puts those of a group side by side, and split into equal shares of
    tokens. A prefix shared with the datum before counts once, as the learner computes it once.
    """
    tokens = [np.fromiter(datum.model_input.tokens, np.int64, datum.model_input.length) for datum in data]
    order = sorted(range(len(data)), key=lambda i: (tokens[i].astype(">u4").tobytes(), i))
    costs: list[int] = []
    for place, i in enumerate(order):
        shared = common_prefix(tokens[order[place - 1]], tokens[i]) if place else 0
        costs.append(max(1, len(tokens[i]) - shared))
    middles = np.cumsum(costs) - np.asarray(costs) / 2
    owners = np.minimum(ranks - 1, (middles * ranks / max(1, sum(costs))).astype(int))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i, owner in zip(order, owners, strict=True):
        shares[owner].append(i)
    return shares
