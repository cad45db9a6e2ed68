"""The section `sharding` of a config: how many processes train, and how long they are waited for. No torch.

Exercised by `python -m pytest tests/test_sharded_parts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


class RankError(RuntimeError):
    """A process that trains has died, failed or not answered in time. The run stops; the same command resumes it."""


@dataclass(frozen=True)
class ShardingOptions:
    """How `client=sharded` trains: `ranks` processes on this machine, each with a part of every weight.

    `timeout_s` bounds every command to them, loading the model and one forward-backward call for example. They meet at
    `port` of the loopback interface, 0 for a free one. A run is the same to the bit only with the same number of ranks:
    `allow_other_ranks` lets a run go on with another.
    """

    ranks: int = 2
    timeout_s: float = 1800.0
    port: int = 0
    allow_other_ranks: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"sharding.ranks={self.ranks}, expected at least 1")
        if not self.timeout_s > 0:
            raise ValueError(f"sharding.timeout_s={self.timeout_s}, expected a number of seconds above 0")
        if not 0 <= self.port < 65536:
            raise ValueError(f"sharding.port={self.port}, expected 1 to 65535, or 0 for a free one")
