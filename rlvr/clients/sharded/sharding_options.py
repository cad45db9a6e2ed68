"""The section `sharding` of a config: how many processes train, where, and their deadlines. No torch.

Exercised by `python -m pytest tests/test_sharded_parts.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rlvr.core.ray_cluster import check_address

RAY_KEYS = ("cpus_per_rank", "gpus_per_rank", "wait_s")


class RankError(RuntimeError):
    """A process that trains has died, failed or not answered in time. The run stops; the same command resumes it."""


@dataclass(frozen=True)
class ShardingOptions:
    """How `client=sharded` trains: `ranks` processes, each with a part of every weight (FSDP).

    They run on this machine, or, with `ray`, on the machines of a Ray cluster: `auto` (the one that this machine has
    joined), HOST:PORT, or `local`, which starts one here. Ray then has `wait_s` seconds to place each rank with
    `cpus_per_rank` CPUs and `gpus_per_rank` GPUs. `timeout_s` bounds every command to the ranks, such as loading the
    model or one forward-backward call. `port` is that of the ranks' rendezvous, on the machine of rank 0; 0 takes a
    free one. A run is bit-identical only with the same number of ranks: `allow_other_ranks` resumes it with another.
    """

    ranks: int = 2
    timeout_s: float = 1800.0
    port: int = 0
    allow_other_ranks: bool = False
    ray: str | None = None
    cpus_per_rank: int = 1
    gpus_per_rank: int = 0
    wait_s: float = 120.0

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"sharding.ranks={self.ranks}, expected at least 1")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"sharding.timeout_s={self.timeout_s}, expected a number of seconds above 0")
        if not 0 <= self.port < 65536:
            raise ValueError(f"sharding.port={self.port}, expected 1 to 65535, or 0 for a free one")
        if self.ray is not None:
            check_address(self.ray, "sharding.ray")
        for key, least in (("cpus_per_rank", 1), ("gpus_per_rank", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"sharding.{key}={getattr(self, key)}, expected at least {least}")
        if not 0 < self.wait_s < math.inf:
            raise ValueError(f"sharding.wait_s={self.wait_s}, expected a number of seconds above 0")
        for field in fields(self):
            if self.ray is None and field.name in RAY_KEYS and getattr(self, field.name) != field.default:
                raise ValueError(f"sharding.{field.name} has no effect without sharding.ray; leave it out, or set both")

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
