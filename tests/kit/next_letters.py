"""Tasks that no random policy solves: some letters, each to be answered by the next one.

c a f =  ->  d b g        the reward is 1 for the whole answer, so a guess is right once in 8 x 8 x 8 times
"""

from __future__ import annotations

from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.envs import PromptEnv

LETTERS = "abcdefgh"


class NextLetters(TaskSource):
    levels, reward = ("",), "exact_match"
    vocabulary = (*LETTERS, "=", "<end>", "<pad>")
    end_word = "<end>"

    def __init__(self, length: int = 6) -> None:
        self.length = length

    def train(self, seed: int, index: int, level: str) -> Task:
        return self._task(f"train {seed} {index}")

    def heldout(self, count: int | None) -> list[Task]:
        return [self._task(f"held out {i}") for i in range(count or 64)]

    def _task(self, id: str) -> Task:
        key = rng.key("next-letters", id)
        places = [rng.integer(len(LETTERS), key, i) for i in range(self.length)]
        answer = " ".join(LETTERS[(place + 1) % len(LETTERS)] for place in places)
        return Task(id, " ".join([*(LETTERS[place] for place in places), "="]), {"answer": answer})

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str:
        return task.meta["answer"]
