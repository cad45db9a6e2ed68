"""The log of a run of a study: what `rlvr train` printed, attempt after attempt, and why an attempt failed.

    --- seed-3, 2026-01-31 12:00:00
    ... the output of `rlvr train` ...
    --- failed: killed by SIGKILL

The file outlives the study, so the reason of a failure does too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

TAIL_BYTES = 16 << 10  # read for the last lines
_MARK, _FAILED = "--- ", "--- failed: "
_MESSAGE, _WARNING = "rlvr: ", "rlvr: warning: "
_PROGRESS = (" ...", " s so far")  # how messages end that only say what takes long


def begin_attempt(log: Path, name: str) -> int:
    """Write the first line of an attempt; where its output begins in the file."""
    return _append(log, f"{_MARK}{name}, {datetime.now().isoformat(' ', 'seconds')}")


def record_failure(log: Path, reason: str) -> None:
    """Write why the last attempt failed."""
    _append(log, f"{_FAILED}{reason}")


def _append(log: Path, line: str) -> int:
    with open(log, "ab") as file:
        file.write(f"{line}\n".encode())
        return file.tell()


def read_failure(log: Path) -> str:
    """Why the last attempt failed, '' if it did not or is under way.

    A run that outlived its study and failed has its own message as the reason.
    """
    lines = read_last_lines(log) if log.exists() else []
    mark = max((i for i, line in enumerate(lines) if line.startswith(_MARK)), default=-1)
    if mark >= 0 and lines[mark].startswith(_FAILED):
        return lines[mark].removeprefix(_FAILED)
    return describe_error(lines[mark + 1 :])


def describe_error(lines: Sequence[str]) -> str:
    """The error at the end of what `rlvr train` printed, shortened to its first and last line; '' without one."""
    errors = [
        i
        for i, line in enumerate(lines)
        if line.startswith(_MESSAGE) and not line.startswith(_WARNING) and not line.endswith(_PROGRESS)
    ]
    if not errors:
        return ""
    first, last = lines[errors[-1]], lines[-1]
    return first.removeprefix(_MESSAGE) + (f" ... {last}" if last != first else "")


def read_last_lines(log: Path, start: int = 0) -> list[str]:
    """The last lines of a log after byte `start`, blank ones left out."""
    with open(log, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]
