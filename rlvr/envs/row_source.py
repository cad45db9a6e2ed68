"""Task sources over rows: every training row once an epoch, in a new order each time, and a fixed held-out list.

The tasks are kept in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import Env, TaskSource
from rlvr.core.types import Task
from rlvr.envs.near_duplicates import choose_heldout_to_compare, find_near_duplicates, find_text
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.row_files import find_value

HELDOUT_FRACTION = 0.1  # of the rows, unless the config says


def choose_heldout(
    tasks: list[Task], fraction: float, path: str, option: str = "heldout_fraction", others: str = "heldout_path"
) -> list[Task]:
    """The tasks whose prompt hashes below `fraction`, at least one; equal prompts are on the same side. 1 takes all.
    `option` is where the fraction stands, and `others` what gives held-out tasks apart, for messages."""
    if type(fraction) not in (int, float) or not 0 <= fraction <= 1:
        raise ValueError(f"{option}={fraction!r}, expected from 0 to 1")
    if fraction in (0, 1):
        return list(tasks) if fraction else []
    keys = [_prompt_key(task.prompt) for task in tasks]
    lowest = min(keys)
    if max(keys) == lowest:
        raise ValueError(
            f"{path} has one prompt only, so none can be held out; set {others}, or {option}=1 to hold out all"
        )
    # The highest hash always stays in training, so that a small file is never held out whole.
    below = min(max(int(fraction * 2**63), lowest + 1), max(keys))
    return [task for task, key in zip(tasks, keys, strict=True) if key < below]


def take_in_turn(walks: list[Iterator[Task]], count: int) -> list[Task]:
    """The first `count` tasks, one of each walk in turn; fewer if all walks end before."""
    rounds = (task for group in zip_longest(*walks) for task in group if task is not None)
    return list(islice(rounds, count))


@dataclass(frozen=True)
class _Portion:
    """Tasks of one level and weight: an epoch draws `draws` of them, going round and round in their order."""

    tasks: list[Task]
    draws: int

    @classmethod
    def of(cls, tasks: list[Task], weight: float) -> _Portion:
        draws = max(1, round(weight * len(tasks)))
        if draws % len(tasks):  # an epoch takes a part of them: not one that the order of the file decides
            tasks = [tasks[i] for i in rng.permutation(len(tasks), rng.key("rows-portion", len(tasks)))]
        return cls(tasks, draws)

    def draw(self, epoch: int, position: int) -> Task:
        return self.tasks[(epoch * self.draws + position) % len(self.tasks)]


class RowSource(TaskSource):
    """A task source over two lists of tasks.

    Training tasks whose prompt is held out too are left out, so that no evaluation task is ever trained on. Of equal
    held-out tasks one is left. Without any training row it is a test set, which has no levels and can only be evaluated
    on.
    `demonstrations` is the column in a task's meta of the completion to imitate, None if there is none; `lead` is put
    before it, except in a chat and after white space. `describe` is `describe_task` as a function, `data` what a plan
    says of the rows. `weight` is how often an epoch has a task: 2 is twice, 0.5 in every second epoch.
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
        weight: Callable[[Task], float] = lambda task: 1.0,
        data: str = "",
    ) -> None:
        heldout_keys = {_prompt_key(task.prompt) for task in heldout}
        train = list(train)
        self._train = [task for task in train if _prompt_key(task.prompt) not in heldout_keys]
        if train and not self._train:
            raise ValueError(f"{name}: every training row is held out too; give other rows to train on")
        count = len(heldout)
        heldout = list({_task_key(task): task for task in reversed(heldout)}.values())[::-1]
        self._num_copies = count - len(heldout)
        order = rng.permutation(len(heldout), rng.key("rows-heldout"))
        self._heldout = [heldout[i] for i in order]
        self.name, self.reward, self._weight, self._data = name, reward, weight, data
        self._demonstrations, self._lead, self._describe = demonstrations, lead, describe
        self._arrange()

    def _arrange(self) -> None:
        """Sort the training tasks into levels and portions."""
        by_level: dict[str, dict[float, list[Task]]] = {}
        for task in self._train:
            by_level.setdefault(task.level, {}).setdefault(self._weight(task), []).append(task)
        self._portions = {
            level: [_Portion.of(tasks, weight) for weight, tasks in parts.items()] for level, parts in by_level.items()
        }
        self.levels = tuple(sorted(self._portions, key=_level_order))
        self._orders: dict[str, tuple[int, int, list[int]]] = {}

    def leave_out(self, ids: Collection[str]) -> None:
        """Yield the tasks of these ids no more."""
        self._train = [task for task in self._train if task.id not in ids]
        self._heldout = [task for task in self._heldout if task.id not in ids]
        self._arrange()

    def train(self, seed: int, index: int, level: str) -> Task:
        """The index-th task of a level: epoch after epoch, each in a new order."""
        if level not in self._portions:
            raise ValueError(f"{self.name}: level {level!r}; the levels are {', '.join(map(repr, self.levels))}")
        count = self.size(level)
        epoch, position = divmod(index, count)
        place = self._order(seed, epoch, level)[position]
        for portion in self._portions[level]:
            if place < portion.draws:
                return portion.draw(epoch, place)
            place -= portion.draws
        raise AssertionError("the portions of a level have as many draws as the level")

    def _order(self, seed: int, epoch: int, level: str) -> list[int]:
        """The order of an epoch of a level; the last one of each level is kept, since draws go from level to level."""
        kept = self._orders.get(level)
        if kept is None or kept[:2] != (seed, epoch):
            order = rng.permutation(self.size(level), rng.key("rows-train", seed, epoch, level))
            self._orders[level] = kept = seed, epoch, order
        return kept[2]

    def heldout(self, count: int | None) -> list[Task]:
        """The first `count` (None: all) of the held-out tasks, in an order that is the same every time."""
        return self._heldout[:count]

    def size(self, level: str) -> int:
        """The number of training tasks of a level that make an epoch."""
        return sum(portion.draws for portion in self._portions[level])

    def env(self, task: Task, tokenizer: Any) -> Env:
        return PromptEnv(task, tokenizer)

    def describe_task(self, task: Task) -> Mapping[str, str]:
        return self._describe(task)

    def describe_data(self) -> str:
        return self._data

    def advice(self) -> list[str]:
        """A warning if held-out prompts nearly equal training prompts, or are there more than once."""
        copies = [
            f"{self._num_copies:,} held-out rows are copies of others and were left out, as a task that counts twice "
            f"makes intervals too narrow; {len(self._heldout):,} held-out tasks are left"
        ][: self._num_copies]
        near = find_near_duplicates(self._heldout, self._train)
        if not near:
            return copies
        first = max(near, key=lambda pair: pair.share)
        compared = choose_heldout_to_compare(self._heldout)
        return [
            *copies,
            f"{len(near):,} of {len(compared):,} held-out prompts nearly repeat a training prompt: "
            f"{first.heldout.id!r} shares {100 * first.share:.0f}% of its word sequences with {first.train.id!r}. The "
            "evaluation counts what was seen in training; leave one of each two out of the rows",
        ]

    def demonstration(self, task: Task, key: int) -> str | None:
        if self._demonstrations is None:
            return None
        prompt = task.model_prompt
        lead = self._lead if isinstance(prompt, str) and not prompt[-1:].isspace() else ""
        return lead + str(find_value(task.meta, self._demonstrations))


def _prompt_key(prompt: str | list[dict[str, str]]) -> int:
    """A hash of a prompt's roles and contents, the same on every machine; text is a message of the user."""
    if (text := find_text(prompt)) is None:
        assert not isinstance(prompt, str)
        text = json.dumps([(message.get("role"), message.get("content")) for message in prompt])
    return rng.key("rows-prompt", text)


def _task_key(task: Task) -> str:
    """What a task is, without the number of its row."""
    return json.dumps([task.prompt, task.level, task.meta], sort_keys=True, default=str)


def _level_order(level: str) -> tuple[bool, float, str]:
    """Sort key: numbers by value, then words by the alphabet."""
    try:
        return False, float(level), level
    except ValueError:
        return True, 0.0, level
