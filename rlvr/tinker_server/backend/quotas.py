"""Quotas: how many bytes and samples each owner may have waiting. (`rlvr.web.auth` maps keys to owners.)"""

from __future__ import annotations

import threading

from rlvr.tinker_server.protocol.errors import Busy
from rlvr.tinker_server.protocol.server_limits import ServerLimits

KEY_PREFIX = "tml-"  # of every key: the tinker SDK accepts no other
ANY_KEY = f"{KEY_PREFIX}no-key-needed"  # for a server without keys: the SDK requires one


class OwnerQuotas:
    """What each owner has waiting; `acquire` raises `Busy` if it would be too much."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._samples: dict[str, int] = {}

    def acquire(self, owner: str, size: int, samples: int = 0, *, awaited: bool = False) -> int:
        """The bytes the owner then holds. An `awaited` request is never refused: others wait for it."""
        with self._lock:
            held, running = self._bytes.get(owner, 0), self._samples.get(owner, 0)
            if held and held + size > self._limits.owner_bytes and not awaited:
                raise Busy(
                    f"your waiting requests hold {held:,} bytes, expected at most {self._limits.owner_bytes:,}; try "
                    "again soon"
                )
            if running + samples > self._limits.owner_samples:
                raise Busy(f"{running} of your sampling requests are waiting already; try again soon")
            self._bytes[owner], self._samples[owner] = held + size, running + samples
            return held + size

    def release(self, owner: str, size: int, samples: int = 0) -> None:
        with self._lock:
            for held, freed in ((self._bytes, size), (self._samples, samples)):
                held[owner] = held.get(owner, 0) - freed
                if held[owner] <= 0:
                    del held[owner]
