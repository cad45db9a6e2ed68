"""Atomic files and folders: write a temporary one, sync, rename. Nothing here knows what is in them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,127}")

CHECKSUMS = "checksums.json"  # in a folder that `new_folder` made


def check_name(name: str, what: str) -> str:
    """Return `name` if it is safe as the name of one folder, else raise ValueError."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise ValueError(
            f"{what} {name!r}: expected 1 to 128 letters, digits, '.', '_' or '-', no '-' first, and not '.' or '..'"
        )
    return name


def write_atomic(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content`: after a crash there is the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"no folder for {path.name}; make it first", str(path.parent))
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it replaces `path` only when the block ends without an error.

    A `checksums.json` of every file is written last, for `find_damage`. If `path` exists, a crash between the two
    renames leaves the old folder under another name; `remove_leftovers` moves it back.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        files = sorted(file for file in temporary.rglob("*") if file.is_file())
        sums = {file.relative_to(temporary).as_posix(): sha256(file) for file in files}
        (temporary / CHECKSUMS).write_text(json.dumps(sums, indent=2))
        for file in (*files, temporary / CHECKSUMS):
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        for folder in (*(f for f in temporary.rglob("*") if f.is_dir()), temporary):
            sync_folder(folder)
        old = path.with_name(f".{path.name}.old")
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(path, old)
        os.rename(temporary, path)
        sync_folder(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def find_damage(folder: Path) -> str:
    """Describe the damage of a folder made by `new_folder`; '' if every file is there and has its checksum.

    Only ordinary files inside the folder are read. Every file must be listed, except those whose names begin with a
    dot, which file managers leave behind.
    """
    try:
        sums = read_json(folder / CHECKSUMS, "the checksum of every file")
        if not sums:
            return f"{folder / 'checksums.json'} lists no file"
        for name, expected in sums.items():
            place = PurePosixPath(name)
            if place.is_absolute() or ".." in place.parts:
                return f"checksums.json names {name[:80]!r}, which does not lie inside {folder}"
            if not os.path.isfile(folder / name):  # a device or a pipe would be read for ever
                return f"{name[:80]} is missing or not an ordinary file"
            if sha256(folder / name) != expected:
                return f"{name} does not have its recorded checksum"
        files = (file.relative_to(folder) for file in folder.rglob("*") if not file.is_dir())
        found = {file.as_posix() for file in files if not any(part.startswith(".") for part in file.parts)}
        if unlisted := sorted(found - sums.keys() - {CHECKSUMS}):
            return f"{unlisted[0][:80]} is not listed in checksums.json"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def read_json(path: Path, what: str, remedy: str = "") -> dict[str, Any]:
    """The object in a JSON file. ValueError, with the `remedy`, if the file does not hold `what`."""
    cure = f"; {remedy}" if remedy else ""
    try:
        if not os.path.isfile(path):
            raise ValueError(f"{path} is missing or not an ordinary file, expected {what}{cure}")
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}), expected {what}{cure}") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: not JSON ({error}), expected {what}{cure}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected an object: {what}{cure}")
    return cast(dict[str, Any], value)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Delete what an interrupted `write_atomic` or `new_folder` left in `folder`; move back a folder it had renamed."""
    for old in folder.glob(".*.old"):
        place = folder / old.name[1:].removesuffix(".old")
        shutil.rmtree(old) if place.exists() else os.rename(old, place)
    for left in folder.glob(".*.tmp"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def lock_file(path: Path) -> IO[str] | None:
    """Open and lock a file, until it is closed or the process ends; None if another process holds it.

    The file is made if it is missing and never truncated. OSError if it cannot be opened.
    """
    import fcntl  # Windows has none, and the help must load there

    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - the caller closes it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
