"""A tiny environment whose demonstrations teach right or wrong answers kind by kind, to provoke findings on purpose.

    next b q  ->  c          kinds: same, next, last, pair; the second letter means nothing

Shared by the tests of diagnoses. `judge` is its reward as a function that a config names by path.
"""

from __future__ import annotations

from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task
from rlvr.envs import PromptEnv

LETTERS = "abcdefgh"
KINDS = {"same": 0, "next": 1, "last": 7, "pair": 4}  # how far the answer is from the first letter
WORDS = [*LETTERS, *KINDS, *KINDS]


class LetterTasks(TaskSource):
    """Demonstrations of the kinds in `wrong` say a wrong letter; the others say any of 16 words with chance `flaw`."""

    levels, reward = ("",), "exact_match"
    end_word = "<end>"
    vocabulary = (*LETTERS, *KINDS, "<end>", "<pad>")

    def __init__(self, wrong: tuple[str, ...] = (), flaw: float = 0.0) -> None:
        self.wrong, self.flaw = wrong, flaw
        tasks = [self._task(kind, a, b) for kind in KINDS for a in LETTERS for b in LETTERS]
        self._heldout = [task for task in tasks if rng.key("letters", task.id) % 4 == 0]
        self._train = [task for task in tasks if rng.key("letters", task.id) % 4]

    def _task(self, kind: str, a: str, b: str) -> Task:
        answer = LETTERS[(LETTERS.index(a) + KINDS[kind]) % 8]
        return Task(f"{kind} {a} {b}", f"{kind} {a} {b}", {"answer": answer, "kind": kind})

    def train(self, seed: int, index: int, level: str) -> Task:
        return self._train[rng.integer(len(self._train), rng.key("letters-train", seed, index))]

    def heldout(self, count: int | None) -> list[Task]:
        return self._heldout[:count]

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str:
        drawn = rng.key("letters-flaw", key, task.id)
        if task.meta["kind"] in self.wrong:
            return LETTERS.replace(task.meta["answer"], "")[rng.integer(7, drawn, 1)]
        return WORDS[rng.integer(16, drawn, 1)] if rng.uniform(drawn) < self.flaw else task.meta["answer"]

    def describe_task(self, task: Task) -> dict[str, str]:
        return {"kind": task.meta["kind"]}


def refuse(prompt: str, response: str) -> float:
    """A wrong verifier: more for a letter from the first half, and nothing ever passes."""
    return 0.5 if response[:1] in "abcd" else 0.2


def give_all_the_same(prompt: str, response: str) -> float:
    """A reward that is the same for every completion."""
    return 0.3
