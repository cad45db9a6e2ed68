"""API keys and their owners. An owner is a hash of a key, so that no key is ever stored or logged.

Without keys a server listens on this machine only, and every caller is the same local owner. Both servers use this; the
Tinker SDK accepts only keys with a prefix.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

KEYS_VARIABLE = "RLVR_API_KEYS"
LOCAL_OWNER = "local"  # the one owner of a server without keys
MIN_KEY_CHARS = 12  # a shorter key could be guessed


def owner_of(key: str) -> str:
    return "key-" + hashlib.sha256(b"rlvr owner " + key.encode()).hexdigest()[:16]


class ApiKeys:
    """The API keys of a server, each of which begins with `prefix`."""

    def __init__(self, keys: list[str], prefix: str = "") -> None:
        for number, key in enumerate(keys, 1):
            if not key.startswith(prefix) or len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable():
                begins = f"{prefix!r} and then " if prefix else ""
                reason = ": the tinker SDK accepts no other" if prefix else ""
                raise ValueError(
                    f"API key number {number} (those of {KEYS_VARIABLE} come first, then those of --keys): expected "
                    f"{begins}at least {MIN_KEY_CHARS - len(prefix)} printable ASCII characters{reason}"
                )
        self._owners = {key: owner_of(key) for key in dict.fromkeys(keys)}

    @classmethod
    def load(cls, file: Path | None, prefix: str = "") -> ApiKeys:
        """Read a file with a key per line ('#' begins a comment), and RLVR_API_KEYS, separated by commas."""
        keys = [part.strip() for part in os.environ.get(KEYS_VARIABLE, "").split(",")]
        if file is not None:
            try:
                lines = file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"key file {file} cannot be read ({error}); expected one API key per line") from error
            keys += [line.partition("#")[0].strip() for line in lines]
            if not any(keys):
                begins = f", each beginning with {prefix!r}" if prefix else ""
                raise ValueError(f"key file {file} holds no key; expected one per line{begins}")
        return cls([key for key in keys if key], prefix)

    def __bool__(self) -> bool:
        return bool(self._owners)

    def owner(self, key: str | None) -> str | None:
        """The owner of a key, None if it is unknown. The time does not depend on how much of a key matches."""
        if not self._owners:
            return LOCAL_OWNER
        given, match = (key or "").encode(), None
        for known, owner in self._owners.items():
            if hmac.compare_digest(known.encode(), given):
                match = owner
        return match
