"""`mini_mbpp`: programming problems in MBPP's format that a small transformer learns from nothing.

    Write a function to add 3 to a number, then multiply the result by 4.
    assert solve(26) == 116

A problem is one to three operations in a row (`operations`), a family the operations without their parameters. Some
families are never trained on; of the others some problems are held out, by a hash of what the program must do, so that
no other name, wording or test brings one back. All draws are counted, and what tests expect is computed by trusted
functions. Left out on purpose: branches, loops and anything else that needs more than an expression an operation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from string import printable
from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.engine.tokenizer import PIECE
from rlvr.envs.mini_mbpp.programs import (
    LETTERS,
    LIST,
    NAMES,
    NUMBER,
    OPERATIONS,
    Step,
    Steps,
    family_of,
    fits,
    result_of,
    specification_of,
    write_flawed_program,
    write_program,
    write_statement,
)
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import register_environment
from rlvr.envs.row_source import take_in_turn

LEVELS = ("1", "2", "3")  # operations in a row
ASSERTS = 3  # as MBPP has; hidden ones come on top
UNSEEN_FAMILIES = "held-out families"
_FEW = 6  # a family of fewer problems is trained on whole: one of them held out would be most of the family
_TRIES = 1000  # problems drawn in a row that are held out or have no telling tests
_INPUTS = 50  # inputs tried for a problem's tests


@register_environment("mini_mbpp")
class MiniMBPP(TaskSource):
    """Generated Python problems in MBPP's format, small enough for a model trained from scratch.

    A task's meta is its problem as the reward `code` reads it, its `family` and its `steps`.

    `visible_tests` of the three asserts are in the prompt, the reward counts all three and `hidden_tests` more.
    `heldout_fraction` of the problems of each family that is trained on are held out, and `heldout_families` of the
    families with more than one operation. A demonstration has each operation and each parameter wrong with probability
    `flaw` and, with probability `slip`, one mistake of form: a teacher that errs.
    """

    reward = "code"
    end_word = "<end>"
    pad_word: str = "<pad>"

    def __init__(
        self,
        levels: Sequence[str] = ("1", "2"),
        visible_tests: int | str = 1,
        hidden_tests: int = 2,
        heldout_fraction: float = 0.15,
        heldout_families: float = 0.15,
        flaw: float = 0.22,
        slip: float = 0.7,
    ) -> None:
        def refuse(name: str, value: Any, expected: str) -> None:
            raise ValueError(f"mini_mbpp: {name}={value!r}, expected {expected}")

        listed = isinstance(levels, (list, tuple)) and len(levels) > 0
        if not listed or any(level not in LEVELS or levels.count(level) > 1 for level in levels):
            refuse("levels", levels, f"a list of different ones of {', '.join(map(repr, LEVELS))}")
        if visible_tests != "all" and (type(visible_tests) is not int or not 0 <= visible_tests <= ASSERTS):
            refuse("visible_tests", visible_tests, f"0 to {ASSERTS}, or all")
        if type(hidden_tests) is not int or not 0 <= hidden_tests <= 20:
            refuse("hidden_tests", hidden_tests, "0 to 20")
        for name, share in (("heldout_fraction", heldout_fraction), ("heldout_families", heldout_families)):
            if not isinstance(share, (int, float)) or not 0 < share < 1:
                refuse(name, share, "a number above 0 and below 1")
        for name, chance in (("flaw", flaw), ("slip", slip)):
            if not isinstance(chance, (int, float)) or not 0 <= chance <= 1:
                refuse(name, chance, "a number from 0 to 1")
        self.levels = tuple(sorted(levels))
        self.visible = ASSERTS if visible_tests == "all" else int(visible_tests)
        self.tests, self.flaw, self.slip = ASSERTS + hidden_tests, flaw, slip
        self._problems_below, self._families_below = (int(f * 2**63) for f in (heldout_fraction, heldout_families))

    @cached_property
    def families(self) -> dict[str, list[str]]:
        """The families of programs to train on, by level: "add, multiply" and so on."""
        return {level: [f for f in _families(level) if not self.holds_out_family(f)] for level in self.levels}

    @cached_property
    def heldout_families(self) -> dict[str, list[str]]:
        """Families never trained on, by level. Every single operation is trained on."""
        return {level: [f for f in _families(level) if self.holds_out_family(f)] for level in self.levels}

    def holds_out_family(self, name: str) -> bool:
        return "," in name and rng.key("mini-mbpp-family", name) < self._families_below

    def holds_out(self, steps: Steps) -> bool:
        """Whether a problem is held out; its family is one that is trained on."""
        many = math.prod(len(values) for step in steps for values in step.operation.parameters)
        return many >= _FEW and rng.key("mini-mbpp-heldout", specification_of(steps)) < self._problems_below

    def train(self, seed: int, index: int, level: str) -> Task:
        """The index-th training problem of a level. Families are equally likely; held-out problems are never drawn."""
        if level not in self.levels:
            raise ValueError(f"mini_mbpp: level {level!r}; the levels are {', '.join(self.levels)}")
        key = rng.key("mini-mbpp-train", seed, level, index)
        for attempt in range(_TRIES):
            steps = self._steps(self.families[level], rng.key("mini-mbpp-problem", key, attempt))
            task = None if self.holds_out(steps) else self._task(steps, level, key)
            if task is not None:
                return task
        raise ValueError(f"mini_mbpp: level {level} has no training problem left; lower heldout_fraction")

    def heldout(self, count: int | None) -> list[Task]:
        """`count` different held-out problems of families that are trained on, the levels in turn.

        Fewer where there are no more (a level of single operations has a few dozen). None: 1000.
        """
        tasks = [self._enumerate_tasks(level, self.families[level], whole=False) for level in self.levels]
        return take_in_turn(tasks, 1000 if count is None else count)

    def extra_heldout(self, count: int) -> dict[str, list[Task]]:
        """`count` different problems of the families that are never trained on."""
        tasks = [
            self._enumerate_tasks(level, names, whole=True) for level, names in self.heldout_families.items() if names
        ]
        return {UNSEEN_FAMILIES: take_in_turn(tasks, count)}

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def describe_task(self, task: Task) -> dict[str, str]:
        """The family, and its operations one by one: a family alone has few problems."""
        steps = [name for name, *_ in task.meta["steps"]]
        return {"family": task.meta["family"], "first operation": steps[0], "last operation": steps[-1]}

    def demonstration(self, task: Task, key: int) -> str:
        """A completion without its end token: the erring teacher's program."""
        steps = tuple(Step(name, tuple(parameters)) for name, *parameters in task.meta["steps"])
        return write_flawed_program(
            steps, task.meta["name"], rng.key("mini-mbpp-shown", key, task.id), self.flaw, self.slip
        )

    @cached_property
    def vocabulary(self) -> list[str]:
        """The pieces of every statement and program of up to two operations, and single characters for all else."""
        texts = [f"{before}{name}" for name in NAMES for before in ("", " ")]
        texts += [f"{lead}{c}" for lead in ("", " ", ", ") for c in "0123456789"] + ["assert f('a') == 'a'", "f([1])"]
        for name in [*_families("1"), *_families("2")]:
            for key in range(6):
                steps = self._steps([name], rng.key("mini-mbpp-words", name, key))
                texts += [write_statement(steps, key), write_program(steps, NAMES[0], key)]
        texts += [f"'{letter}'" for letter in LETTERS]
        found = sorted({piece for text in texts for piece in re.findall(PIECE, text)})
        return [*found, *(c for c in printable if c not in found)]

    def _steps(self, families: Sequence[str], key: int) -> Steps:
        """Draw one of these families and its parameters; no value is used twice."""
        position, chosen = 1, list[Step]()
        for name in families[rng.integer(len(families), key)].split(", "):
            parameters: list[str] = []
            for values in OPERATIONS[name].parameters:
                left = [value for value in values if value not in parameters]
                parameters.append(left[rng.integer(len(left), key, position)])
                position += 1
            chosen.append(Step(name, tuple(parameters)))
        return tuple(chosen)

    def _enumerate_tasks(self, level: str, families: Sequence[str], *, whole: bool) -> Iterator[Task]:
        """Different problems of these families in a fixed order: all with `whole`, else only held-out ones.

        Ends when draws have found no new problem for a while.
        """
        key, seen = rng.key("mini-mbpp-walk", level, int(whole)), set[str]()
        attempt = last = 0
        while families and attempt - last < 4 * len(families) + 200:
            attempt += 1
            steps = self._steps(families, rng.key("mini-mbpp-problem", key, attempt))
            name = specification_of(steps)
            if name in seen or not (whole or self.holds_out(steps)):
                continue
            task = self._task(steps, level, rng.key("mini-mbpp-task", key, attempt))
            if task is not None:
                seen.add(name)
                last = attempt
                yield task

    def _task(self, steps: Steps, level: str, key: int) -> Task | None:
        """The problem in words and tests; None if no inputs were found that reveal a wrong program."""
        name = NAMES[rng.integer(len(NAMES), key)]
        inputs = self._inputs(steps, rng.key("mini-mbpp-inputs", key))
        if not inputs:
            return None
        tests = [f"assert {name}({value!r}) == {result_of(steps, value)!r}" for value in inputs]
        said = write_statement(steps, rng.key("mini-mbpp-words", key))
        meta = {
            "statement": said,
            "tests": tests,
            "solution": write_program(steps, name, rng.key("mini-mbpp-style", key)),
            "family": family_of(steps),
            "name": name,
            "steps": [[step.name, *step.parameters] for step in steps],
        }
        prompt = "\n".join([said, *tests[: self.visible], ""])
        return Task(f"{specification_of(steps)} [{name} {key % 10**6:06d}]", prompt, meta, level)

    def _inputs(self, steps: Steps, key: int) -> list[Any]:
        """Different inputs that together tell the program from one without any of its steps, and from a constant.

        None where there are none: sorting a list matters little to its sum.
        """
        letters = [p for step in steps for p in step.parameters if p in LETTERS]
        shorter = [steps[:i] + steps[i + 1 :] for i in range(len(steps))]
        idle, chosen, results = {rest for rest in shorter if fits(rest, steps)}, list[Any](), list[Any]()
        for attempt in range(_INPUTS):
            value = draw_input(steps[0].operation.takes, letters, rng.key("mini-mbpp-input", key, attempt))
            result = result_of(steps, value)
            still = {rest for rest in idle if result_of(rest, value) == result}
            is_last = len(chosen) == self.tests - 1
            if value in chosen or result in (None, [], "") or (is_last and still):
                continue
            chosen.append(value)
            results.append(result)
            idle = still
            if is_last:
                return chosen if any(result != results[0] for result in results) else []
        return []


def _families(level: str) -> list[str]:
    """Every chain of as many different operations as the level has, each of which takes the type that the one before
    it returns."""
    chains = [(name,) for name in OPERATIONS]
    for _ in range(int(level) - 1):
        chains = [
            (*chain, name)
            for chain in chains
            for name, operation in OPERATIONS.items()
            if operation.takes == OPERATIONS[chain[-1]].gives and name not in chain
        ]
    return [", ".join(chain) for chain in chains]


def draw_input(kind: str, letters: Sequence[str], key: int) -> Any:
    """A number of two digits, three to five digits, or a word of three to five letters, some of them `letters`."""
    if kind == NUMBER:
        return 10 + rng.integer(90, key)
    size = 3 + rng.integer(3, key)
    if kind == LIST:
        return [rng.integer(10, key, 1 + i) for i in range(size)]
    known = [*letters, *(LETTERS[rng.integer(len(LETTERS), key, 10 + i)] for i in range(3))]
    return "".join(known[rng.integer(len(known), key, 1 + i)] for i in range(size))
