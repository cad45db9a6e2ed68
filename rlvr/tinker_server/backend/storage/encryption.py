"""Encrypts downloaded weights: every file to the age keys (age-encryption.org) of its recipients.

`pyrage` is part of the extra [serve] and imported when it is used. Exercised by
tests/test_tinker_backend_external.py. Left out on purpose: passphrases and plugins, which need a person or a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlvr.tinker_server.protocol.errors import UserError

SUFFIX = ".age"
MAX_RECIPIENTS = 10  # as in the SDK


def parse_recipients(texts: list[str]) -> list[Any]:
    """Parse the keys to encrypt to: native ones (age1...) and SSH public keys (ssh-ed25519, ssh-rsa)."""
    if not texts:
        return []
    if len(texts) > MAX_RECIPIENTS:
        raise UserError(f"age_encryption_recipients: {len(texts)} are given, expected at most {MAX_RECIPIENTS}")
    try:
        import pyrage
    except ModuleNotFoundError:
        raise UserError(
            "age_encryption_recipients: this server cannot encrypt because pyrage is not installed on it (pip install "
            "pyrage, or the extra rlvr[serve]). Leave them out to save the files unencrypted"
        ) from None
    modules: Any = pyrage
    found: list[Any] = []
    for text in texts:
        kind = modules.ssh if text.startswith("ssh-") else modules.x25519
        try:
            found.append(kind.Recipient.from_str(text.strip()))
        except modules.RecipientError as error:
            raise UserError(
                f"age_encryption_recipients: {text[:80]!r} is not a key to encrypt to ({error}); expected age1... (see "
                "age-keygen -y) or an SSH public key"
            ) from None
    return found


def encrypt_files(folder: Path, recipients: list[Any]) -> None:
    """Each file of a folder becomes `<name>.age`."""
    if not recipients:
        return
    import pyrage

    modules: Any = pyrage
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        modules.encrypt_file(str(file), f"{file}{SUFFIX}", recipients)
        file.unlink()
