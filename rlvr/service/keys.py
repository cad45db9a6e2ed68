"""API keys: who is asking. An owner is a hash of a key, so that no key is ever stored or logged.

Without keys a server listens on this machine only, and every caller is the same local owner. Both services use this:
the one of sessions and the Tinker server, whose SDK takes only keys with a prefix. Exercised by
tests/test_service_door.py and tests/test_tinker_core_tenants.py.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

VARIABLE = "RLVR_API_KEYS"
NOBODY = "local"  # the one owner of a server without keys
SHORTEST = 12  # characters: what can be guessed is no key


def owner_of(key: str) -> str:
    return "key-" + hashlib.sha256(b"rlvr owner " + key.encode()).hexdigest()[:16]


class Keys:
    """The API keys of a server. `prefix` is what each has to begin with."""

    def __init__(self, keys: list[str], prefix: str = "") -> None:
        for key in keys:
            if not key.startswith(prefix) or len(key) < SHORTEST or not key.isascii() or not key.isprintable():
                begins = f"{prefix!r} and then " if prefix else ""
                raise ValueError(
                    f"API key {key[:6]!r}...: expected {begins}at least {SHORTEST - len(prefix)} printable ASCII "
                    f"characters{': the tinker SDK takes no other' if prefix else ''}"
                )
        self._owners = {key: owner_of(key) for key in dict.fromkeys(keys)}

    @classmethod
    def load(cls, file: Path | None, prefix: str = "") -> Keys:
        """From a file with a key a line ('#' begins a comment), and from RLVR_API_KEYS, separated by commas."""
        found = [part.strip() for part in os.environ.get(VARIABLE, "").split(",")]
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"key file {file} cannot be read ({error}); expected one API key a line") from error
            found += [line.partition("#")[0].strip() for line in lines]
            if not any(found):
                begins = f", each beginning with {prefix!r}" if prefix else ""
                raise ValueError(f"key file {file} holds no key; expected one a line{begins}")
        return cls([key for key in found if key], prefix)

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
