"""The losses of algorithms. A new one is a class in a file of this folder and its entry in `LOSSES`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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


class TokenLosses(Mapping[str, Any]):
    """A field of each loss that is a sum over tokens, by the loss's name: what a client computes when it is asked for.

    It is read from `LOSSES` each time, so a loss that is registered later is in it too.
    """

    def __init__(self, field: str) -> None:
        self._field = field

    def __getitem__(self, name: str) -> Any:
        if name not in LOSSES or LOSSES.find(name).needs_whole_step:
            raise KeyError(name)
        return getattr(LOSSES.find(name), self._field)

    def __iter__(self) -> Iterator[str]:
        return (loss.name for loss in LOSSES.classes() if not loss.needs_whole_step)

    def __len__(self) -> int:
        return len(list(iter(self)))
