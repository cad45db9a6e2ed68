"""Losses without a bound on the policy's change: cross-entropy, and the policy gradient with importance weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlvr.algorithms.losses.loss import Inputs, Loss, LossSpec, Settings, exp_numpy, exp_torch
from rlvr.algorithms.part import SpecView


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """-w p, with the advantages as weights."""

    name = "cross_entropy"
    is_in_protocol = True
    spec = LossSpec(
        "-w p; with K targets per token (a teacher's distribution, for example) -sum_k w_k p_k.",
        inputs=("weights",),
        allows_many_targets=True,
    )

    @staticmethod
    def torch_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> Any:
        terms = -inputs["weights"] * p
        return terms if p.ndim == 1 else terms.sum(-1)

    @staticmethod
    def numpy_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> tuple[Any, Any]:
        return -inputs["weights"] * p, -inputs["weights"]

    def later_updates_are_stale(self, algorithm: SpecView) -> bool:
        return not algorithm.advantage.is_never_negative  # a negative weight pushes a token down without end


@dataclass(frozen=True)
class ImportanceSampling(Loss):
    """-r A: the policy gradient corrected for the sampler's weights, unclipped."""

    name = "importance_sampling"
    is_in_protocol = True
    spec = LossSpec(
        "-r A: the policy gradient corrected for the sampler's weights, unclipped. On-policy it is REINFORCE."
    )
    has_unbounded_ratio = True

    @staticmethod
    def torch_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> Any:
        return -exp_torch(p - inputs["logprobs"]) * inputs["advantages"]

    @staticmethod
    def numpy_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> tuple[Any, Any]:
        term = -exp_numpy(p - inputs["logprobs"]) * inputs["advantages"]
        return term, term

    def later_updates_are_stale(self, algorithm: SpecView) -> bool:
        return True
