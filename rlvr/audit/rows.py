"""Rows of a file that anybody wrote: JSON lines or one JSON list, gzipped or not; each an answer and its task.

A line that cannot be used, or is longer than ROW_BYTES, is a `Bad` row, never the end of the file. JSON lines are
streamed, a JSON list is read whole. `python -m pytest tests/test_verify_command.py` exercises it.
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


def read_rows(path: Path) -> Iterator[Any]:
    """Every row of the file, `Bad` where a line is no JSON object. ValueError where the file is of no use at all."""
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


def _parsed(file: Any, path: Path) -> Iterator[Any]:
    seen = good = 0
    while line := file.readline(ROW_BYTES + 1):
        if not line.strip() and len(line) <= ROW_BYTES:
            continue
        if not seen and line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
            yield from _listed(line + file.read(LIST_BYTES), path)
            return
        seen += 1
        if len(line) > ROW_BYTES:
            while line and not line.endswith(b"\n"):
                line = file.readline(ROW_BYTES)
            yield Bad(f"longer than {ROW_BYTES >> 20} MiB")
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            yield Bad(f"not JSON ({str(error)[:200]})")
            continue
        good += isinstance(row, dict)
        yield row if isinstance(row, dict) else Bad(f"a {type(row).__name__}, expected an object")
    if not good:
        raise ValueError(f"{path} has no usable row ({seen} lines); expected JSON lines, or one JSON list of objects")


def _listed(text: bytes, path: Path) -> Iterator[Any]:
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
    yield from (row if isinstance(row, dict) else Bad(f"a {type(row).__name__}, expected an object") for row in rows)


def response_field(row: Mapping[str, Any], path: Path) -> str:
    """The field that holds the answers, as the file's first good row tells."""
    for name in RESPONSE_FIELDS:
        if row.get(name) is not None:
            return name
    raise ValueError(
        f"{path}: none of the fields {', '.join(map(repr, row))} is known to hold answers "
        f"({', '.join(RESPONSE_FIELDS)}); say which with --response-field"
    )


def trajectory(row: Any, field: str) -> Trajectory | Bad:
    """The row as the rewards take it: the answer, the prompt, and everything else as the task's meta."""
    if isinstance(row, Bad):
        return row
    response = text_of(row.get(field))
    if response is None:
        return Bad(f"the field {field!r} holds no text ({type(row.get(field)).__name__})")
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


def name_of(row: Any, index: int) -> Any:
    """What a row calls itself, else its place in the file."""
    given = None if isinstance(row, Bad) else next((row[k] for k in ("id", "task_id") if k in row), None)
    return given if isinstance(given, (str, int)) else index
