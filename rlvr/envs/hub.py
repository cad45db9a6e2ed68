"""Data sets by the `datasets` library: from the hub by name, config and split, and folders that `save_to_disk` wrote.

Before the hub is asked, one short request finds out whether it answers; if it does not, the library reads its cache, so
a machine without network begins or fails in seconds. `HF_ENDPOINT`, proxies and `HF_HUB_OFFLINE` are honoured.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlvr.core.hub_status import PATIENCE, HubProbe, hub_endpoint, is_offline
from rlvr.core.registry import did_you_mean
from rlvr.envs.row_files import FileRow

_SPLITS = re.compile(r"(?:[Uu]nknown|Bad) split.*?(\[.*?\])", re.DOTALL)  # the library's two messages


def load_from_hub(environment: str, name: str, config: str | None, files: str, **options: Any) -> Any:
    """The data set `name` by `datasets.load_dataset`. `files` says what a local path must hold, for the errors."""
    probe = None if is_offline() else HubProbe()
    remedy = f"set env.kwargs.path=<{files}>"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{environment} from the hub needs the package 'datasets': pip install 'rlvr[data]', or {remedy}"
        ) from error
    has_answer = probe is not None and probe.has_answer()
    with _offline(not has_answer):
        try:
            return load_dataset(name, config, **options)
        except Exception as error:  # the library raises errors of many kinds
            _check_split(error, f"{environment}: {name!r}", str(options.get("split")))
            if has_answer:
                text = f"could not be loaded from the hub ({type(error).__name__}: {_shorten(error)})"
            elif probe is None:
                text = f"is not in the cache, and HF_HUB_OFFLINE is set ({_shorten(error)})"
            else:
                text = (
                    f"is not in the cache, and the hub at {hub_endpoint()} does not answer within {PATIENCE:g} s; "
                    "connect to it (HF_ENDPOINT names another one)"
                )
            raise ValueError(f"{environment}: {name!r} {text}; {remedy}") from error


def read_hub(name: str, config: str | None, split: str, streaming: bool) -> Iterator[FileRow]:
    """Yield the rows of a split; with `streaming` they are fetched as they are read, else the whole split first."""
    rows = load_from_hub(
        "dataset", name, config, "a file, folder or glob", split=split, **({"streaming": True} if streaming else {})
    )
    return _number(rows, name, split)


def is_saved_dataset(path: str | Path | Sequence[str] | None) -> bool:
    """Whether a path is a folder that `datasets` wrote with `save_to_disk`."""
    if not isinstance(path, (str, Path)):
        return False
    folder = Path(path).expanduser()
    return any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))


def read_saved(path: str, split: str) -> Iterator[FileRow]:
    """Yield the rows of a folder that `save_to_disk` wrote; if it has several splits, the rows of `split`."""
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError as error:
        raise ValueError(
            f"{path} was written by the package 'datasets', which is needed to read it: pip install 'rlvr[data]'"
        ) from error
    try:
        rows = load_from_disk(str(Path(path).expanduser()))
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {_shorten(error)}); save the data set again"
        ) from error
    if isinstance(rows, DatasetDict):
        if split not in rows:
            raise ValueError(_no_split(str(path), split, list(map(str, rows))))
        rows = rows[split]
    return _number(rows, str(path), split)


def _number(rows: Any, name: str, split: str) -> Iterator[FileRow]:
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield FileRow(f"{name} {split}:{number}", f"{name} {split}, row {number}", dict(row))
    except (OSError, RuntimeError) as error:  # a stream that breaks off
        raise ValueError(
            f"{name}: reading broke off after row {number} of {split!r} "
            f"({type(error).__name__}: {_shorten(error)}); try again, or download the files and set env.kwargs.path"
        ) from error
    if not number:
        raise ValueError(f"{name}: the split {split!r} has no rows; name another one")


def _check_split(error: Exception, what: str, split: str) -> None:
    if found := _SPLITS.search(str(error)):
        raise ValueError(_no_split(what, split, [str(name) for name in ast.literal_eval(found[1])])) from error


def _no_split(what: str, split: str, known: list[str]) -> str:
    found = f"{what} has no split {split!r}{did_you_mean(split, known)}; it has {', '.join(known)}"
    return f"{found}; set env.kwargs.split or heldout_split"


@contextmanager
def _offline(is_wanted: bool) -> Iterator[None]:
    """Let the library read its cache only: it reads these two when it is asked for data."""
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if is_wanted:
        config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _shorten(error: BaseException) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
