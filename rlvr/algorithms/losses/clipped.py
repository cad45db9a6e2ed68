"""Losses that clip the importance ratio: ppo, gspo (that of a whole completion) and cispo (as a weight)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlvr.algorithms.losses.loss import DUAL_CLIP, Inputs, Loss, LossSpec, Settings, exp_numpy, exp_torch
from rlvr.algorithms.part import SpecView
from rlvr.core.variants import Variant, setting

_EPSILON = "(0.2 means the ratio 0.8 or 1.2)"


@dataclass(frozen=True)
class ClippedLoss(Loss):
    """A loss that clips ratios. `clip_low` and `clip_high` are epsilons around 1: 0.2 means a ratio of 0.8 and 1.2.
    Both have to be given."""

    clip_low: float | None = setting(None, low=0, high=1, expected=f"0 to 1.0 {_EPSILON}", flat="clip_low")
    clip_high: float | None = setting(
        None, low=0, expected=f"0 to inf {_EPSILON}", flat="clip_high", may_be_infinite=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_low is None or self.clip_high is None:
            raise ValueError(f"algorithm.loss={self.name} clips: give algorithm.clip_low and algorithm.clip_high")

    def config(self) -> dict[str, float]:
        assert self.clip_low is not None and self.clip_high is not None
        return {"clip_low_threshold": 1.0 - self.clip_low, "clip_high_threshold": 1.0 + self.clip_high}


@dataclass(frozen=True)
class DualClippedLoss(ClippedLoss):
    """`dual_clip` is the ratio, at least 1 + `clip_high` (3 is usual), beyond which a token with a negative advantage
    has no gradient either: its loss is at most that many times its advantage. None: no such bound.
    """

    dual_clip: float | None = setting(None, expected="a finite ratio (3 is usual), or null", flat="dual_clip")

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 1 + (self.clip_high or 0)
        if self.dual_clip is not None and self.dual_clip < least:
            raise ValueError(
                f"algorithm.dual_clip={self.dual_clip:g}: expected a ratio of at least 1 + clip_high = {least:g} "
                "(3 is usual), or null"
            )

    def used_keys(self) -> tuple[str, ...]:
        return () if self.dual_clip is None else ("dual_clip",)

    def config(self) -> dict[str, float]:
        return super().config() | ({} if self.dual_clip is None else {DUAL_CLIP: self.dual_clip})


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, DUAL_CLIP: math.inf}


def _objective_torch(ratio: Any, inputs: Inputs, config: Settings) -> Any:
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    bounded = ratio.clamp(max=config[DUAL_CLIP])
    return -(bounded * inputs["advantages"]).minimum(clipped * inputs["advantages"])


def _objective_numpy(ratio: Any, inputs: Inputs, config: Settings) -> tuple[Any, Any]:
    """-min(min(ratio, c) A, clip(ratio) A) for a ratio whose derivative in p is itself."""
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"]) * inputs["advantages"]
    bounded = np.minimum(ratio, config[DUAL_CLIP]) * inputs["advantages"]
    free = (bounded <= clipped) & (ratio <= config[DUAL_CLIP])
    return -np.minimum(bounded, clipped), np.where(free, -bounded, 0.0)


@dataclass(frozen=True)
class Ppo(DualClippedLoss):
    """The clipped surrogate objective."""

    name = "ppo"
    is_in_protocol = True
    spec = LossSpec(
        "-min(min(r, c) A, clip(r, lo, hi) A). Schulman et al. 2017, arXiv:1707.06347, eq. 7, with c = "
        "`dual_clip_threshold`, by default none: where A is negative, the term is at most c |A| and has no gradient "
        "beyond. Dual clip, Ye et al. 2020, arXiv:1912.09729.",
        config=_CLIP,
    )

    @staticmethod
    def torch_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> Any:
        return _objective_torch(exp_torch(p - inputs["logprobs"]), inputs, config)

    @staticmethod
    def numpy_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> tuple[Any, Any]:
        return _objective_numpy(exp_numpy(p - inputs["logprobs"]), inputs, config)

    def remark(self, algorithm: SpecView) -> str:
        return "" if algorithm.advantage.takes_critic else " (PPO clip without a critic)"


@dataclass(frozen=True)
class Gspo(DualClippedLoss):
    """The clip on the ratio of the whole completion."""

    name = "gspo"
    is_in_protocol = True
    spec = LossSpec(
        "PPO's clip, with its c, on the sequence ratio s = exp(mean over `sequence_ratio_mask` of (sg(p) - q)), "
        "with s_t = s exp(p - sg(p)). GSPO, arXiv:2507.18071, eq. 5 and 14.",
        config=_CLIP,
        masks=("sequence_ratio_mask",),
    )

    @staticmethod
    def torch_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> Any:
        mask = (inputs["sequence_ratio_mask"] != 0).to(p.dtype)
        rows = int(row_N.max()) + 1
        total = p.new_zeros(rows).index_add(0, row_N, (p.detach() - inputs["logprobs"]) * mask)
        count = p.new_zeros(rows).index_add(0, row_N, mask).clamp(min=1)
        ratio = exp_torch(total / count)[row_N] * (p - p.detach()).exp()
        return _objective_torch(ratio, inputs, config)

    @staticmethod
    def numpy_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> tuple[Any, Any]:
        mask = (inputs["sequence_ratio_mask"] != 0).astype(np.float64)
        total, count = np.bincount(row_N, (p - inputs["logprobs"]) * mask), np.bincount(row_N, mask)
        return _objective_numpy(exp_numpy(total / np.maximum(count, 1))[row_N], inputs, config)

    def sequence_ratio(self, output: Mapping[str, Any], inputs: Inputs) -> float | None:
        mask = inputs["sequence_ratio_mask"].data != 0
        return math.exp((np.asarray(output["logprobs"].data) - inputs["logprobs"].data)[mask].mean())


@dataclass(frozen=True)
class Cispo(ClippedLoss):
    """The clipped ratio as a weight, so no token loses its gradient."""

    name = "cispo"
    is_in_protocol = True
    spec = LossSpec(
        "-sg(clip(r, lo, hi)) p A: the weight is clipped, no token loses its gradient. MiniMax-M1, arXiv:2506.13585.",
        config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    )
    clips_at_any_advantage = True

    @staticmethod
    def torch_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> Any:
        ratio = exp_torch(p.detach() - inputs["logprobs"])
        weight = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
        return -weight * p * inputs["advantages"]

    @staticmethod
    def numpy_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> tuple[Any, Any]:
        ratio = exp_numpy(p - inputs["logprobs"])
        weight = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"]) * inputs["advantages"]
        return -weight * p, -weight

    @classmethod
    def inherit(cls, earlier: Variant) -> dict[str, Any]:
        """The bounds of `ppo`: both bound the ratio of a token."""
        return {"clip_low": earlier.clip_low, "clip_high": earlier.clip_high} if isinstance(earlier, Ppo) else {}
