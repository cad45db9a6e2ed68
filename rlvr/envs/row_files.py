"""Rows of local files: JSON lines, one JSON list, CSV and parquet, in a file, a folder, a glob or a list of these.

    for row in read_rows("data/*.parquet"):
        row.id, row.place, row.values           # "train.parquet:3", "data/train.parquet, row 3", {"prompt": ...}

Each file of a folder belongs to one split by its name, or else by its folders' (`train-00000.parquet`,
`test/part.csv`). Rows are read one after the other, so that a caller can stop early; only a JSON list is read whole.
Every mistake in a file is a ValueError with file, row and remedy. A `.gz` file holds JSON. Left out on purpose: the hub
(`rlvr.envs.hub`), other compressed files.
"""

from __future__ import annotations

import csv
import glob
import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlvr.core.error_text import first_line
from rlvr.core.registry import did_you_mean

EXPECTED = "a file, folder or glob of JSON lines, JSON, CSV or parquet"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".pq")
# The words of a path that name a split, as the hub reads them.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
# A shard of a split of one's own, as the hub writes it: test_sft-00000-of-00002.
_SHARD = re.compile(
    rf"((?:{'|'.join(word for words in SPLIT_WORDS.values() for word in words)})_\w+)-\d{{5}}-of-\d{{5}}"
)
_CELL = 1 << 26  # characters of a CSV cell; Python's own limit is 131,072


class FileRow(NamedTuple):
    """One row: an `id` for its task, the `place` that messages name, and its `values` by column."""

    id: str
    place: str
    values: dict[str, Any]


def read_rows(path: str | Path | Sequence[str], split: str = "train") -> Iterator[FileRow]:
    """Yield the rows of all files that `path` names, in the order of their paths; of folders those of `split`."""
    files = [file for one in ([path] if isinstance(path, (str, Path)) else path) for file in list_files(one, split)]
    parent = os.path.commonpath([file.parent.absolute() for file in files])
    for file in files:
        name, is_empty = Path(os.path.relpath(file, parent)).as_posix(), True
        for place, values in _read_file(file):
            is_empty = False
            yield FileRow(f"{name}:{place.rpartition(' ')[2]}", f"{file}, {place}", values)
        if is_empty:
            raise ValueError(f"{file} has no rows; expected one JSON object a line, or a table with rows")


def list_files(path: str | Path, split: str = "train") -> list[Path]:
    """The files that a path names: a file, all that match a glob, or those of a folder that belong to `split`."""
    given = Path(path).expanduser()
    if given.is_dir():
        return _split_files(given, split)
    if not given.exists() and glob.has_magic(str(given)):
        found = sorted(Path(name) for name in glob.glob(str(given), recursive=True) if Path(name).is_file())
        if not found:
            raise ValueError(f"{path}: no file matches; give {EXPECTED}")
        return found
    return [given]


def has_splits(folder: str | Path) -> bool:
    """Whether the names of a folder's files tell splits."""
    return any(_assign_splits(Path(folder).expanduser()).values())


def _split_files(folder: Path, split: str) -> list[Path]:
    of_file, asked = _assign_splits(folder), _find_usual(split)
    splits = sorted(set(of_file.values()))
    if splits == [""] and asked == "train":  # no file says what it is: all are for training
        return list(of_file)
    if asked not in splits:
        unnamed = [file for file, name in of_file.items() if not name]
        if own := [file for file in unnamed if _has_word(file.relative_to(folder).as_posix(), asked)]:
            return own  # a name of one's own, `holdout.jsonl`
        known = [name for name in splits if name]
        raise ValueError(
            f"{folder} has no split {split!r}{did_you_mean(split, known)}; by the names of its files it has "
            f"{', '.join(known) or 'none'}; set env.kwargs.split or heldout_split, or give the files as a glob"
        )
    return [file for file, name in of_file.items() if name == asked]


def _assign_splits(folder: Path) -> dict[Path, str]:
    """The files of a folder with the split of each, '' for none."""
    files = [f for f in sorted(folder.rglob("*")) if f.suffix.lower() in SUFFIXES and not _is_hidden(f, folder)]
    if not files:
        raise ValueError(f"{folder} holds no file of a known kind ({', '.join(SUFFIXES)}); give {EXPECTED}")
    return {file: _split_of(file, folder) for file in files}


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _split_of(file: Path, folder: Path) -> str:
    """The split that the file's name tells, or else the innermost folder that tells one; '' if none does."""
    if shard := _SHARD.fullmatch(file.stem):
        return shard[1]
    for part in (file.stem, *reversed(file.relative_to(folder).parts[:-1])):
        found = [split for split, words in SPLIT_WORDS.items() if any(_has_word(part, word) for word in words)]
        if len(found) > 1:
            raise ValueError(
                f"{file}: {part!r} names two splits, {found[0]} and {found[1]}; rename it, or give the files as a glob"
            )
        if found:
            return found[0]
    return ""


def _find_usual(split: str) -> str:
    return next((name for name, words in SPLIT_WORDS.items() if split in words), split)


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<![a-z]){re.escape(word.lower())}(?![a-z])", text.lower()) is not None


def _read_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("line 3" or "row 3", row) for each row of one file, by its suffix; any other suffix is read as JSON."""
    try:
        match path.suffix.lower():
            case ".csv":
                yield from _read_csv(path, ",")
            case ".tsv":
                yield from _read_csv(path, "\t")
            case ".parquet" | ".pq":
                yield from _read_parquet(path)
            case _:
                yield from _read_json(path)
    except FileNotFoundError:
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ValueError(f"{path} does not exist{near}; give {EXPECTED}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); give {EXPECTED}") from error
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}); fetch it again") from error


# --- JSON ---------------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
        is_list = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
        file.seek(0)
        if is_list:
            for number, row in enumerate(_parse(file.read(), f"{path}"), 1):
                yield f"row {number}", _check_row(row, f"{path}, row {number}")
            return
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield f"line {number}", _check_row(_parse(line, place), place)


def _parse(text: bytes, place: str) -> Any:
    try:
        value = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: not JSON ({error}); expected one JSON object a line, or one list of objects"
        ) from error
    if b"\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{place}: holds a lone surrogate ({error.reason}); no tokenizer can read it") from error
    return value


def _check_row(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f'{place}: a JSON {type(row).__name__}, expected an object such as {{"prompt": ...}}')
    return row


# --- tables -------------------------------------------------------------------------------------------------------


def _read_csv(path: Path, delimiter: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every cell is text; an empty one is None."""
    csv.field_size_limit(_CELL)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if twice := [name for name, count in Counter(header).items() if count > 1]:
                raise ValueError(
                    f"{path}: the header names the column {twice[0]!r} more than once; give each column its own name"
                )
            for cells in reader:
                place = f"line {reader.line_num}"
                if cells and len(cells) != len(header):
                    raise ValueError(
                        f"{path}, {place}: {len(cells)} cells where the header has {len(header)} "
                        f"({', '.join(header)}); put text that holds a {delimiter!r} in quotes"
                    )
                if cells:
                    yield place, {name: cell or None for name, cell in zip(header, cells, strict=True)}
        except csv.Error as error:
            raise ValueError(
                f"{path}, line {reader.line_num}: not CSV ({error}); write each row with quotes closed"
            ) from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error.reason}); save the file as UTF-8") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: parquet needs the package 'pyarrow': pip install 'rlvr[data]', or save the rows as JSON lines"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except ArrowException as error:
        at = f", after row {number}" if number else ""
        raise ValueError(
            f"{path}{at}: not a whole parquet file ({first_line(error)}); fetch or write it again"
        ) from error


# --- columns ------------------------------------------------------------------------------------------------------


def find_value(row: Mapping[str, Any], name: str) -> Any:
    """`row[name]`, or what a dotted name leads to (`reward_model.ground_truth`); None if it is not there."""
    if name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    inner = row.get(head)
    return find_value(inner, rest) if dot and isinstance(inner, Mapping) else None


def list_columns(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The names of a row's columns; of nested ones the dotted names of their parts."""
    names: list[str] = []
    for name, value in row.items():
        names += (
            list_columns(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else [f"{prefix}{name}"]
        )
    return names


def field_of(row: Mapping[str, Any], name: str, place: str, option: str) -> Any:
    """What `find_value` finds, or a ValueError that names the fields there are and the option that chooses one."""
    if (value := find_value(row, name)) is None:
        columns = list_columns(row)
        found = "is null" if name in columns else "is missing"
        raise ValueError(
            f"{place}: the field {name!r} {found}{did_you_mean(name, [k for k in columns if k != name])}; "
            f"the row has {', '.join(map(repr, columns)) or 'no fields'}; set env.kwargs.{option} or correct the row"
        )
    return value
