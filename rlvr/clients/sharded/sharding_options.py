"""The options of `client=sharded`: how many processes train, where, and their deadlines. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from rlvr.clients.client_options import ModelInProcess
from rlvr.core.ray_cluster import check_address
from rlvr.core.variants import setting

RAY_KEYS = ("cpus_per_rank", "gpus_per_rank", "wait_s")
ABOVE_0, SECONDS = math.ulp(0.0), "a number of seconds above 0"


class RankError(RuntimeError):
    """A process that trains has died, failed or not answered in time. The run stops; the same command resumes it."""


@dataclass(frozen=True)
class ShardingOptions(ModelInProcess):
    """How `client=sharded` trains: `ranks` processes, each with a part of every weight (FSDP).

    They run on this machine, or, with `ray`, on the machines of a Ray cluster: `auto` (the one that this machine has
    joined), HOST:PORT, or `local`, which starts one here. Ray then has `wait_s` seconds to place each rank with
    `cpus_per_rank` CPUs and `gpus_per_rank` GPUs. `timeout_s` bounds every command to the ranks, such as loading the
    model or one forward-backward call. `port` is that of the ranks' rendezvous, on the machine of rank 0; 0 takes a
    free one. A run is bit-identical only with the same number of ranks: `allow_other_ranks` resumes it with another.
    """

    name = "sharded"
    shares_weights = True
    uncompared = ("timeout_s", "port", "allow_other_ranks", "ray", "wait_s")
    evaluates_as = "local"  # one process loads the same checkpoint, and samples as well

    ranks: int = setting(2, low=1, expected="at least 1", flat="sharding.ranks")
    timeout_s: float = setting(1800.0, low=ABOVE_0, expected=SECONDS, flat="sharding.timeout_s")
    port: int = setting(0, low=0, high=65535, expected="1 to 65535, or 0 for a free one", flat="sharding.port")
    allow_other_ranks: bool = setting(False, flat="sharding.allow_other_ranks")
    ray: str | None = setting(None, flat="sharding.ray")
    cpus_per_rank: int = setting(1, low=1, expected="at least 1", flat="sharding.cpus_per_rank")
    gpus_per_rank: int = setting(0, low=0, expected="at least 0", flat="sharding.gpus_per_rank")
    wait_s: float = setting(120.0, low=ABOVE_0, expected=SECONDS, flat="sharding.wait_s")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ray is not None:
            check_address(self.ray, "sharding.ray")
        for field in fields(self):
            if self.ray is None and field.name in RAY_KEYS and getattr(self, field.name) != field.default:
                raise ValueError(f"sharding.{field.name} has no effect without sharding.ray; leave it out, or set both")

    @property
    def processes(self) -> int:
        return self.ranks

    @property
    def cluster(self) -> str | None:
        return self.ray

    def list_uncompared(self) -> Sequence[str]:
        return (*self.uncompared, "ranks") if self.allow_other_ranks else self.uncompared

    def explain_change(self, changed: Sequence[str], folder: Path) -> str:
        if list(changed) != ["ranks"]:
            return ""
        return (
            f"{self.key('ranks')}={self.ranks}: the run in {folder} began with another number, and sums over other "
            "ranks are rounded otherwise: it would not end with the same bits. Give the same number, or "
            "sharding.allow_other_ranks=true to go on without that"
        )

    def check_device(self, device: str, gpus: int = 0) -> None:
        """ValueError if Ray would place ranks without the `device` (auto, cpu or cuda) that they are to compute on.

        `gpus`: how many the cluster has, once it is known.
        """
        if gpus and device == "auto" and not self.gpus_per_rank:
            raise ValueError(
                f"model.device=auto with sharding.gpus_per_rank=0 would train on the CPUs of a cluster that has {gpus} "
                "GPUs; give sharding.gpus_per_rank=1, or model.device=cpu"
            )
        if self.ray is not None and device.startswith("cuda") and not self.gpus_per_rank:
            raise ValueError(
                f"the device {device} needs sharding.gpus_per_rank=1: a rank sees only the GPUs that it asks Ray for"
            )
        if self.gpus_per_rank and device == "cpu":
            raise ValueError(f"sharding.gpus_per_rank={self.gpus_per_rank} has no effect on the device cpu; give 0")
