"""Task sources over rows: every training row once an epoch, in a new order each time, and a fixed held-out list.

Rows come from JSON lines or from the hub. The tasks are kept in memory. Every mistake in a file is a ValueError with
file, line and remedy. `python -m pytest tests/test_env_rows.py` exercises it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import Env, TaskSource
from rlvr.core.registry import did_you_mean
from rlvr.core.types import Task
from rlvr.envs.prompt import PromptEnv


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:line", row) for every line that is not blank; the lines are JSON objects in UTF-8."""
    path = Path(path)
    rows = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows += 1
                    yield f"{path.name}:{number}", _parse(line, f"{path}, line {number}")
    except FileNotFoundError:
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise ValueError(f"{path} does not exist{near}; give the path of a file with one JSON object a line") from None
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); give a file with one JSON object a line"
        ) from error
    if not rows:
        raise ValueError(f"{path} has no rows; expected one JSON object a line")


def field_of(row: Mapping[str, Any], name: str, where: str, option: str) -> Any:
    """`row[name]`, or a ValueError that names the fields there are and the option that chooses one."""
    if row.get(name) is None:
        found = "is null" if name in row else "is missing"
        raise ValueError(
            f"{where}: the field {name!r} {found}{did_you_mean(name, [k for k in row if k != name])}; "
            f"the row has {', '.join(map(repr, row)) or 'no fields'}; set {option} or correct the row"
        )
    return row[name]


def load_from_hub(environment: str, name: str, config: str, files: str, **options: Any) -> Any:
    """The data set `name` by `datasets.load_dataset`. `files` says what a local path must hold, for the errors."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{environment} from the hub needs the package 'datasets': pip install 'rlvr[train]', or set path=<{files}>"
        ) from error
    try:
        return load_dataset(name, config, **options)
    except Exception as error:
        raise ValueError(
            f"{environment}: {name!r} could not be loaded from the hub ({type(error).__name__}: {error}); "
            f"set path=<{files}>"
        ) from error


def choose_heldout(tasks: list[Task], fraction: float, path: str) -> list[Task]:
    """The tasks whose prompt hashes below `fraction`, at least one; equal prompts are on the same side."""
    if not 0 <= fraction < 1:
        raise ValueError(f"heldout_fraction={fraction!r}, expected from 0 to below 1")
    if fraction == 0:
        return []
    keys = [_prompt_key(task.prompt) for task in tasks]
    lowest = min(keys)
    if max(keys) == lowest:
        raise ValueError(f"{path} has one prompt only; set heldout_path, or heldout_fraction=0 for no evaluation")
    # The highest hash always stays in training, so that a small file is never held out whole.
    below = min(max(int(fraction * 2**63), lowest + 1), max(keys))
    return [task for task, key in zip(tasks, keys, strict=True) if key < below]


def take_in_turn(walks: list[Iterator[Task]], count: int) -> list[Task]:
    """The first `count` tasks, one of each walk in turn; fewer if all walks end before."""
    rounds = (task for group in zip_longest(*walks) for task in group if task is not None)
    return list(islice(rounds, count))


class RowSource(TaskSource):
    """A task source over two lists of tasks.

    Training tasks whose prompt is held out too are left out, so that no evaluation task is ever trained on.
    `demonstrations` is the key in a task's meta of the completion to imitate, None if there is none; `lead` is put
    before it, except in a chat. `describe` is `describe_task` as a function.
    """

    def __init__(
        self,
        name: str,
        train: Iterable[Task],
        heldout: Sequence[Task],
        reward: str,
        demonstrations: str | None = None,
        lead: str = "",
        describe: Callable[[Task], Mapping[str, str]] = lambda task: {},
    ) -> None:
        heldout_keys = {_prompt_key(task.prompt) for task in heldout}
        self._by_level: dict[str, list[Task]] = {}
        for task in train:
            if _prompt_key(task.prompt) not in heldout_keys:
                self._by_level.setdefault(task.level, []).append(task)
        if not self._by_level:
            raise ValueError(f"{name}: every training row is held out too; give other rows to train on")
        self.name, self.reward = name, reward
        self.levels = tuple(sorted(self._by_level, key=_level_order))
        self._demonstrations, self._lead, self._describe = demonstrations, lead, describe
        order = rng.permutation(len(heldout), rng.key("rows-heldout"))
        self._heldout = [heldout[i] for i in order]

    def train(self, seed: int, index: int, level: str) -> Task:
        """The index-th task of a level: epoch after epoch, each a new permutation of all of them."""
        if level not in self._by_level:
            raise ValueError(f"{self.name}: level {level!r}; the levels are {', '.join(map(repr, self.levels))}")
        tasks = self._by_level[level]
        epoch, position = divmod(index, len(tasks))
        return tasks[_epoch_order(len(tasks), seed, epoch, level)[position]]

    def heldout(self, count: int | None) -> list[Task]:
        """The first `count` (None: all) of the held-out tasks, in an order that is the same every time."""
        return self._heldout[:count]

    def size(self, level: str) -> int:
        """The number of training tasks of a level, which is an epoch."""
        return len(self._by_level[level])

    def env(self, task: Task, tokenizer: Any) -> Env:
        return PromptEnv(task, tokenizer)

    def describe_task(self, task: Task) -> Mapping[str, str]:
        return self._describe(task)

    def demonstration(self, task: Task, key: int) -> str | None:
        if self._demonstrations is None:
            return None
        lead = self._lead if isinstance(task.model_prompt, str) else ""
        return lead + str(task.meta[self._demonstrations])


def _prompt_key(prompt: str | list[dict[str, str]]) -> int:
    """A hash of a prompt's content, the same on every machine."""
    return rng.key("rows-prompt", prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True))


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); expected one JSON object a line") from error
    if b"\\ud" in line.lower():
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: holds a lone surrogate ({error.reason}); no tokenizer can read it") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: a JSON {type(row).__name__}, expected an object such as {{"prompt": ...}}')
    return row


def _level_order(level: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, then words by the alphabet."""
    try:
        return False, float(level), level
    except ValueError:
        return True, 0.0, level


@lru_cache(maxsize=8)
def _epoch_order(n: int, seed: int, epoch: int, level: str) -> list[int]:
    return rng.permutation(n, rng.key("rows-train", seed, epoch, level))
