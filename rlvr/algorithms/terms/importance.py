"""A correction for a sampler that rounds otherwise than the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.algorithms.losses.loss import MAX_LOG_RATIO
from rlvr.algorithms.terms.term import Preparation, Row, Term
from rlvr.core.types import Trajectory
from rlvr.core.variants import setting


@dataclass(frozen=True)
class Importance(Term):
    """Advantages are multiplied by min(exp(p_old - q), `cap`), p_old the trainer's log-probs before the step and q the
    sampler's, and ratios are taken to p_old: truncated importance sampling for a sampler that differs from the trainer
    (https://fengyao.notion.site/off-policy-rl). Without it the sampler's log-probs are trusted.
    """

    name = "importance"
    switch = "cap"
    bounds_ratio = True
    compares_with_start = True

    cap: float = setting(low=1, expected="at least 1 (2 is usual), or null", flat="importance_cap")

    def prepare(self, batch: Sequence[Trajectory], prepared: Preparation) -> None:
        known = [t for t in batch if t.reward is not None and not t.is_empty]
        values = prepared.compute_logprobs(known)
        prepared.old = {id(t): (t, logprobs) for t, logprobs in zip(known, values, strict=True)}

    def weigh(self, row: Row) -> None:
        assert row.old is not None
        ratio = np.exp(np.minimum(row.old - row.logprobs, MAX_LOG_RATIO))
        row.advantages = row.advantages * np.minimum(ratio, self.cap)
