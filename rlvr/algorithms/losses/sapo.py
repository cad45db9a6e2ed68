"""A soft gate on the importance ratio instead of a clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr.algorithms.losses.loss import Inputs, Loss, LossSpec, Settings, exp_numpy, exp_torch
from rlvr.core.variants import setting

TEMPERATURES = (1e-6, 1e6)  # beyond these 4 / tau, or tau x 0, is no number in float32
_LEAST, _MOST = TEMPERATURES
_EXPECTED = f"a temperature from {_LEAST:g} to {_MOST:g} (1 is usual)"


@dataclass(frozen=True)
class Sapo(Loss):
    """A sigmoid of the ratio is its gate: `positive_temperature` where the advantage is above 0, else
    `negative_temperature`. The higher the temperature, the sooner a token far from the sampler loses its gradient.
    """

    name = "sapo"
    spec = LossSpec(
        "-(4 / tau) sigmoid(tau (r - 1)) A, tau = `positive_temperature` where A > 0, else `negative_temperature`. At "
        "r = 1 its gradient is that of `ppo`. Soft Adaptive Policy Optimization, arXiv:2511.20347.",
        config={"positive_temperature": 1.0, "negative_temperature": 1.05},
    )

    positive_temperature: float = setting(1.0, low=_LEAST, high=_MOST, expected=_EXPECTED)
    negative_temperature: float = setting(1.05, low=_LEAST, high=_MOST, expected=_EXPECTED)

    @staticmethod
    def torch_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> Any:
        ratio, advantages = exp_torch(p - inputs["logprobs"]), inputs["advantages"]
        positive = advantages.gt(0).to(advantages.dtype)
        tau = positive * config["positive_temperature"] + (1 - positive) * config["negative_temperature"]
        return -(4 / tau) * (tau * (ratio - 1)).sigmoid() * advantages

    @staticmethod
    def numpy_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> tuple[Any, Any]:
        ratio, advantages = exp_numpy(p - inputs["logprobs"]), inputs["advantages"]
        tau = np.where(advantages > 0, config["positive_temperature"], config["negative_temperature"])
        gate = 1 / (1 + np.exp(-np.clip(tau * (ratio - 1), -80.0, 80.0)))
        return -(4 / tau) * gate * advantages, -4 * gate * (1 - gate) * ratio * advantages
