"""Direct reward optimisation: a quadratic pull to the sampler instead of a clip."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlvr.algorithms.losses.loss import Inputs, Loss, LossSpec, Settings
from rlvr.core.protocols import Feature
from rlvr.core.variants import setting


@dataclass(frozen=True)
class Dro(Loss):
    """The options of DRO: `beta` weighs the quadratic term."""

    name = "dro"
    is_in_protocol = True
    spec = LossSpec(
        "-(p A - b beta (p - q)^2 / 2), b = `beta_weights`; if absent, b is 0 where q and A are both exactly 0, as "
        "clients send them on a prompt, and 1 elsewhere. Direct reward optimisation, arXiv:2405.19107, with A as the "
        "centred reward. The quadratic term is by token, as in the Tinker protocol; the paper's is that of the whole "
        "answer.",
        config={"beta": 0.05},
        weight_inputs=("beta_weights",),
    )
    has_gradient_at_zero = True
    needs = (Feature.EXTRA_INPUTS,)  # the pull would reach the prompt's tokens too, if no weights held it off

    beta: float = setting(0.05, low=math.ulp(0.0), expected="a number above 0 (0.05 is usual)", flat="beta")

    @staticmethod
    def torch_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> Any:
        pull = 0.5 * config["beta"] * (p - inputs["logprobs"]) ** 2
        return -(p * inputs["advantages"] - find_pull_weights(inputs) * pull)

    @staticmethod
    def numpy_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> tuple[Any, Any]:
        beta, gap = config["beta"] * find_pull_weights(inputs), p - inputs["logprobs"]
        return -(p * inputs["advantages"] - 0.5 * beta * gap**2), -(inputs["advantages"] - beta * gap)


def find_pull_weights(inputs: Mapping[str, Any]) -> Any:
    """The weights b [N] of the quadratic term of `dro`, the same for numpy arrays and torch tensors.

    Without `beta_weights` a token that has neither a log-prob nor an advantage is not pulled: clients send both as 0 on
    a prompt, where a pull towards log-prob 0 would un-learn everything else.
    """
    if "beta_weights" in inputs:
        return inputs["beta_weights"]
    return (inputs["logprobs"] != 0) | (inputs["advantages"] != 0)
