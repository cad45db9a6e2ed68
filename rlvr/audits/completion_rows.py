"""Rows of a file from elsewhere, each a completion and its task: JSON lines or one JSON list, gzipped or not.

A line that cannot be used, or is longer than ROW_BYTES, becomes a `BadRow`; reading goes on. Line numbers count blank
lines. JSON lines are streamed, a JSON list is read whole.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr.core.registry import did_you_mean
from rlvr.reward.signatures import Case

# The first of these that a row has is graded. `answer` is left out on purpose: data sets keep the reference there.
RESPONSE_FIELDS = (
    "response", "completion", "output", "generation", "prediction", "solution_str", "code", "solution",
    "canonical_solution",
)  # fmt: skip
ROW_BYTES = 64 << 20
LIST_BYTES = 1 << 30
PROMPT_FIELDS = ("prompt", "question", "problem", "text")


@dataclass(frozen=True)
class BadRow:
    """A row without a completion, and why."""

    reason: str


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield ("line 3", or "row 3" of a list, and the row); a `BadRow` if that is no object.

    ValueError if the file cannot be read or has no usable row.
    """
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.open(raw) if zipped else raw as file:
                yield from _parse(file, path)
    except FileNotFoundError:
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ValueError(f"{path} does not exist{near}; give a file of JSON lines, or one JSON list") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: the compressed data is damaged ({error}); fetch the file again") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); give a file of JSON lines") from error


def _parse(file: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """(where, row) of each line of JSON lines, or of each item of a file that is one JSON list."""
    number = seen = good = 0
    while line := file.readline(ROW_BYTES + 1):
        number += 1
        where = f"line {number}"
        if not line.strip() and len(line) <= ROW_BYTES:
            continue
        if not seen and line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
            yield from _parse_json_array(line + file.read(LIST_BYTES), path)
            return
        seen += 1
        if len(line) > ROW_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(ROW_BYTES)
            yield where, BadRow(f"{where} is longer than {ROW_BYTES >> 20} MiB")
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            yield where, BadRow(f"{where} is not JSON ({_why(error)})")
            continue
        good += isinstance(row, dict)
        yield where, row if isinstance(row, dict) else _not_an_object(where, row)
    if not good:
        raise ValueError(f"{path} has no usable row ({seen} lines); expected JSON lines, or one JSON list of objects")


def _why(error: Exception) -> str:
    """What is wrong with a line of JSON, without Python's line number, which would always be 1."""
    return f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)[:200]


def _not_an_object(where: str, row: Any) -> BadRow:
    return BadRow(f"{where} is of type {type(row).__name__}, expected an object")


def _parse_json_array(text: bytes, path: Path) -> Iterator[tuple[str, Any]]:
    if len(text) >= LIST_BYTES:
        raise ValueError(
            f"{path} is a JSON list of {LIST_BYTES >> 30} GiB or more; make it JSON lines, which are streamed"
        )
    try:
        rows = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} begins as a JSON list but is not valid JSON ({str(error)[:200]})") from None
    if not any(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} has no usable row; expected a list of objects")
    for number, row in enumerate(rows, 1):
        where = f"row {number}"
        yield where, row if isinstance(row, dict) else _not_an_object(where, row)


def response_field(row: Mapping[str, Any], path: Path | str) -> str:
    """The field that holds the completions, judged by the file's first usable row."""
    for name in RESPONSE_FIELDS:
        if row.get(name) is not None:
            return name
    raise ValueError(
        f"{path}: the fields {', '.join(map(repr, row))} include none of the usual names of completions "
        f"({', '.join(RESPONSE_FIELDS)}); name yours with --response-field"
    )


def row_case(where: str, row: Any, field: str) -> Case | BadRow:
    """The row as the rewards take it: the answer, the prompt, and everything else as the task's meta."""
    if isinstance(row, BadRow):
        return row
    response = text_of(row.get(field))
    if response is None:
        found = type(row[field]).__name__ if field in row else "missing"
        return BadRow(f"{where}: the field {field!r} holds no text ({found})")
    meta = {name: value for name, value in row.items() if name != field}
    prompt = next((text for name in PROMPT_FIELDS if (text := text_of(meta.get(name))) is not None), "")
    # Halves of surrogate pairs (JSON can hold them, UTF-8 cannot) would break encoding the text.
    response = response.encode("utf-8", "replace").decode()
    return Case(prompt, response, meta)


def text_of(given: Any) -> str | None:
    """A text itself, or the last message of a conversation; None for anything else."""
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given and isinstance(given[-1], dict):
        content = given[-1].get("content")
        return content if isinstance(content, str) else None
    return None


def row_names(row: Any, index: int) -> dict[str, Any]:
    """`id`: the row's own, else its index in the file; `task`: its `task_id`, else its `id`, if it has one."""
    given = (
        {} if isinstance(row, BadRow) else {k: row[k] for k in ("id", "task_id") if isinstance(row.get(k), (str, int))}
    )
    named = list(given.values())
    return {"id": named[0], "task": named[-1]} if named else {"id": index}
