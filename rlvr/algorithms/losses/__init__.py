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
from rlvr.core.registry import load_object
from rlvr.core.variants import Variants


class _Losses(Variants[Loss]):
    """The losses by name, and those of a user's by their path: a function, or a class of `Loss`."""

    def __init__(self, *arguments: Any, or_else: str) -> None:
        super().__init__(*arguments, or_else=or_else)
        self._by_path: dict[str, type[Loss]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._by_path or super().__contains__(name)

    def find(self, name: str) -> type[Loss]:
        """The loss of that name or path. The name of the class at a path is that path, by which clients are called."""
        if ":" not in name:
            return super().find(name)
        try:
            found = load_object(self.key, name)
        except ValueError:  # a run that is only looked at needs no loss; one that computes it raises this then
            return self._by_path.get(name) or function_loss(name)
        if not (isinstance(found, type) and issubclass(found, Loss)):
            return function_loss(name)
        known = self._by_path.get(name)
        if known is None or found not in known.__bases__:  # a module may be loaded anew
            known = self._by_path[name] = type(found.__name__, (found,), {"name": name, "__module__": found.__module__})
        return known

    def get_known(self, name: str) -> type[Loss]:
        """The loss of a name that is in the table; no path is followed, since the name may come from a request."""
        return self._by_path.get(name) or self._known[name]


LOSSES = _Losses(
    "algorithm.loss", Loss, CrossEntropy, ImportanceSampling, Ppo, Cispo, Dro, Gspo, Sapo, Dpo, Ipo, Kto,
    or_else="; or a path 'package.module:function' or 'package.module:Class'",
)  # fmt: skip


class TokenLossAttribute(Mapping[str, Any]):
    """One attribute of every loss that is a sum over tokens, by the loss's name.

    `TokenLossAttribute("spec")["ppo"]` is the spec of PPO. `LOSSES` is read each time, so a loss that is registered
    later is found too.
    """

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute

    def __getitem__(self, name: str) -> Any:
        if name not in LOSSES or LOSSES.get_known(name).needs_whole_step:
            raise KeyError(name)
        return getattr(LOSSES.get_known(name), self._attribute)

    def __iter__(self) -> Iterator[str]:
        return (loss.name for loss in LOSSES.classes() if not loss.needs_whole_step)

    def __len__(self) -> int:
        return len(list(iter(self)))
