"""The losses of algorithms. A new one is a class in a file of this folder and its entry in `LOSSES`."""

from __future__ import annotations

from rlvr.algorithms.losses.clipped import Cispo, Gspo, Ppo
from rlvr.algorithms.losses.custom import function_loss
from rlvr.algorithms.losses.dro import Dro
from rlvr.algorithms.losses.loss import Loss
from rlvr.algorithms.losses.policy_gradient import CrossEntropy, ImportanceSampling
from rlvr.algorithms.losses.preferences import Dpo, Ipo, Kto
from rlvr.algorithms.losses.sapo import Sapo
from rlvr.core.variants import Variants


class _Losses(Variants[Loss]):
    def find(self, name: str) -> type[Loss]:
        return function_loss(name) if ":" in name else super().find(name)


LOSSES = _Losses(
    "algorithm.loss", Loss, CrossEntropy, ImportanceSampling, Ppo, Cispo, Dro, Gspo, Sapo, Dpo, Ipo, Kto,
    or_else="; or a path 'package.module:function'",
)  # fmt: skip
