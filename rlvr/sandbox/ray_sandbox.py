"""`RaySandbox`: a `Sandbox` whose workers are on the machines of a Ray cluster.

    with RaySandbox("auto", workers=64) as sandbox:         # the cluster that `ray start` made
        verdicts = sandbox.verify_many(jobs)                # as of `Sandbox`: the same verdicts, order and limits

Needs `pip install 'rlvr[ray]'`, on every machine of the cluster with the same code and Python.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence

from rlvr.sandbox.ray_pool import RayPool
from rlvr.sandbox.supervisor import TIERS, UNSAFE, Sandbox, check_sandbox, live_sandboxes
from rlvr.sandbox.verdict import Limits

WAIT_SECONDS = 120.0


class RaySandbox(Sandbox):
    """Verifies answers on `workers` CPUs of the cluster at `ray` (None: on all CPUs that are free at the start).

    `ray` is `auto` (the cluster that this machine has joined), `host:port`, or `local`, which starts one here.
    `wait_s` is how long a worker may take to start: give minutes to a cluster that adds machines on demand.
    ValueError for a wrong option, RayError or NoTier if the workers do not start.
    """

    def __init__(
        self,
        ray: str,
        tiers: Sequence[str] = TIERS,
        workers: int | None = None,
        limits: Limits | None = None,
        *,
        allow_unsafe: bool = False,
        wait_s: float = WAIT_SECONDS,
    ) -> None:
        self.limits = limits if limits is not None else Limits()
        check_sandbox(tiers, workers, self.limits, allow_unsafe)
        if not 0 < wait_s < math.inf:
            raise ValueError(f"wait_s={wait_s!r}, expected a number of seconds above 0")
        pool = RayPool(ray, workers, self.limits, tiers, allow_unsafe, wait_s)
        self._pairs, self._pool, self._workers = [], pool, pool
        self.tier, self.workers = pool.tier, pool.count
        if self.tier == UNSAFE:
            warnings.warn("answers run WITHOUT a sandbox on the machines of the cluster", RuntimeWarning, stacklevel=2)
        weakref.finalize(self, pool.close)
        live_sandboxes.add(self)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, each on its machine."""
        return self._workers.pids
