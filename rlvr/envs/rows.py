"""Tasks from rows: JSON lines on disk, an order of training that visits every row once an epoch, a fixed held-out list.

`read_jsonl` streams; the tasks made of the rows are kept in memory. Every mistake in a file is a ValueError with file,
line and remedy. `python -m pytest tests/test_env_rows.py` exercises it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlvr import draws
from rlvr.envs.prompt import PromptEnv
from rlvr.registry import nearest
from rlvr.types import Task


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
        near = nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
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
            f"{where}: the field {name!r} {found}{nearest(name, [k for k in row if k != name])}; "
            f"the row has {', '.join(map(repr, row)) or 'no fields'}; set {option} or mend the row"
        )
    return row[name]


class RowSource:
    """A task source over two lists of tasks (`rlvr.protocols.TaskSource`).

    Training tasks whose prompt is held out too are left out, so that no evaluation task is ever trained on.
    `demonstrations` is the key in a task's meta of the completion to imitate, if there is one; `lead` goes before it.
    """

    def __init__(
        self,
        name: str,
        train: Iterable[Task],
        heldout: Sequence[Task],
        reward: str,
        demonstrations: str | None = None,
        lead: str = "",
    ) -> None:
        held = {prompt_key(task.prompt) for task in heldout}
        self._by_level: dict[str, list[Task]] = {}
        for task in train:
            if prompt_key(task.prompt) not in held:
                self._by_level.setdefault(task.level, []).append(task)
        if not self._by_level:
            raise ValueError(f"{name}: every training row is held out too; give other rows to train on")
        self.name, self.reward = name, reward
        self.levels = tuple(sorted(self._by_level, key=_level_order))
        self._demonstrations, self._lead = demonstrations, lead
        order = draws.permutation(len(heldout), draws.key("rows-heldout"))
        self._heldout = [heldout[i] for i in order]

    def train(self, seed: int, index: int, level: str) -> Task:
        """The index-th task of a level: epoch after epoch, each a fresh permutation of all of them."""
        if level not in self._by_level:
            raise ValueError(f"{self.name}: level {level!r}; the levels are {', '.join(map(repr, self.levels))}")
        tasks = self._by_level[level]
        epoch, position = divmod(index, len(tasks))
        return tasks[_epoch_order(len(tasks), seed, epoch, level)[position]]

    def heldout(self, count: int | None) -> list[Task]:
        """The first `count` (None: all) of the held-out tasks, in an order that is the same every time."""
        return self._heldout[:count]

    def size(self, level: str) -> int:
        """Training tasks in an epoch of a level."""
        return len(self._by_level[level])

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str | None:
        if self._demonstrations is None:
            return None
        return self._lead + str(task.meta[self._demonstrations])


def prompt_key(prompt: str | list[dict[str, str]]) -> int:
    """A hash of a prompt's content, the same on every machine."""
    return draws.key("rows-prompt", prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True))


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
            raise ValueError(f"{where}: half a surrogate pair ({error.reason}); no tokenizer can read it") from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: a JSON {type(row).__name__}, expected an object such as {{"prompt": ...}}')
    return row


def _level_order(level: str) -> tuple[bool, float, str]:
    """Numbers by value, before words by the alphabet."""
    try:
        return False, float(level), level
    except ValueError:
        return True, 0.0, level


@lru_cache(maxsize=8)
def _epoch_order(n: int, seed: int, epoch: int, level: str) -> list[int]:
    return draws.permutation(n, draws.key("rows-train", seed, epoch, level))
