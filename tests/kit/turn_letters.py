"""Episodes of several turns with a reward for each: the environment shows a letter, the policy answers with the next.

e f  d e  a b  ...        1 / turns for every right answer, at once; what an answer earns says nothing of the others
"""

from __future__ import annotations

from typing import Any

from rlvr.core import rng
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import StepResult, TaskSource
from rlvr.core.types import Task

LETTERS = "abcdefgh"


class LetterEpisode:
    """One episode; its letters depend on the task alone."""

    def __init__(self, task: Task, tokenizer: Any, turns: int) -> None:
        self.turns, self.key, self.turn = turns, rng.key("turn-letters", task.id), 0
        self.ids = [tokenizer.encode(letter)[0] for letter in LETTERS]
        self.seen = [self.ids[self._letter()]]

    def _letter(self) -> int:
        return rng.integer(len(LETTERS), self.key, self.turn)

    async def initial_observation(self) -> tuple[ModelInput, Any]:
        return ModelInput(self.seen), self.ids

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        right = action == [self.ids[(self._letter() + 1) % len(LETTERS)]]
        self.turn += 1
        reward, metrics = right / self.turns, {"right": float(right)}
        if self.turn == self.turns:
            return StepResult(reward, True, metrics=metrics)
        self.seen = [*self.seen, *action, self.ids[self._letter()]]
        return StepResult(reward, False, ModelInput(self.seen), metrics=metrics)


class TurnLetters(TaskSource):
    levels, reward = ("",), "environment"
    vocabulary = (*LETTERS, "<end>", "<pad>")
    end_word = "<end>"

    def __init__(self, turns: int = 8) -> None:
        self.max_turns = turns

    def train(self, seed: int, index: int, level: str) -> Task:
        return Task(f"train {seed} {index}", LETTERS[0])

    def heldout(self, count: int | None) -> list[Task]:
        return [Task(f"held out {i}", LETTERS[0]) for i in range(count or 64)]

    def env(self, task: Task, tokenizer: Any) -> LetterEpisode:
        return LetterEpisode(task, tokenizer, self.max_turns)

    def demonstration(self, task: Task, key: int) -> str | None:
        return None
