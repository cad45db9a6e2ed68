"""Tasks of the library `reasoning_gym`: about a hundred families without end, from one seed and an index.

    env: {name: reasoning_gym, kwargs: {family: leg_counting}}
    env: {name: reasoning_gym, kwargs: {families: {leg_counting: 2, countdown: 1}, levels: [0, 1, 2]}}

The library runs in guarded workers (`rlvr.reward.reasoning_gym`), so its global random state is not ours. A task is a
family, a configuration, a level and a number. The numbers of training and held-out tasks are two ranges, and a hash of
the question decides on which side it is: no question is on both.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import TaskSource
from rlvr.core.registry import did_you_mean
from rlvr.core.types import Task
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import register_environment
from rlvr.envs.row_source import take_in_turn
from rlvr.reward.reasoning_gym.gym_reward import META
from rlvr.reward.reasoning_gym.library_job import BLOCK, OURS
from rlvr.reward.reasoning_gym.library_workers import (
    GymFamily,
    GymTask,
    NoEntry,
    check_config,
    describe_families,
    make_entry,
)
from rlvr.reward.reasoning_gym.second_checks import UNSOUND

INSTRUCTION = (
    "Give the final answer between <answer> and </answer>, and nothing else between them. If the question shows a "
    "format, use exactly that one."
)
ALL = "all"
HELDOUT_FRACTION = 0.25  # of the questions: a held-out task takes four draws, a training task four thirds
_BLOCKS = 1 << 22  # of tasks to train on, and as many to hold out
_TRIES = 200  # draws in a row on the wrong side of the hash, or repeated: a family has no more questions


@dataclass(frozen=True)
class FamilyChoice:
    """A family with the weight of its training tasks, and keys of its configuration."""

    family: str
    weight: float = 1.0
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def check(self, known: Mapping[str, GymFamily], has_levels: bool) -> None:
        """ValueError for a family, key or weight that does not exist."""
        if self.family not in known:
            raise ValueError(
                f"reasoning_gym: there is no family {self.family!r}{did_you_mean(str(self.family), known)}; the "
                f"families are {', '.join(known)}; or {ALL}"
            )
        one = known[self.family]
        for key in self.config:
            if key in OURS:
                raise ValueError(f"reasoning_gym: {self.family}: config.{key} is set by the run; leave it out")
            if key not in one.keys:
                raise ValueError(
                    f"reasoning_gym: {self.family} has no key {key!r}{did_you_mean(str(key), one.keys)} in its "
                    f"configuration; it has {', '.join(one.keys)}"
                )
            if has_levels and key in one.level_keys:
                raise ValueError(
                    f"reasoning_gym: {self.family}: config.{key} has no effect, since levels set it; leave one out"
                )
        if type(self.weight) not in (int, float) or not 0 < self.weight < float("inf"):
            raise ValueError(f"reasoning_gym: {self.family}: weight={self.weight!r}, expected a number above 0")


@register_environment("reasoning_gym")
class ReasoningGym(TaskSource):
    """Generated tasks of `reasoning_gym` (extra `reasoning-gym`): one `family`, `all`, or several `families`.

    `families` is a list of names, names with weights (`{leg_counting: 2, countdown: 1}`), or a list of mappings with
    `family`, `weight` and `config`. `config` are keys of the one family's configuration. `levels` are those of the
    library's curricula, `[0, 1, 2]` for the first three, as levels of ours; a family that has fewer stays at its
    highest. Without levels a family has its default difficulty. `instruction` comes after each question.

    A quarter of all questions is held out, chosen by a hash; the held-out tasks take the families and levels in turn.
    """

    reward = "reasoning_gym"
    vocabulary = tuple(string.printable[:-2])  # for model.tokenizer=characters; a few families write others too

    def __init__(
        self,
        family: str | None = None,
        families: Sequence[str | Mapping[str, Any]] | Mapping[str, float] | None = None,
        config: Mapping[str, Any] | None = None,
        levels: Sequence[int] | None = None,
        instruction: str = INSTRUCTION,
    ) -> None:
        known = describe_families()
        self._choices = _list_choices(family, families, config, list(known))
        for choice in self._choices:
            choice.check(known, levels is not None)
        if levels is not None:
            _check_levels(levels, self._choices, known)
        self._highest = {choice.family: known[choice.family].levels - 1 for choice in self._choices}
        self.levels = ("",) if levels is None else tuple(str(level) for level in levels)
        self._instruction = instruction.strip()
        for choice in self._choices:
            for level in self.levels:
                if level or choice.config:  # the library's own checks
                    check_config(self._task_of(choice, level, 0))

    def train(self, seed: int, index: int, level: str) -> Task:
        """The index-th training task of a level; its family is drawn by weight."""
        if level not in self.levels:
            raise ValueError(f"reasoning_gym: level {level!r}; the levels are {', '.join(map(repr, self.levels))}")
        weights = [choice.weight for choice in self._choices]
        choice = self._choices[rng.choice(weights, rng.key("reasoning-gym-family", seed, level, index))]
        block, place = divmod(index, BLOCK)
        for attempt in range(_TRIES):
            key = rng.key("reasoning-gym-train", seed, choice.family, level, block, attempt)
            task = self._make(choice, level, rng.integer(_BLOCKS, key) * BLOCK + place)
            if task is not None and not _is_heldout(task):
                return task
        raise ValueError(
            f"reasoning_gym: {choice.family} makes no questions to train on beside the held-out ones"
            f"{f' at level {level}' if level else ''}; give it another config or level, or leave it out"
        )

    def heldout(self, count: int | None) -> list[Task]:
        """`count` (None: 200) held-out tasks of different questions, the families and levels in turn.

        The first n are the same whatever `count` is; there are fewer where a family has no more.
        """
        walks = [self._walk(choice, level) for level in self.levels for choice in self._choices]
        return take_in_turn(walks, 200 if count is None else count)

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str | None:
        """The library's answer between the tags; None where it gives none."""
        answer = task.meta["answer"]
        lead = "\n" if isinstance(task.model_prompt, str) else ""
        return None if answer is None else f"{lead}<answer>{answer}</answer>"

    def describe_task(self, task: Task) -> dict[str, str]:
        return {"family": task.meta[META]["family"]}

    def advice(self) -> list[str]:
        """A warning for families whose own scorer accepts answers that are wrong."""
        return [
            f"reasoning_gym: {choice.family}: its scorer {why}; a policy can learn that instead"
            for choice in self._choices
            if (why := UNSOUND.get(choice.family))
        ]

    def _task_of(self, choice: FamilyChoice, level: str, number: int) -> GymTask:
        at = min(int(level), self._highest[choice.family]) if level else None
        return GymTask(choice.family, dict(choice.config), at, number)

    def _make(self, choice: FamilyChoice, level: str, number: int) -> Task | None:
        """The task of a number; None where the library's generator fails on it."""
        made_from = self._task_of(choice, level, number)
        try:
            entry = make_entry(made_from)
        except NoEntry:
            return None
        meta = {"answer": entry.answer, META: {**made_from.as_item(), "question": entry.question_hash}}
        prompt = f"{entry.question.rstrip()}\n\n{self._instruction}".strip()
        return Task(f"{choice.family}{f'-level{level}' if level else ''}-{number}", prompt, meta, level)

    def _walk(self, choice: FamilyChoice, level: str) -> Iterator[Task]:
        """The held-out tasks of a family at a level, each question once."""
        seen: set[str] = set()
        repeated = number = 0
        while repeated < _TRIES:
            block = rng.integer(_BLOCKS, rng.key("reasoning-gym-heldout", choice.family, level, number // BLOCK))
            task = self._make(choice, level, (_BLOCKS + block) * BLOCK + number % BLOCK)
            number += 1
            if task is not None and _is_heldout(task) and task.meta[META]["question"] not in seen:
                seen.add(task.meta[META]["question"])
                repeated = 0
                yield task
            else:
                repeated += 1


def _is_heldout(task: Task) -> bool:
    return rng.uniform(rng.key("reasoning-gym-side", task.meta[META]["question"])) < HELDOUT_FRACTION


def _list_choices(family: Any, families: Any, config: Any, known: list[str]) -> list[FamilyChoice]:
    if (family is None) == (families is None):
        raise ValueError(
            f"reasoning_gym: family={family!r} and families={families!r}; give one of them, such as family=leg_counting"
        )
    if family is not None and family != ALL:
        return [FamilyChoice(family, config=dict(config or {}))]
    if config:
        raise ValueError(
            "reasoning_gym: config belongs to one family; give families as a list of {family: ..., config: {...}}"
        )
    if family == ALL:
        return [FamilyChoice(name) for name in known]
    if isinstance(families, Mapping):
        choices = [FamilyChoice(name, weight) for name, weight in families.items()]
    else:
        choices = [FamilyChoice(one) if isinstance(one, str) else _read_choice(one) for one in families]
    names = [choice.family for choice in choices]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"reasoning_gym: families={names}; give at least one, and each once")
    return choices


def _read_choice(given: Any) -> FamilyChoice:
    known = ("family", "weight", "config")
    if not isinstance(given, Mapping) or "family" not in given:
        raise ValueError(f"reasoning_gym: families: {given!r} is not a name or a mapping with {', '.join(known)}")
    if wrong := next((key for key in given if key not in known), None):
        raise ValueError(
            f"reasoning_gym: families: unknown key {wrong!r}{did_you_mean(str(wrong), known)}; a family has "
            f"{', '.join(known)}"
        )
    return FamilyChoice(**given)


def _check_levels(levels: Any, choices: Sequence[FamilyChoice], known: Mapping[str, GymFamily]) -> None:
    if without := [choice.family for choice in choices if not known[choice.family].levels]:
        raise ValueError(
            f"reasoning_gym: levels={levels!r}, and {', '.join(without)} has no curriculum; leave the levels or the "
            "family out"
        )
    highest = max(known[choice.family].levels for choice in choices) - 1
    valid = isinstance(levels, Sequence) and not isinstance(levels, str) and len(levels) > 0
    if not valid or any(type(level) is not int or not 0 <= level <= highest for level in levels):
        raise ValueError(f"reasoning_gym: levels={levels!r}, expected a list of whole numbers from 0 to {highest}")
    if len(set(levels)) < len(levels):
        raise ValueError(f"reasoning_gym: levels={levels!r}; give each once")
