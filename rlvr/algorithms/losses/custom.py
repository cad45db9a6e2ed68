"""A loss of the user's: a function of the sampled tokens' log-probs, at `package.module:function`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rlvr.algorithms.losses.loss import Loss, LossSpec
from rlvr.algorithms.part import SpecView
from rlvr.core.protocols import CustomLoss, Feature
from rlvr.core.registry import load_path
from rlvr.core.types import Trajectory


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A function (data, log-probs) -> (loss, metrics) of all rows of an optimizer step. Each has a class of its own,
    whose `name` is the path.

    It may have terms without A: `weights` [T] carry the reduction for them.
    """

    spec = LossSpec("a function (data, log-probs) -> (loss, metrics)", masks=("mask",), weight_inputs=("weights",))
    needs_whole_step = True
    has_gradient_at_zero = True
    needs = (Feature.OWN_LOSS,)

    def check(self, algorithm: SpecView) -> None:
        if any(Feature.FULL_LOGITS in term.needs for term in algorithm.terms):
            raise ValueError(
                f"algorithm.entropy=exact needs full logits, and algorithm.loss={self.name} is a function of the "
                "sampled tokens' log-probs; use entropy=sampled"
            )

    def of_rows(self, trajectories: Sequence[Trajectory], *, is_mean: bool, divergence: float | None) -> CustomLoss:
        return load_path("algorithm.loss", self.name)


@cache
def function_loss(path: str) -> type[FunctionLoss]:
    """The loss of the function at `package.module:function`, which is not loaded before it is needed."""
    return type("FunctionLoss", (FunctionLoss,), {"name": path, "__module__": __name__})
