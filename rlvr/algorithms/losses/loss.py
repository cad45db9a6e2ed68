"""What a loss is: its formula in torch and numpy, what a batch needs for it, and the options that a run gives it.

Legend: p = log-prob of the target under the trained policy, q = `logprobs` (the sampler's), A = `advantages`,
r = exp(min(p - q, 20)) the importance ratio with dr/dp = r (`MAX_LOG_RATIO`), sg = stop-gradient. N = tokens of the
rows of a call laid end to end, `row_N` = which datum a token belongs to. No torch here: the formulas in torch are
methods of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rlvr.algorithms.part import Part, SpecView
from rlvr.core.protocols import CustomLoss, Feature
from rlvr.core.types import Trajectory

# Inputs that any loss takes beside its own: a KL to a reference, an exact entropy bonus, and a cross-entropy.
KL_INPUTS = ("kl_weights", "reference_logprobs")
ENTROPY_INPUT = "entropy_weights"
CROSS_ENTROPY_INPUT = "cross_entropy_weights"
# No exp of a difference of log-probs is above exp(20) = 4.9e8: fp32 ends at exp(88), and inf x 0 is nan. Beyond it a
# ratio and a k3 keep the slope that they have there.
MAX_LOG_RATIO = 20.0

Inputs = dict[str, Any]
Settings = Mapping[str, float]


@dataclass(frozen=True)
class LossSpec:
    """What one named loss computes and reads. Every loss is a sum over tokens; the reduction is a weight per trajectory
    folded into `advantages` or `weights`.

    - `inputs` [T] are required in every datum besides `target_tokens`, and so are `masks`, 1 where the policy acted.
    - `weight_inputs` [T] are optional: weights of terms that do not carry A, so that a reduction reaches them too.
    - `config` holds the settings (`loss_fn_config`) with their defaults; thresholds are absolute ratios.
    - `allows_many_targets`: `target_tokens` and the inputs may also be [T, K].
    """

    formula: str
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    config: Mapping[str, float] = field(default_factory=dict[str, float])
    masks: tuple[str, ...] = ()
    weight_inputs: tuple[str, ...] = ()
    allows_many_targets: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        return (*self.inputs, *self.masks)

    @property
    def optional(self) -> tuple[str, ...]:
        return () if self.predicts_values else (*KL_INPUTS, ENTROPY_INPUT, CROSS_ENTROPY_INPUT, *self.weight_inputs)

    @property
    def predicts_values(self) -> bool:
        """Whether the loss is a critic's, whose outputs are values instead of log-probs."""
        return "returns" in self.inputs

    @property
    def uses_advantages(self) -> bool:
        return "advantages" in self.inputs


@dataclass(frozen=True)
class Loss(Part):
    """A loss of an algorithm, with its options. A new one is a class in this folder and its entry in `LOSSES`.

    - `spec`: what it computes and reads, on every client and over the Tinker protocol.
    - `torch_terms` and `numpy_terms`: its terms [N], and in numpy also their derivatives in p, for a loss that is a sum
      over tokens. A loss without them is one function of all rows of an optimizer step (`needs_whole_step`).
    """

    kind = "loss"
    spec: ClassVar[LossSpec]

    needs_whole_step: ClassVar[bool] = False
    """It is one function of all rows of an optimizer step, computed by `forward_backward_custom`."""
    compares_completions: ClassVar[bool] = False
    """It compares completions by their verdicts, and with the policy as RL began; it has no advantages."""
    has_unbounded_ratio: ClassVar[bool] = False
    """Its importance weights have no bound, so stale completions need a cap of their own."""
    has_gradient_at_zero: ClassVar[bool] = False
    """A trajectory with advantage 0 may have a gradient."""
    is_paired: ClassVar[bool] = False
    """It compares completions of one group in pairs."""
    takes_divergence: ClassVar[bool] = False
    """It takes an estimate of the policy's divergence from the reference (`of_rows`)."""
    clips_at_any_advantage: ClassVar[bool] = False
    """A clipped token keeps its gradient, of a clipped weight, whatever the sign of its advantage."""
    is_in_protocol: ClassVar[bool] = False
    """Servers of the Tinker protocol know it by its name; others are computed in two passes there. It counts for the
    package's own classes alone."""
    needs: ClassVar[tuple[Feature, ...]] = ()
    """What a client must have for it beside the loss itself."""

    @staticmethod
    def torch_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> Any:
        """The terms [N] of tensors; their gradient is that of `p`."""
        raise NotImplementedError("this loss has no torch_terms(p, inputs, config, row_N)")

    @staticmethod
    def numpy_terms(p: Any, inputs: Inputs, config: Settings, row_N: Any) -> tuple[Any, Any]:
        """The terms [N] of arrays and their derivatives in p [N]."""
        raise NotImplementedError("this loss has no numpy_terms(p, inputs, config, row_N), which client=mock computes")

    def config(self) -> dict[str, float]:
        """The settings that a call gets (`loss_fn_config`): the options that have the name of one. A loss of a whole
        step has its options itself."""
        settings = () if self.needs_whole_step else self.spec.config
        return {name: value for name, value in self.options.items() if name in settings}

    def later_updates_are_stale(self, algorithm: SpecView) -> bool:
        """Whether nothing bounds what a second update of the same completions does."""
        return False

    def row_inputs(self, trajectory: Trajectory, weight: float) -> Inputs:
        """The inputs of a datum beside log-probs and advantages; `weight` is the reduction."""
        ones = np.ones(trajectory.num_response_tokens)
        inputs: Inputs = dict.fromkeys(self.spec.masks, ones)
        return inputs | {name: weight * ones for name in self.spec.weight_inputs}  # 0 where the policy did not act

    def keep_comparable(
        self, rows: Sequence[tuple[Trajectory, float]]
    ) -> tuple[Sequence[tuple[Trajectory, float]], int]:
        """The rows that the loss learns from, and how many pairs were left out because their tokens are equal."""
        return rows, 0

    def of_rows(self, trajectories: Sequence[Trajectory], *, is_mean: bool, divergence: float | None) -> CustomLoss:
        """The loss of all rows of an optimizer step, if it `needs_whole_step`."""
        raise NotImplementedError

    def estimate_divergence(
        self,
        trajectories: Sequence[Trajectory],
        *,
        is_mean: bool,
        context: int | None,
        before: Callable[[Sequence[Trajectory]], Sequence[Sequence[float]]],
        now: Callable[[Sequence[Trajectory]], Sequence[Sequence[float]]],
    ) -> float | None:
        """The policy's divergence from the reference, if the loss takes one of completions that it did not sample.

        `before` and `now` give the log-probs [R] of trajectories under the reference and the policy; `context` is the
        context length of the model in tokens; with `is_mean` a completion counts with the mean over its tokens.
        """
        return None

    def sequence_ratio(self, output: Mapping[str, Any], inputs: Inputs) -> float | None:
        """The ratio of a whole completion, for a loss that clips it instead of each token's."""
        return None

    def used_keys(self) -> tuple[str, ...]:
        """Options that are used beside those that every loss of the name has."""
        return ()

    def remark(self, algorithm: SpecView) -> str:
        """A remark that a run's plan prints after the name of the loss."""
        return ""


DUAL_CLIP = "dual_clip_threshold"


def exp_torch(d: Any) -> Any:
    """exp(min(d, MAX_LOG_RATIO)), whose derivative is itself beyond the bound too."""
    return (d - (d.detach() - MAX_LOG_RATIO).clamp(min=0)).exp()


def exp_numpy(d: np.ndarray) -> np.ndarray:
    """exp(min(d, MAX_LOG_RATIO)); its slope is itself."""
    return np.exp(np.minimum(d, MAX_LOG_RATIO))
