"""An entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlvr.algorithms.losses.loss import ENTROPY_INPUT
from rlvr.algorithms.terms.term import Row, Term, TrainedTokens
from rlvr.core.protocols import Feature
from rlvr.core.variants import setting


@dataclass(frozen=True)
class Entropy(Term):
    """`coef` weighs an entropy bonus.

    `estimator=sampled` subtracts coefficient x log-prob from each token's advantage (on-policy its expected gradient is
    that of each token's entropy at a fixed prefix, not of the whole completion's; later updates of a step clip it like
    any advantage), `exact` takes that entropy from full logits, so it needs the local or the sharded client.
    """

    name = "entropy"
    switch = "coef"
    has_gradient = True

    coef: float = setting(low=0, expected="at least 0", flat="entropy_coef")
    estimator: str = setting("sampled", choices=("sampled", "exact"), flat="entropy")

    @property
    def has_gradient_at_zero(self) -> bool:
        return True

    @property
    def needs(self) -> tuple[Feature, ...]:
        return (Feature.FULL_LOGITS,) if self.estimator == "exact" else ()

    def used_key(self) -> tuple[str, str]:
        return f"entropy={self.estimator}", "use entropy=sampled"

    def weigh(self, row: Row) -> None:
        if self.estimator == "exact":
            row.inputs[ENTROPY_INPUT] = self.coef * row.weight * np.ones(len(row.logprobs))
        else:
            row.advantages = row.advantages - self.coef * (row.logprobs if row.old is None else row.old)

    def measure(self, trained: TrainedTokens) -> tuple[float, np.ndarray | None]:
        exact = trained.metrics.get("entropy_loss:sum")
        sampled = self.coef * float((trained.weight * trained.sampled * np.exp(trained.now - trained.sampled)).sum())
        return sampled if exact is None else exact, None

    def describe(self) -> str:
        return f"entropy bonus {self.coef:g}"
