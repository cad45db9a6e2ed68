"""Messages to the user on standard error. They may quote what a model or a user's function wrote."""

from __future__ import annotations

import sys


def print_message(text: str) -> None:
    """Print `rlvr: TEXT` without secrets and without control characters."""
    from rlvr.tracking import readable_lines

    print(f"rlvr: {readable_lines(mask_secrets(text))}", file=sys.stderr)


def mask_secrets(text: str) -> str:
    """The text without what the environment gave to the config: messages end up in logs."""
    from rlvr.config import interpolate

    return interpolate.mask_secrets(text)
