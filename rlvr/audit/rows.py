"""Rows of a file that anybody wrote: JSON lines or one JSON list, gzipped or not; each an answer and its task.

A line that cannot be used, or is longer than ROW_BYTES, is a `Bad` row, never the end of the file. Rows know their line
of the file, blank lines counted. JSON lines are streamed, a JSON list is read whole.
`python -m pytest tests/test_verify_command.py` exercises it.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.registry import nearest
from rlvr.types import Task, Trajectory

# The first that a row has is what is graded. `answer` is missing on purpose: data sets keep the gold there.
RESPONSE_FIELDS = (
    "response", "completion", "output", "generation", "prediction", "solution_str", "code", "solution",
    "canonical_solution",
)  # fmt: skip
ROW_BYTES = 64 << 20
LIST_BYTES = 1 << 30
PROMPT_FIELDS = ("prompt", "question", "problem", "text")


@dataclass(frozen=True)
class Bad:
    """A row that holds no answer, and why."""

    why: str


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """("line 3", or "row 3" of a list, and the row); `Bad` where that is no object. ValueError for a useless file."""
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.open(raw) if zipped else raw as file:
                yield from _parsed(file, path)
    except FileNotFoundError:
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ValueError(f"{path} does not exist{near}; give a file of JSON lines, or one JSON list") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: the compressed data is damaged ({error}); fetch the file again") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); give a file of JSON lines") from error


def _parsed(file: Any, path: Path) -> Iterator[tuple[str, Any]]:
    number = seen = good = 0
    while line := file.readline(ROW_BYTES + 1):
        number += 1
        where = f"line {number}"
        if not line.strip() and len(line) <= ROW_BYTES:
            continue
        if not seen and line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
            yield from _listed(line + file.read(LIST_BYTES), path)
            return
        seen += 1
        if len(line) > ROW_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(ROW_BYTES)
            yield where, Bad(f"{where} is longer than {ROW_BYTES >> 20} MiB")
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            yield where, Bad(f"{where} is not JSON ({_why(error)})")
            continue
        good += isinstance(row, dict)
        yield where, row if isinstance(row, dict) else _no_object(where, row)
    if not good:
        raise ValueError(f"{path} has no usable row ({seen} lines); expected JSON lines, or one JSON list of objects")


def _why(error: Exception) -> str:
    """What is wrong with a line of JSON; Python's own words count lines within it, so that all are "line 1"."""
    return f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)[:200]


def _no_object(where: str, row: Any) -> Bad:
    return Bad(f"{where} is a {type(row).__name__}, expected an object")


def _listed(text: bytes, path: Path) -> Iterator[tuple[str, Any]]:
    if len(text) >= LIST_BYTES:
        raise ValueError(
            f"{path} is a JSON list of {LIST_BYTES >> 30} GiB or more; make it JSON lines, which are streamed"
        )
    try:
        rows = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} begins as a JSON list but is none ({str(error)[:200]})") from None
    if not any(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} has no usable row; expected a list of objects")
    for number, row in enumerate(rows, 1):
        where = f"row {number}"
        yield where, row if isinstance(row, dict) else _no_object(where, row)


def response_field(row: Mapping[str, Any], path: Path) -> str:
    """The field that holds the answers, as the file's first good row tells."""
    for name in RESPONSE_FIELDS:
        if row.get(name) is not None:
            return name
    raise ValueError(
        f"{path}: none of the fields {', '.join(map(repr, row))} is known to hold answers "
        f"({', '.join(RESPONSE_FIELDS)}); say which with --response-field"
    )


def trajectory(where: str, row: Any, field: str) -> Trajectory | Bad:
    """The row as the rewards take it: the answer, the prompt, and everything else as the task's meta."""
    if isinstance(row, Bad):
        return row
    response = text_of(row.get(field))
    if response is None:
        found = type(row[field]).__name__ if field in row else "missing"
        return Bad(f"{where}: the field {field!r} holds no text ({found})")
    meta = {name: value for name, value in row.items() if name != field}
    prompt = next((text for name in PROMPT_FIELDS if (text := text_of(meta.get(name))) is not None), "")
    # Halves of surrogate pairs (JSON can hold them, UTF-8 cannot) would break whoever encodes the text.
    response = response.encode("utf-8", "replace").decode()
    return Trajectory(prompt, [], response, [], task=Task("", prompt, meta))


def text_of(given: Any) -> str | None:
    """Text as it stands, or the last message of a conversation."""
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given and isinstance(given[-1], dict):
        content = given[-1].get("content")
        return content if isinstance(content, str) else None
    return None


def names_of(row: Any, index: int) -> dict[str, Any]:
    """`id`: what a row calls itself, else its place in the file; `task`: its `task_id`, else its `id`, if any."""
    given = {} if isinstance(row, Bad) else {k: row[k] for k in ("id", "task_id") if isinstance(row.get(k), (str, int))}
    named = list(given.values())
    return {"id": named[0], "task": named[-1]} if named else {"id": index}
