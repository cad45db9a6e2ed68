"""One programming task whose shown test also passes wrong programs: x + 2 and x ** 2 are 4 for 2, as 2 * x is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.envs.prompt import PromptEnv

SHOWN, HIDDEN = "assert double(2) == 4", ["assert double(3) == 6", "assert double(5) == 10"]
RIGHT, PLUS, SQUARE = "double = lambda x: 2 * x", "double = lambda x: x + 2", "double = lambda x: x ** 2"


class Doubling(TaskSource):
    levels = ("1",)
    reward = "code"

    def __init__(self, solution: str = RIGHT, shown: str = SHOWN, tests: Sequence[Any] = (SHOWN, *HIDDEN)) -> None:
        meta = {"tests": list(tests), "solution": solution}
        self._meta, self._prompt = meta, f"Double it.\n{shown}\n"

    def train(self, seed: int, index: int, level: str) -> Task:
        return Task(f"{seed}-{index}", self._prompt, dict(self._meta), level)

    def heldout(self, count: int | None) -> list[Task]:
        return [Task("held out", self._prompt, dict(self._meta), "1")][:count]

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str:
        return task.meta["solution"]
