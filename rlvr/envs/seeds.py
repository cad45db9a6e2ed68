"""Environment `seeds`: tasks that are a number each, for games and environments that make their episodes by a seed.

env: {name: "my_game:Game", kwargs: {inner: seeds, inner_kwargs: {prompt: "Play well.", heldout: 200}}}
"""

from __future__ import annotations

from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import Env, TaskSource
from rlvr.core.types import Task
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import register_environment
from rlvr.reward.reward_options import check_integer

_RANGE = 1 << 30  # seeds to train on are below, held-out ones from here


@register_environment("seeds")
class SeedSource(TaskSource):
    """Tasks without rows: the `seed` of an episode, in a task's meta. `prompt` stands before what the episode says.

    With `tasks` the training seeds are 0 to tasks - 1; without, they are drawn from a billion. `heldout` others are
    held out.
    """

    levels, reward = ("",), "environment"

    def __init__(self, prompt: str = "", tasks: int | None = None, heldout: int = 100) -> None:
        if not isinstance(prompt, str):
            raise ValueError(f"seeds: prompt={prompt!r:.80}, expected a text")
        if tasks is not None:
            check_integer("seeds: tasks", tasks, 1)
            self.size = lambda level: tasks  # pyright: ignore[reportAttributeAccessIssue] - a member that may be None
        check_integer("seeds: heldout", heldout, 0)
        self._prompt, self._tasks, self._heldout = prompt, tasks, heldout

    def _task(self, seed: int) -> Task:
        return Task(f"seed-{seed}", self._prompt, {"seed": seed})

    def train(self, seed: int, index: int, level: str) -> Task:
        if self._tasks is None:
            return self._task(rng.integer(_RANGE, rng.key("seeds", seed, index)))
        epoch, place = divmod(index, self._tasks)
        return self._task(rng.permutation(self._tasks, rng.key("seeds", seed, epoch))[place])

    def heldout(self, count: int | None) -> list[Task]:
        wanted = self._heldout if count is None else min(count, self._heldout)
        return [self._task(_RANGE + number) for number in range(wanted)]

    def env(self, task: Task, tokenizer: Any) -> Env:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> None:
        return None
