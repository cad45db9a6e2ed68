"""`metrics.jsonl`: one JSON object a line, appended as a run goes, cut back to the last whole step on resume."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, cast

from rlvr.core.files import write_atomic


class MetricsLog:
    """Appends rows to a JSON-lines file: keys in the order given, floats that read back to the same bits.

    A row is with the operating system when `append` returns, and on the disk when `sync` does. A row that a crash or a
    full disk cut short is dropped at the next write. Every row has a `phase` (one of `phases`, if given) and a `step`;
    reading a line without them is an error.
    """

    def __init__(self, path: str | os.PathLike[str], phases: Sequence[str] = ()) -> None:
        self.path, self.phases = Path(path), phases
        self._file: FileIO | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        line = _line(row)
        if self._file is None:
            self._drop_torn_line()
            self._file = FileIO(self.path, "a")
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            self.close()  # so that the next append starts by dropping what was written of this row
            raise

    def sync(self) -> None:
        """Return only when every row appended so far is on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def keep(self, predicate: Callable[[dict[str, Any]], bool]) -> None:
        """Atomically rewrite the file with only the rows for which `predicate` is true; a torn last line goes too."""
        self.close()
        if self.path.exists():
            write_atomic(self.path, b"".join(_line(row) for row in self.rows() if predicate(row)))

    def rows(self) -> list[dict[str, Any]]:
        """The rows in the file, a torn last line left out; a line before it that is no row is a ValueError."""
        content = self.path.read_bytes() if self.path.exists() else b""
        lines = content.split(b"\n")[:-1]  # what follows the last newline was never finished
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                # After a power cut the last line may hold zeros although its newline is there.
                if number < len(lines):
                    raise ValueError(f"{self.path}, line {number}: not JSON: {line[:60]!r}; delete the line") from None
                break
            if problem := self._row_problem(row):
                raise ValueError(f"{self.path}, line {number}: {problem}: {line[:60]!r}; delete the line")
            rows.append(row)
        return rows

    def _row_problem(self, row: Any) -> str:
        """'' if a JSON value is a row of metrics, else what is wrong."""
        if not isinstance(row, dict):
            return "not a row of metrics"
        fields = cast(dict[str, Any], row)
        phase, step = fields.get("phase"), fields.get("step")
        if not isinstance(phase, str):
            return "a row without a phase"
        if self.phases and phase not in self.phases:
            return f"phase {phase[:40]!r}, expected one of {', '.join(self.phases)}"
        if type(step) is not int or not 0 <= step < 2**63:
            return "a row whose step is no whole number from 0"
        return ""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _drop_torn_line(self) -> None:
        if self.path.exists() and (content := self.path.read_bytes()) and not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, default=float) + "\n").encode()  # `float` takes numpy's scalars
