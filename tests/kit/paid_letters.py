"""The letter tasks of `table_trainer` in episodes that give a reward of their own: 0.5 for the first answer's `b`."""

from __future__ import annotations

from typing import Any

from rlvr.core.messages import ModelInput
from rlvr.core.protocols import StepResult
from rlvr.core.types import Task
from tests.kit.table_trainer import Letters


class PaidEpisode:
    """Two answers; a first one with a `b` in it earns 0.5, and the verifier judges the second."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self.seen, self.tokenizer, self.turn = tokenizer.encode(task.prompt), tokenizer, 0

    async def initial_observation(self) -> tuple[ModelInput, Any]:
        return ModelInput(self.seen), []

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        self.turn += 1
        if self.turn == 2:
            return StepResult(0.0, True)
        earned = 0.5 * ("b" in self.tokenizer.decode(action))
        return StepResult(earned, False, ModelInput([*self.seen, *action, *self.tokenizer.encode("say")]))


class PaidLetters(Letters):
    """`declared` is its own choice of `environment_weight`."""

    max_turns = 2
    vocabulary = ("say", "a", "b")

    def __init__(self, declared: float | None = None) -> None:
        super().__init__()
        self.environment_weight = declared

    def env(self, task: Task, tokenizer: Any) -> Any:
        return PaidEpisode(task, tokenizer)
