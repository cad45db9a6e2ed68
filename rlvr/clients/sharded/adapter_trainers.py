"""Gradients of many adapters on one base that is cut over ranks: the trainers of `rlvr serve engine --trainers N`.

The adapters, their optimizers and their gradients stay in this process, in an `Engine`; so does a whole copy of the
base, which samples. A rank holds its part of the base and one adapter at a time. A call sends the adapter's weights,
unless they are those of the call before, cuts the data over the ranks and brings the gradient back. The ranks therefore
keep nothing that could be lost: if one dies, all are started again and the call is repeated, with bit-identical
results. Left out on purpose: critics, whose gradient the engine computes.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlvr.clients.local_engine import ModelBuild
from rlvr.clients.sharded.rank_channel import RankFacts
from rlvr.clients.sharded.rank_group import REMEDY, RankGroup, RankLauncher
from rlvr.clients.sharded.sharding_options import RankError, ShardingOptions
from rlvr.clients.sharded.split_call import check_equal, open_group, run_split
from rlvr.core.messages import Datum, ForwardBackwardOutput
from rlvr.engine.engine_options import EngineLimits

if TYPE_CHECKING:
    from rlvr.engine.policy import Policy

log = logging.getLogger(__name__)


class AdapterTrainers:
    """Ranks that hold the base model in parts and compute the gradients of adapters.

    `weights` is the hash (`tensors_sha256`) of the engine's base model. RankError if the ranks do not start, ValueError
    if what they load has another hash.
    """

    def __init__(
        self,
        model: ModelBuild,
        weights: str,
        limits: EngineLimits,
        options: ShardingOptions,
        threads: int = 1,
        start: Callable[[ShardingOptions], RankLauncher] | None = None,
    ) -> None:
        self._model, self._weights, self._limits = model, weights, limits
        self._options, self._threads, self._start = options, threads, start
        self._sent: tuple[weakref.ref[Policy], list[int]] | None = None
        self.group, self._facts = self._start_ranks()

    def _start_ranks(self) -> tuple[RankGroup, RankFacts]:
        self._sent = None
        group = open_group(self._options, self._model.device, self._threads, self._start)
        try:
            built: list[RankFacts] = group.call_in_turn("build_base", model=self._model, limits=self._limits)
            check_equal([facts.code for facts in built])
            if built[0].code["weights"] != self._weights:
                raise ValueError(
                    f"the ranks have loaded other weights of {self._model.name} than this process: the folder has "
                    "changed since; restart the server"
                )
        except BaseException:
            group.close()
            raise
        return group, built[0]

    def _restart(self) -> None:
        try:
            self.group, self._facts = self._start_ranks()
        except (RuntimeError, ValueError) as error:  # such as other code than at the start: no tenant's mistake
            raise RankError(f"the ranks could not be started again: {_summarize(error)}") from error

    def forward_backward(
        self,
        policy: Policy,
        data: Sequence[Datum],
        loss_fn: str,
        config: dict[str, float] | None = None,
        *,
        backward: bool = True,
        after_batch: Callable[[], None] | None = None,
    ) -> ForwardBackwardOutput:
        """Do for an adapter what `Learner.forward_backward` does. `after_batch` is called while the ranks compute."""
        import torch

        from rlvr.engine.learner import check_data

        check_data(data, loss_fn, config, self._facts.context, self._facts.vocabulary)
        for attempt in (1, 2):
            try:
                self._send(policy)
                output = run_split(self.group, data, loss_fn, config, backward=backward, meanwhile=after_batch)
                gradients = self.group.call("take_gradients")[0] if backward else {}
                break
            except RankError as error:
                if attempt == 2:
                    raise RankError(_summarize(error)) from error
                what = str(error).replace(REMEDY, "").rstrip()  # which is for a run
                log.warning("%s\nThe ranks are started again, and the call is repeated", what)
                self._restart()
        for name, gradient in gradients.items():
            master, added = policy.masters[name], torch.from_numpy(gradient).to(policy.masters[name].device)
            master.grad = added if master.grad is None else master.grad.add_(added)
        return output

    def _send(self, policy: Policy) -> None:
        """Give the ranks the adapter as it is now, unless they have it."""
        versions = [policy.version, *(p._version for p in policy.parameters.values())]  # of writes, by torch's count
        if self._sent is not None and self._sent[0]() is policy and self._sent[1] == versions:
            return
        self._sent = None
        weights: dict[str, np.ndarray] = {name: p.detach().cpu().numpy() for name, p in policy.parameters.items()}
        self.group.call("set_adapter", lora=policy.lora, weights=weights)
        self._sent = weakref.ref(policy), versions

    def close(self) -> None:
        """End the ranks."""
        self.group.close()


def _summarize(error: Exception) -> str:
    """The first line of an error, for tenants: the stacks and folders of this server stay in its log."""
    return str(error).partition("\n")[0].rstrip(":")
