"""What a message says of another error."""

from __future__ import annotations

import traceback

MOST = 300  # characters of a line


def first_line(error: BaseException | None, secret: str = "") -> str:
    """The first line of an error's text, enough of a library's long message for a user; its type where it has none.

    `secret` is replaced by ***, before a long line is cut.
    """
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (line.replace(secret, "***") if secret else line)[:MOST]


def one_line(error: BaseException) -> str:
    """All of an error's text in one line, for libraries that say in a later line what is wrong; cut like a line."""
    return " ".join(str(error).split())[:MOST] or type(error).__name__


def describe_raise(error: BaseException) -> str:
    """What a function of the user's raised, and where: `KeyError: 'x', in fall at decays.py:3`."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}, in {frame.name} at {frame.filename}:{frame.lineno}"
