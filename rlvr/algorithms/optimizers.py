"""Optimizers: what steps the weights once their gradient is there, its rate over a phase, and its options.

A new one is a class of `Optimizer` here with its entry in `OPTIMIZERS`, or anywhere and named `package.module:Class`;
the parameters of its steps are a class of `AdamParams`, which names the function that steps. No torch: the clients
compute the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rlvr.core.error_text import describe_raise
from rlvr.core.messages import AdamParams, MuonParams
from rlvr.core.protocols import Feature
from rlvr.core.registry import Registry, load_path
from rlvr.core.variants import Section, Variant, Variants, make_section, setting

Decay = Callable[[float], float]
DECAYS = ("constant", "linear", "cosine")
_decays: Registry[Decay] = Registry("decay")


def register_decay(name: str) -> Callable[[Decay], Decay]:
    """Register `function(progress) -> share` under `name`, a schedule of the learning rate: `optimizer.decay=name`.

    `progress` is the part of the optimizer steps after warm-up that are done, from 0 to below 1; the share is that of
    `learning_rate`, of which `final_rate` is kept.
    """

    def register(function: Decay) -> Decay:
        _decays.add(name, function, function)
        return function

    return register


@register_decay("constant")
def _keep(progress: float) -> float:
    return 1.0


@register_decay("linear")
def _fall_linearly(progress: float) -> float:
    return 1 - progress


@register_decay("cosine")
def _fall_by_cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def find_decay(decay: Any) -> Decay:
    """The decay of a name, at a path `package.module:function`, or the function itself; ValueError if there is none."""
    if callable(decay):
        return cast("Decay", decay)
    if not isinstance(decay, str):
        raise ValueError(f"decay={decay!r:.80}, expected a name, a path 'package.module:function' or a function")
    return load_path("decay", decay) if ":" in decay else _decays.get(decay)


@dataclass(frozen=True)
class Optimizer(Variant):
    """An optimizer and its rate over a phase of `steps` steps: linear warm-up, then a decay: constant, linear,
    cosine, or a function of the user's.

    A `warmup_steps` below 1 is a share of the steps, rounded up. The rate decays to `final_rate` x `learning_rate`.
    `grad_clip` is the largest global norm, 0 for none.
    """

    kind = "optimizer"

    title: ClassVar[str] = ""
    """Its name for people."""
    needs: ClassVar[tuple[Feature, ...]] = ()
    """What a client must have for it."""
    needs_matrices: ClassVar[str] = ""
    """Why it cannot step an adapter; "" if it can."""

    learning_rate: float = setting(1e-5, low=math.ulp(0.0), expected="a number above 0", may_be_infinite=True)
    warmup_steps: int | float = setting(0, low=0, expected="a whole number, or a share below 1", may_be_infinite=True)
    decay: str = setting("constant", choices=DECAYS, expected="or the name or path of a function")
    final_rate: float = setting(0.0, low=0, high=1, expected="0 to 1 (a share of learning_rate)")
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = setting(
        1e-8,
        low=math.ulp(0.0),
        expected="a number above 0: AdamW divides by it if there is no gradient",
        may_be_infinite=True,
    )
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    @classmethod
    def place(cls) -> str:
        """Several sections hold one: its keys begin with theirs."""
        return ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps > 1 and self.warmup_steps % 1:
            raise ValueError(f"warmup_steps={self.warmup_steps}, expected a whole number, or a share below 1")
        self._decay_at(0.0)
        if self.decay == "constant" and self.final_rate:
            raise ValueError(f"final_rate={self.final_rate} has no effect with decay=constant; use linear or cosine")

    def __str__(self) -> str:
        return f"{self.title} at {self.learning_rate:g}"

    def at(self, step: int, steps: int) -> AdamParams:
        """The parameters of optimizer step `step` (from 0) of `steps`."""
        warmup = math.ceil(self.warmup_steps * steps) if self.warmup_steps < 1 else self.warmup_steps
        share = min(1.0, (step + 1) / (warmup + 1))
        if step >= warmup and self.decay != "constant":
            through = (step - warmup) / max(1, steps - warmup)
            share = self.final_rate + (1 - self.final_rate) * self._decay_at(through)
        adam = AdamParams(
            share * self.learning_rate, self.beta1, self.beta2, self.eps, self.weight_decay, self.grad_clip
        )
        return self.make_params(adam, share)

    def _decay_at(self, progress: float) -> float:
        """The share of the rate that is left; ValueError if a function of the user's raises or gives no such number."""
        decay = find_decay(self.decay)
        try:
            share: Any = decay(progress)
        except Exception as error:
            raise ValueError(
                f"decay={self.decay} raised {describe_raise(error)}, at progress {progress:g}; correct the function"
            ) from error
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share < math.inf:
            raise ValueError(
                f"decay={self.decay}: the function returned {share!r} at progress {progress:g}, expected a number >= 0"
            )
        return share

    def count_states(self, weights: int, matrices: int) -> int:
        """The count of numbers that the optimizer keeps for `weights`, of which `matrices` are in inner matrices."""
        return 2 * weights

    def make_params(self, adam: AdamParams, share: float) -> AdamParams:
        """The parameters of a step, from those of AdamW. Warm-up and decay multiply each learning rate by `share`."""
        return adam


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Step all weights by AdamW."""

    name = "adamw"
    title = "AdamW"


@dataclass(frozen=True)
class Muon(Optimizer):
    """Step the matrices inside the model by Muon, and all other weights by AdamW.

    It needs all weights of a model in this process. The matrices take `matrix_learning_rate` (required), with the same
    warm-up and decay, and `momentum`.
    """

    name = "muon"
    title = "Muon"
    needs = (Feature.STEPPERS,)
    needs_matrices = "Muon is for whole weight matrices, the factors of an adapter are not"

    matrix_learning_rate: float | None = setting(
        None, low=math.ulp(0.0), expected="a number above 0", may_be_infinite=True
    )
    momentum: float = setting(0.95, low=0, high=math.nextafter(1.0, 0.0), expected="0 to below 1")

    def __post_init__(self) -> None:
        if self.matrix_learning_rate is None:
            raise ValueError("name=muon needs matrix_learning_rate: 0.01 to 0.03 from random weights, else far less")
        super().__post_init__()

    def __str__(self) -> str:
        return f"Muon at {self.matrix_learning_rate:g} for matrices, AdamW at {self.learning_rate:g} for the rest"

    def count_states(self, weights: int, matrices: int) -> int:
        return 2 * weights - matrices

    def make_params(self, adam: AdamParams, share: float) -> AdamParams:
        assert self.matrix_learning_rate is not None
        rate = share * self.matrix_learning_rate
        return MuonParams(**vars(adam), matrix_learning_rate=rate, momentum=self.momentum)


OPTIMIZERS = Variants("name", Optimizer, AdamW, Muon)

if TYPE_CHECKING:  # they are made of the optimizers that there are
    OptimizerSection = CriticOptimizerSection = Section
else:
    _NAME = ("name", str, AdamW.name)
    OptimizerSection = make_section("OptimizerSection", OPTIMIZERS, _NAME)
    # The rate of a critic is ten times the policy's default: its head begins at zero.
    CriticOptimizerSection = make_section("CriticOptimizerSection", OPTIMIZERS, _NAME, defaults={"learning_rate": 1e-4})
