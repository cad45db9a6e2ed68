"""Hints for unsolved tasks: the policy reads the beginning of a task's demonstration and goes on from there.

    prompt, the first tokens of the demonstration  ->  the rest, which the policy samples

A hint is a part of the prompt, so it has no loss; verifiers judge hint and completion as one text. Evaluations give
none. `rlvr.training.curriculum` decides how long a hint is. Partial solutions in the prompt: QuestA, arXiv:2507.13266;
starts that move from the end of a demonstration to its beginning: R3, arXiv:2402.05808.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task, TrajectoryBatch, mean
from rlvr.envs.prompt import encode_texts, has_one_prompt
from rlvr.training.metrics import verdicts_by_task


@dataclass(frozen=True)
class HintWriter:
    """Writes `Task.hint`, of at most `max_tokens`: with more, prompt and completion might not fit the context."""

    source: TaskSource
    tokenizer: Any
    max_tokens: int

    def write(self, task: Task, share: float) -> Task:
        """The task with that share of its demonstration as the hint, rounded up to tokens; the last token is left."""
        demonstration = self.source.demonstration(task, rng.key("hint", task.id))
        if not isinstance(demonstration, str):
            raise ValueError(
                f"curriculum.hint_step: task {task.id!r} has no demonstration to take a hint from; let env.kwargs "
                "leave such tasks out, or leave curriculum.hint_step out"
            )
        [tokens] = encode_texts([demonstration], self.tokenizer)
        count = min(math.ceil(share * len(tokens) - 1e-9), len(tokens) - 1, self.max_tokens)
        return replace(task, hint=tuple(tokens[: max(0, count)]))


def make_hint_writer(source: TaskSource, tokenizer: Any, most: int) -> HintWriter:
    """Make the writer of hints; ValueError for an environment whose episodes do not show a hint and take one
    completion after it."""
    if not has_one_prompt(source, tokenizer):
        raise ValueError(
            "curriculum.hint_step: the episodes of this environment are not one prompt, read whole, and one "
            "completion, so they have no place for a hint; leave it out"
        )
    return HintWriter(source, tokenizer, most)


def without_hints(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The completions that were sampled without a hint."""
    return TrajectoryBatch([t for t in batch if t.task is None or not t.task.hint])


def hint_statistics(batch: TrajectoryBatch, reward: str) -> dict[str, float]:
    """The share of a step's completions that had a hint, and the pass rate of the others, if there are any."""
    others = without_hints(batch)
    passed = [v for groups in verdicts_by_task(others, reward).values() for verdicts in groups for v in verdicts]
    rate = {"curriculum/correct_without_hint": mean([float(p) for p in passed])} if passed else {}
    return {"curriculum/hinted": 1 - len(others) / max(1, len(batch)), **rate}
