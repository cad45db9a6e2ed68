"""A file that one process holds at a time: run folders, server state, the service's name and its learner use it."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO


def lock_file(path: Path) -> IO[str] | None:
    """Open and lock a file, until it is closed or the process ends; None if another process holds it.

    The file is made if it is missing and never truncated. OSError if it cannot be opened.
    """
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
