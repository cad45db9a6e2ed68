"""Who is asking, and how much of the server they may hold: API keys, owners, queues.

An owner is a hash of a key, so that no key is ever stored or logged. Everything a key makes belongs to its owner.
Exercised by tests/test_tinker_core_tenants.py.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from pathlib import Path

from rlvr.service.tinker_api.errors import Busy
from rlvr.service.tinker_api.limits import ServerLimits

VARIABLE = "RLVR_API_KEYS"
NOBODY = "local"  # the one owner of a server without keys


def owner_of(key: str) -> str:
    return "key-" + hashlib.sha256(b"rlvr owner " + key.encode()).hexdigest()[:16]


class Keys:
    """The API keys of a server. Without any, every caller is the same local owner."""

    def __init__(self, keys: list[str]) -> None:
        for key in keys:
            if not key.startswith("tml-") or len(key) < 12 or not key.isascii() or not key.isprintable():
                raise ValueError(
                    f"API key {key[:6]!r}...: expected 'tml-' and at least 8 printable ASCII characters: the tinker "
                    "SDK takes no other"
                )
        self._owners = {key: owner_of(key) for key in dict.fromkeys(keys)}

    @classmethod
    def load(cls, file: Path | None) -> Keys:
        """From a file with a key a line ('#' begins a comment), and from RLVR_API_KEYS, separated by commas."""
        found = [part.strip() for part in os.environ.get(VARIABLE, "").split(",")]
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"key file {file} cannot be read ({error}); expected one API key a line") from error
            found += [line.partition("#")[0].strip() for line in lines]
            if not any(found):
                raise ValueError(f"key file {file} holds no key; expected one a line, each beginning with 'tml-'")
        return cls([key for key in found if key])

    def __bool__(self) -> bool:
        return bool(self._owners)

    def owner(self, key: str | None) -> str | None:
        """Whose key this is; None where it is nobody's. Takes as long for a near miss as for a far one."""
        if not self._owners:
            return NOBODY
        given, found = (key or "").encode(), None
        for known, owner in self._owners.items():
            if hmac.compare_digest(known.encode(), given):
                found = owner
        return found


class Quota:
    """What each owner has waiting; `take` refuses with `Busy` what would be too much."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._samples: dict[str, int] = {}

    def take(self, owner: str, size: int, samples: int = 0, *, awaited: bool = False) -> int:
        """What it holds then, in bytes. An `awaited` request is never refused: others wait for it."""
        with self._lock:
            held, running = self._bytes.get(owner, 0), self._samples.get(owner, 0)
            if held and held + size > self._limits.owner_bytes and not awaited:
                raise Busy(f"{held:,} bytes of yours are waiting already; {self._limits.owner_bytes:,} may")
            if running + samples > self._limits.owner_samples:
                raise Busy(f"{running} sampling requests of yours are waiting already; try again soon")
            self._bytes[owner], self._samples[owner] = held + size, running + samples
            return held + size

    def give(self, owner: str, size: int, samples: int = 0) -> None:
        with self._lock:
            for held, freed in ((self._bytes, size), (self._samples, samples)):
                held[owner] = held.get(owner, 0) - freed
                if held[owner] <= 0:
                    del held[owner]
