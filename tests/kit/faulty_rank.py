"""A rank that dies, hangs or fails at a chosen place: `RLVR_TEST_FAULT="RANK PLACE FATE"`, in tests.

Places are forward, backward, step and save; fates kill, hang, raise and full (no more bytes can be written). The place
torch makes it say that its version of torch is the fate.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import Any

from rlvr.clients.sharded.rank_worker import RankWorker, run_rank


class FaultyRank(RankWorker):
    def _load(self, *given: Any, **options: Any) -> tuple[Any, dict[str, str]]:
        bank, code = super()._load(*given, **options)
        rank, place, self.fate = os.environ["RLVR_TEST_FAULT"].split()
        if place == "torch" and self.ranks.rank == int(rank):
            return bank, {**code, "torch": self.fate}
        return bank, code

    def build(self, **given: Any) -> Any:
        facts = super().build(**given)
        rank, place, _ = os.environ["RLVR_TEST_FAULT"].split()
        if place != "torch" and self.ranks.rank == int(rank):
            getattr(self, f"break_{place}")()
        return facts

    def meet_fate(self, *_: Any) -> None:
        if self.fate == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fate == "hang":
            time.sleep(1000)
        elif self.fate == "raise":
            raise KeyError("a mistake of this rank alone")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def break_forward(self) -> None:
        compute = self.model.hidden_states

        def broken(*given: Any, **options: Any) -> Any:
            states = compute(*given, **options)
            self.meet_fate()
            return states

        self.model.hidden_states = broken

    def break_backward(self) -> None:
        compute = self.model.hidden_states

        def broken(*given: Any, **options: Any) -> Any:
            states = compute(*given, **options)
            if states.requires_grad:
                states.register_hook(self.meet_fate)
            return states

        self.model.hidden_states = broken

    def break_step(self) -> None:
        self.policy.preserve_snapshots = self.meet_fate  # called after the norm is known, before a weight changes

    def break_save(self) -> None:
        find = self.policy.sha256  # called after the weights are written, before the optimizer's state

        def broken() -> str:
            self.meet_fate()
            return find()

        self.policy.sha256 = broken


if __name__ == "__main__":
    run_rank(FaultyRank())
