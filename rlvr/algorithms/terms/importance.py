"""A correction for a sampler that rounds otherwise than the trainer: importance weights, truncated or masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlvr.algorithms.losses.loss import MAX_LOG_RATIO
from rlvr.algorithms.terms.term import Preparation, Row, Term
from rlvr.core.types import Trajectory
from rlvr.core.variants import setting

IMPORTANCE_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class Importance(Term):
    """Advantages are multiplied by a weight w(exp(p_old - q)), p_old the trainer's log-probs before the step and q the
    sampler's, and ratios are taken to p_old. Without it the sampler's log-probs are trusted.

    The ratio x is that of each token, or with `mode=sequence_...` that of the whole completion, exp of the sum of p_old
    - q over its sampled tokens. `token_truncate` and `sequence_truncate` take w = min(max(x, `floor`), `cap`):
    truncated importance sampling (https://fengyao.notion.site/off-policy-rl). `token_mask` and `sequence_mask` take
    w = x where `floor` <= x <= `cap`, else 0: tokens with both bounds as in IcePop (arXiv:2510.18855, with 0.5 and 5),
    whole completions as TRL does by default (with a cap of 3). Without a `floor` there is no lower bound. What is
    masked still counts in the denominators; `importance/masked` is its share.
    """

    name = "importance"
    switch = "cap"
    bounds_ratio = True
    compares_with_start = True

    cap: float = setting(low=1, expected="at least 1 (2 is usual), or null", flat="importance_cap")
    floor: float = setting(0.0, low=0, high=1, expected="0 to 1 (0.5 is usual)", flat="importance_floor")
    mode: str = setting("token_truncate", choices=IMPORTANCE_MODES, flat="importance_mode")

    @property
    def is_masking(self) -> bool:
        return self.mode.endswith("mask")

    def prepare(self, batch: Sequence[Trajectory], prepared: Preparation) -> None:
        known = [t for t in batch if t.reward is not None and not t.is_empty]
        values = prepared.compute_logprobs(known)
        prepared.old = {id(t): (t, logprobs) for t, logprobs in zip(known, values, strict=True)}

    def adjust(self, selected: Sequence[Trajectory], prepared: Preparation) -> None:
        if not self.is_masking:
            return
        dropped: list[np.ndarray] = []
        for t in selected:
            if not t.is_empty:
                gap, mask = np.asarray(prepared.old_logprobs(t)) - t.logprobs, np.asarray(t.action_mask, dtype=bool)
                dropped.append(self.compute_weights(gap, mask)[mask] == 0)
        prepared.measured["importance/masked"] = float(np.concatenate(dropped or [np.zeros(1)]).mean())

    def compute_weights(self, gap_R: np.ndarray, mask_R: np.ndarray) -> np.ndarray:
        """The weight [R] of each token, for the gaps p_old - q and where the policy acted."""
        if self.mode.startswith("sequence"):
            gap_R = np.full(len(gap_R), gap_R[mask_R].sum())
        ratio_R = np.exp(np.minimum(gap_R, MAX_LOG_RATIO))
        if self.is_masking:
            return np.where((ratio_R >= self.floor) & (ratio_R <= self.cap), ratio_R, 0.0)
        return np.clip(ratio_R, self.floor, self.cap)

    def weigh(self, row: Row) -> None:
        assert row.old is not None
        mask = np.asarray(row.trajectory.action_mask, dtype=bool)
        row.advantages = row.advantages * self.compute_weights(row.old - row.logprobs, mask)

    def describe(self) -> str:
        what = "importance weights" if self.mode.startswith("token") else "importance weights of completions"
        bounds = f"{self.floor:g} to {self.cap:g}" if self.floor else f"up to {self.cap:g}"
        return f"{what} {bounds}, others masked" if self.is_masking else f"{what} {bounds}"
