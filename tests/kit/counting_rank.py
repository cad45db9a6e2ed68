"""A rank that counts the bytes that it gathers, and those of the gradients that it adds up, in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlvr.clients.sharded.rank_worker import RankWorker, run_rank


class CountingRank(RankWorker):
    moved = 0

    def join(self, *given: Any, **options: Any) -> str:
        backend = super().join(*given, **options)
        measure = self.ranks.measure

        def count(collective: Callable[..., Any], *tensors: Any, **options: Any) -> Any:
            if collective.__name__ != "all_reduce":
                self.moved += max(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            return measure(collective, *tensors, **options)

        self.ranks.measure = count
        return backend

    def count_moved(self) -> int:
        return self.moved


if __name__ == "__main__":
    run_rank(CountingRank())
